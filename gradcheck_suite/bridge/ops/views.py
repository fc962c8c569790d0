"""Views, slices and transpositions. JAX copies in place of views: the exported graph has no in-place writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


@register_op("aten.alias", "aten.clone", "aten.contiguous", "aten.lift_fresh_copy")
def alias(self: Array, memory_format: Any = None) -> Array:
    """Return self."""
    del memory_format
    return self


@register_op("aten.detach")
def detach(self: Array) -> Array:
    """Return self without gradient."""
    return lax.stop_gradient(self)


@register_op("aten.view.default", "aten._unsafe_view", "aten.reshape")
def view(self: Array, size: Sequence[int] = (), shape: Sequence[int] = ()) -> Array:
    """Return self reshaped; -1 is inferred."""
    return jnp.reshape(self, tuple(size) or tuple(shape))


@register_op("aten.permute")
def permute(self: Array, dims: Sequence[int]) -> Array:
    """Return self with its axes permuted."""
    return jnp.transpose(self, tuple(dims))


@register_op("aten.transpose.int")
def transpose(self: Array, dim0: int, dim1: int) -> Array:
    """Return self with two axes exchanged."""
    return self if self.ndim == 0 else jnp.swapaxes(self, dim0, dim1)


@register_op("aten.t")
def t(self: Array) -> Array:
    """Return the transposed matrix."""
    return self.T


@register_op("aten.expand")
def expand(self: Array, size: Sequence[int], implicit: bool = False) -> Array:
    """Return self with axes of length 1 broadcast; -1 keeps an axis."""
    del implicit
    lead = len(size) - self.ndim
    full = [self.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    return jnp.broadcast_to(self, full)


@register_op("aten.squeeze.default")
def squeeze(self: Array) -> Array:
    """Return self without axes of length 1."""
    return jnp.squeeze(self)


@register_op("aten.squeeze.dim", "aten.squeeze.dims")
def squeeze_dims(self: Array, dim: int | Sequence[int]) -> Array:
    """Return self without those of the given axes that have length 1."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    if self.ndim == 0:
        return self
    return jnp.squeeze(self, tuple(d % self.ndim for d in dims if self.shape[d] == 1))


@register_op("aten.unsqueeze")
def unsqueeze(self: Array, dim: int) -> Array:
    """Return self with a new axis of length 1."""
    return jnp.expand_dims(self, dim)


@register_op("aten.slice.Tensor")
def slice_(self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Return self[start:end:step] along an axis."""
    index = [slice(None)] * self.ndim
    index[dim] = slice(start, end, step)
    return self[tuple(index)]


@register_op("aten.select.int")
def select(self: Array, dim: int, index: int) -> Array:
    """Return one index of an axis, without that axis."""
    return lax.index_in_dim(self, index, dim, keepdims=False)


@register_op("aten.diagonal")
def diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """Return the diagonal of two axes as the last axis."""
    return jnp.diagonal(self, offset, dim1, dim2)


@register_op("aten.unfold")
def unfold(self: Array, dimension: int, size: int, step: int) -> Array:
    """Return the windows along an axis; the new last axis is the window."""
    if self.ndim == 0:
        return jnp.broadcast_to(self, (size,))
    starts = np.arange(0, self.shape[dimension] - size + 1, step)
    taken = jnp.take(self, starts[:, None] + np.arange(size), axis=dimension)
    return jnp.moveaxis(taken, dimension % self.ndim + 1, -1)


@register_op("aten.as_strided")
def as_strided(self: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Array:
    """Return strided entries of self's memory, taken to be contiguous: the strides of a view are not known here."""
    place = np.full((), storage_offset or 0)
    for n, s in zip(size, stride, strict=True):
        place = place[..., None] + np.arange(n) * s
    return self.reshape(-1)[place]


@register_op("aten.split.Tensor", "aten.unsafe_split.Tensor")
def split(self: Array, split_size: int, dim: int = 0) -> tuple[Array, ...]:
    """Return pieces of one size; the last one may be smaller."""
    if split_size == 0:
        return (self,)
    return tuple(jnp.split(self, list(range(split_size, self.shape[dim], split_size)), axis=dim))


@register_op("aten.split_with_sizes", "aten.unsafe_split_with_sizes")
def split_with_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    """Return pieces of the given sizes."""
    return tuple(jnp.split(self, np.cumsum(split_sizes)[:-1].tolist(), axis=dim))


@register_op("aten.unbind.int")
def unbind(self: Array, dim: int = 0) -> tuple[Array, ...]:
    """Return the slices along an axis, each without it."""
    return tuple(lax.index_in_dim(self, i, dim, keepdims=False) for i in range(self.shape[dim]))


@register_op("aten.broadcast_tensors")
def broadcast_tensors(tensors: Sequence[Array]) -> tuple[Array, ...]:
    """Return the tensors broadcast to their common shape."""
    return tuple(jnp.broadcast_arrays(*tensors))
