"""Concatenation, repetition, flips, triangles and writes into views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.bridge.dtypes import Array, jax_dtype, promote
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.views import as_strided


@register_op("aten._to_copy")
def to_copy(self: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return self in another dtype; floats are truncated to integers."""
    if dtype is None:
        return self
    if jnp.iscomplexobj(self) and not dtype.is_complex:
        self = jnp.real(self)
    return self.astype(jax_dtype(dtype))


@register_op("aten.view.dtype")
def view_dtype(self: Array, dtype: torch.dtype) -> Array:
    """Return the same bits read as another dtype."""
    return self.view(jax_dtype(dtype))


@register_op("aten.copy")
def copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    """Return src in the shape and dtype of self."""
    del non_blocking
    return jnp.broadcast_to(to_copy(src, None).astype(self.dtype), self.shape)


@register_op("aten.cat")
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Return the tensors concatenated along an axis; tensors of shape (0,) are ignored."""
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    dtype = promote(*tensors)[0].dtype
    return jnp.concatenate([x.astype(dtype) for x in kept], axis=dim)


@register_op("aten.stack")
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Return the tensors stacked along a new axis."""
    return jnp.stack(promote(*tensors), axis=dim)


@register_op("aten.repeat")
def repeat(self: Array, repeats: Sequence[int]) -> Array:
    """Return self tiled, new axes in front."""
    return jnp.tile(self, tuple(repeats))


@register_op("aten.flip")
def flip(self: Array, dims: Sequence[int]) -> Array:
    """Return self reversed along some axes."""
    return self if self.ndim == 0 else jnp.flip(self, tuple(dims))


@register_op("aten.roll")
def roll(self: Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Array:
    """Return self rolled along some axes, or flattened, rolled and reshaped."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if self.ndim == 0 or self.size == 0:
        return self
    return jnp.roll(self, tuple(shifts), tuple(dims)) if dims else jnp.roll(self, shifts[0])


@register_op("aten.tril")
def tril(self: Array, diagonal: int = 0) -> Array:
    """Return the lower triangle."""
    return jnp.tril(self, diagonal)


@register_op("aten.triu")
def triu(self: Array, diagonal: int = 0) -> Array:
    """Return the upper triangle."""
    return jnp.triu(self, diagonal)


@register_op("aten.diag_embed")
def diag_embed(self: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """Return the last axis on the diagonal of two new axes."""
    n = self.shape[-1]
    size = n + abs(offset)
    rows, columns = np.arange(n) + max(-offset, 0), np.arange(n) + max(offset, 0)
    full = jnp.zeros((*self.shape[:-1], size, size), self.dtype).at[..., rows, columns].set(self)
    return jnp.moveaxis(full, (-2, -1), (dim1, dim2))


@register_op("aten.slice_scatter")
def slice_scatter(
    self: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """Return self with src written to a slice."""
    index = [slice(None)] * self.ndim
    index[dim] = slice(start, end, step)
    return self.at[tuple(index)].set(src.astype(self.dtype))


@register_op("aten.select_scatter")
def select_scatter(self: Array, src: Array, dim: int, index: int) -> Array:
    """Return self with src written to one index of an axis."""
    index = index % self.shape[dim]
    return slice_scatter(self, jnp.expand_dims(src, dim), dim, index, index + 1)


def _places(self: Array) -> Array:
    return jnp.arange(self.size).reshape(self.shape)


def _written(self: Array, places: Array, src: Array) -> Array:
    flat = self.reshape(-1).at[places.reshape(-1)].set(src.astype(self.dtype).reshape(-1))
    return flat.reshape(self.shape)


@register_op("aten.diagonal_scatter")
def diagonal_scatter(self: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """Return self with src written to a diagonal."""
    return _written(self, jnp.diagonal(_places(self), offset, dim1, dim2), src)


@register_op("aten.as_strided_scatter")
def as_strided_scatter(
    self: Array, src: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    """Return self with src written to strided positions of contiguous memory."""
    return _written(self, as_strided(_places(self), size, stride, storage_offset), src)


@register_op("aten.pixel_shuffle")
def pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    """Return (..., C, H * r, W * r) for (..., C * r^2, H, W)."""
    r, (*lead, c, h, w) = upscale_factor, self.shape
    x = self.reshape(*lead, c // (r * r), r, r, h, w)
    n = len(lead)
    return x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*lead, c // (r * r), h * r, w * r)


@register_op("aten.pixel_unshuffle")
def pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    """Return (..., C * r^2, H, W) for (..., C, H * r, W * r)."""
    r, (*lead, c, h, w) = downscale_factor, self.shape
    x = self.reshape(*lead, c, h // r, r, w // r, r)
    n = len(lead)
    return x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(*lead, c * r * r, h // r, w // r)


@register_op("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(self: Array, groups: int) -> Array:
    """Return self with channels interleaved across groups."""
    n, c, *rest = self.shape
    return self.reshape(n, groups, c // groups, *rest).swapaxes(1, 2).reshape(self.shape)


@register_op("aten.block_diag")
def block_diag(tensors: Sequence[Array]) -> Array:
    """Return the block-diagonal matrix of the tensors."""
    blocks = [jnp.atleast_2d(x) for x in promote(*tensors)]
    out = jnp.zeros((sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)), blocks[0].dtype)
    row = column = 0
    for block in blocks:
        out = out.at[row : row + block.shape[0], column : column + block.shape[1]].set(block)
        row, column = row + block.shape[0], column + block.shape[1]
    return out
