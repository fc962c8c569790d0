"""Concatenation, repetition, flips, triangles and writes into views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from gradcheck_suite.bridge.op_table import (
    Array,
    default_float,
    is_inexact,
    jax_dtype,
    promote,
    register_op,
    result_dtype,
)

# Views, slices and transpositions. JAX copies in place of views: the exported graph has no in-place writes.


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


# Tensor creation: constants, ranges, identity matrices, triangle indices.


def _or_default(dtype: torch.dtype | None) -> Any:
    return default_float() if dtype is None else jax_dtype(dtype)


@register_op("aten.full")
def full(size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor filled with one value, of the value's default dtype where none is given."""
    return jnp.full(tuple(size), fill_value, result_dtype(fill_value) if dtype is None else jax_dtype(dtype))


@register_op("aten.full_like")
def full_like(self: Array, fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor of self's shape filled with one value."""
    return jnp.full(self.shape, fill_value, self.dtype if dtype is None else jax_dtype(dtype))


@register_op("aten.new_full")
def new_full(self: Array, size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor filled with one value, of self's dtype where none is given."""
    return jnp.full(tuple(size), fill_value, self.dtype if dtype is None else jax_dtype(dtype))


@register_op("aten.fill")
def fill(self: Array, value: Any) -> Array:
    """Return a tensor of self's shape filled with `value`, through which the gradient flows."""
    return jnp.broadcast_to(jnp.asarray(value).astype(self.dtype), self.shape)


def _constant(value: int, name: str) -> None:
    def new(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Array:
        return jnp.full(tuple(size), value, _or_default(dtype))

    def like(self: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
        return full_like(self, value, dtype)

    def new_like(self: Array, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Array:
        return new_full(self, size, value, dtype)

    register_op(f"aten.{name}")(new)
    register_op(f"aten.{name}_like")(like)
    register_op(f"aten.new_{name}")(new_like)


_constant(0, "zeros")
_constant(1, "ones")
_constant(0, "empty")
register_op("aten.empty.memory_format")(lambda size, dtype=None, **_: jnp.zeros(tuple(size), _or_default(dtype)))
register_op("aten.empty_strided", "aten.empty_permuted")(
    lambda size, stride, dtype=None, **_: jnp.zeros(tuple(size), _or_default(dtype))
)
register_op("aten.new_empty_strided")(lambda self, size, stride, dtype=None, **_: new_full(self, size, 0, dtype))


@register_op("aten.zero")
def zero(self: Array) -> Array:
    """Return zeros of self's shape."""
    return jnp.zeros_like(self)


@register_op("aten.scalar_tensor")
def scalar_tensor(s: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a zero-dimensional tensor."""
    return jnp.asarray(s, _or_default(dtype))


def _range_dtype(dtype: torch.dtype | None, *numbers: Any) -> Any:
    if dtype is not None:
        return jax_dtype(dtype)
    return jnp.dtype(jnp.int64) if all(isinstance(n, int) for n in numbers) else default_float()


@register_op("aten.arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return start, start + step, ... below end."""
    kind = _range_dtype(dtype, start, end, step)
    count = len(range(start, end, step)) if all(isinstance(n, int) for n in (start, end, step)) else None
    if count is None:
        count = max(0, int(-(-(end - start) // step)))
    wide = jnp.float64 if jnp.issubdtype(kind, jnp.floating) else kind
    return (jnp.asarray(start, wide) + jnp.arange(count).astype(wide) * jnp.asarray(step, wide)).astype(kind)


register_op("aten.arange.start")(lambda start, end, dtype=None, **_: arange(start, end, 1, dtype))
register_op("aten.arange.default")(lambda end, dtype=None, **_: arange(0, end, 1, dtype))


@register_op("aten.linspace")
def linspace(start: Any, end: Any, steps: int, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return `steps` evenly spaced numbers from start to end, both included."""
    kind = _or_default(dtype)
    return jnp.linspace(start, end, steps, dtype=jnp.float64).astype(kind)


@register_op("aten.logspace")
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return base to the power of `linspace`."""
    return jnp.power(base, jnp.linspace(start, end, steps, dtype=jnp.float64)).astype(_or_default(dtype))


@register_op("aten.eye.m")
def eye(n: int, m: int, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return an n x m matrix with ones on the diagonal."""
    return jnp.eye(n, m, dtype=_or_default(dtype))


register_op("aten.eye.default")(lambda n, dtype=None, **_: eye(n, n, dtype))


def _triangle(indices: Any, row: int, col: int, offset: int, dtype: torch.dtype | None) -> Array:
    return jnp.stack(indices(row, offset, col)).astype(jax_dtype(dtype or torch.int64))


@register_op("aten.tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return the row and column indices of the lower triangle, (2, count)."""
    return _triangle(jnp.tril_indices, row, col, offset, dtype)


@register_op("aten.triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return the row and column indices of the upper triangle, (2, count)."""
    return _triangle(jnp.triu_indices, row, col, offset, dtype)


# Operations without arithmetic: assertions, sizes, constraints for torch's compiler.


@register_op(
    "aten._assert_async",
    "aten._assert_scalar",
    "aten._assert_tensor_metadata",
    "aten._linalg_check_errors",
    "aten.sym_constrain_range_for_size",
)
def nothing(*_: Any, **__: Any) -> None:
    """Return nothing: torch checked the assertion at export."""


@register_op("aten.sym_size.int")
def sym_size(self: Array, dim: int) -> int:
    """Return the length of an axis."""
    return self.shape[dim]


@register_op("aten.sym_numel")
def sym_numel(self: Array) -> int:
    """Return the number of entries."""
    return self.size


@register_op("aten._local_scalar_dense", dynamic=True)
def item(self: Array) -> bool | int | float | complex:
    """Return the tensor's only value as a Python number."""
    number: bool | int | float | complex = lax.stop_gradient(self).item()
    return number


# Reads by index. Negative indices count from the end; torch rejected indices out of range at export.


def fancy(self: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """Return torch's list of index tensors as a JAX index; a boolean mask becomes the indices of its True entries."""
    index: list[Any] = []
    for tensor in indices:
        if tensor is None:
            index.append(slice(None))
        elif tensor.dtype in (jnp.bool_, jnp.uint8):
            index.extend(jnp.asarray(places) for places in np.nonzero(np.asarray(lax.stop_gradient(tensor))))
        else:
            index.append(tensor)
    return tuple(index[: self.ndim] if self.ndim else index)


@register_op("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(self: Array, indices: Sequence[Array | None]) -> Array:
    """Return self[i, j, ...]; None selects a whole axis."""
    return self[fancy(self, indices)]


@register_op("aten.index_select")
def index_select(self: Array, dim: int, index: Array) -> Array:
    """Return the slices along `dim` at these indices."""
    if self.ndim == 0:
        return self
    return jnp.take(self, index.reshape(-1), axis=dim)


@register_op("aten.gather")
def gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """Return out[i, j] = self[index[i, j], j] for dim 0; `index` may be smaller than self along the other axes."""
    del sparse_grad
    if self.ndim == 0 or index.ndim == 0:
        return jnp.reshape(self.reshape(-1)[index.reshape(-1)], index.shape)
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    cut = tuple(slice(None) if a == dim % self.ndim else slice(n) for a, n in enumerate(index.shape))
    return jnp.take_along_axis(self[cut], index, axis=dim)


@register_op("aten.take")
def take(self: Array, index: Array) -> Array:
    """Return the entries at these indices of the flattened tensor."""
    return self.reshape(-1)[index]


@register_op("aten.masked_select", dynamic=True)
def masked_select(self: Array, mask: Array) -> Array:
    """Return the entries where the mask is True, (count,)."""
    x, m = jnp.broadcast_arrays(self, lax.stop_gradient(mask))
    return x.reshape(-1)[np.flatnonzero(np.asarray(m))]


@register_op("aten.nonzero", dynamic=True)
def nonzero(self: Array) -> Array:
    """Return the indices of the nonzero entries, (count, axes)."""
    return jnp.asarray(np.argwhere(np.asarray(lax.stop_gradient(self))))


@register_op("aten.repeat_interleave.self_int")
def repeat_interleave_int(self: Array, repeats: int, dim: int | None = None, output_size: int | None = None) -> Array:
    """Return each slice along `dim` repeated `repeats` times."""
    del output_size
    return jnp.repeat(self, repeats, axis=dim) if dim is not None else jnp.repeat(self.reshape(-1), repeats)


@register_op("aten.repeat_interleave.Tensor", dynamic=True)
def repeat_interleave(repeats: Array, output_size: int | None = None) -> Array:
    """Return each index i repeated repeats[i] times."""
    counts = np.asarray(lax.stop_gradient(repeats))
    return jnp.asarray(np.repeat(np.arange(len(counts)), counts)[:output_size]).astype(repeats.dtype)


@register_op("aten.searchsorted")
def searchsorted(
    sorted_sequence: Array,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """Return the insertion index of each value along the last axis."""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    sequence, values = promote(sorted_sequence, self)
    from_right = right or side == "right"
    compare = jnp.less_equal if from_right else jnp.less
    sequence = sequence if sequence.ndim == 1 else sequence[..., None, :]
    below = compare(sequence, values[..., None])
    return jnp.sum(below, axis=-1, dtype=jnp.int32 if out_int32 else jnp.int64)


@register_op("aten.bucketize")
def bucketize(self: Any, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    """Return the insertion index of each value among the boundaries."""
    return searchsorted(boundaries, self, out_int32, right)


@register_op("aten.one_hot")
def one_hot(self: Array, num_classes: int = -1) -> Array:
    """Return (..., classes), 1 at each entry's class."""
    if num_classes < 0:
        num_classes = int(np.asarray(lax.stop_gradient(self)).max()) + 1
    return (self[..., None] == jnp.arange(num_classes)).astype(jnp.int64)


@register_op("aten.bincount", dynamic=True)
def bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    """Return the count, or the sum of weights, of each integer."""
    length = max(minlength, int(np.asarray(lax.stop_gradient(self)).max(initial=-1)) + 1)
    if weights is None:
        return jnp.bincount(self, length=length).astype(jnp.int64)
    detached = lax.stop_gradient(weights)
    return jnp.bincount(
        self, detached if detached.dtype == jnp.float32 else detached.astype(jnp.float64), length=length
    )


@register_op("aten.histc")
def histc(self: Array, bins: int = 100, min: Any = 0, max: Any = 0) -> Array:
    """Return how many entries fall in each of `bins` equal parts of [min, max]; the gradient is 0."""
    x = lax.stop_gradient(self).reshape(-1)
    low, high = (jnp.asarray(v, x.dtype) for v in (min, max))
    if min == max:
        low, high = x.min(), x.max()
        low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.clip(((x - low) / (high - low) * bins).astype(jnp.int64), 0, bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, self.dtype).at[place].add(inside.astype(self.dtype))


# Writes by index. An overwritten entry gets gradient 0.


def _position(indices: Sequence[Array | None]) -> int:
    return next(i for i, tensor in enumerate(indices) if tensor is not None)


@register_op("aten.index_put", "aten._unsafe_index_put")
def index_put(self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """Return self with self[i, j, ...] replaced by the values, or the values added to it."""
    given = [tensor for tensor in indices if tensor is not None]
    if len(given) == 1 and given[0].dtype == jnp.bool_ and values.size == 1:
        # a single value needs no count of the True entries, so the mask may be traced
        behind = self.ndim - _position(indices) - given[0].ndim
        value = values.reshape(()).astype(self.dtype)
        mask = given[0].reshape(*given[0].shape, *[1] * behind)
        return jnp.where(mask, self + value if accumulate else value, self)
    place = self.at[fancy(self, indices)]
    values = values.astype(self.dtype)
    return place.add(values) if accumulate else place.set(values)


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij"))
    grid[dim] = index
    return tuple(grid)


def _scattered(self: Array, dim: int, index: Array, src: Any, how: str) -> Array:
    if self.ndim == 0:
        flat_src = src.reshape(-1) if hasattr(src, "reshape") else src
        return _scattered(self.reshape(1), 0, index.reshape(-1), flat_src, how).reshape(())
    if index.ndim == 0:
        index = index.reshape(1)
    if hasattr(src, "reshape") and src.ndim:
        src = src[tuple(slice(n) for n in index.shape)]
    src = jnp.broadcast_to(jnp.asarray(src).astype(self.dtype), index.shape)
    place = self.at[_along(index, dim % self.ndim)]
    return getattr(place, how)(src)


@register_op("aten.scatter.src", "aten.scatter.value")
def scatter(self: Array, dim: int, index: Array, src: Any = None, value: Any = None) -> Array:
    """Return self with self[index[i, j], j] = src[i, j] for dim 0."""
    return _scattered(self, dim, index, value if src is None else src, "set")


@register_op("aten.scatter_add")
def scatter_add(self: Array, dim: int, index: Array, src: Array) -> Array:
    """Return self with self[index[i, j], j] += src[i, j] for dim 0."""
    return _scattered(self, dim, index, src, "add")


@register_op("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_reduce_old(
    self: Array, dim: int, index: Array, src: Any = None, *, reduce: str, value: Any = None
) -> Array:
    """Return `scatter` that adds or multiplies in place of replacing."""
    how = {"add": "add", "multiply": "multiply"}[reduce]
    return _scattered(self, dim, index, value if src is None else src, how)


def _multiplied(self: Array, dim: int, index: Array, src: Array) -> Array:
    """Return self times the entries of src whose index points to it; the gradient is right where factors are 0."""
    if self.ndim == 0:
        return _multiplied(self.reshape(1), 0, index.reshape(-1), src.reshape(-1)).reshape(())
    dim = dim % self.ndim
    cut = tuple(slice(None) if a == dim else slice(n) for a, n in enumerate(index.shape))
    sources = jnp.moveaxis(src[tuple(slice(n) for n in index.shape)].astype(self.dtype), dim, -1)[..., None, :]
    sent = jnp.moveaxis(index, dim, -1)[..., None, :] == jnp.arange(self.shape[dim])[:, None]
    factors = jnp.prod(jnp.where(sent, sources, 1), axis=-1)
    return self.at[cut].multiply(jnp.moveaxis(factors, -1, dim), unique_indices=True)


def _reduced(self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool) -> Array:
    """Return torch's scatter_reduce with torch's gradients: equal extrema share the gradient evenly."""
    neutral = {"sum": 0, "mean": 0, "prod": 1}
    if reduce in neutral:
        start = self if include_self else _scattered(self, dim, index, neutral[reduce], "set")
        if reduce == "prod":
            return _multiplied(start, dim, index, src)
        total = _scattered(start, dim, index, src, "add")
        if reduce == "sum":
            return total
        count = (
            jnp.ones(self.shape, jnp.int64)
            if include_self
            else _scattered(jnp.ones(self.shape, jnp.int64), dim, index, 0, "set")
        )
        count = jnp.maximum(_scattered(count, dim, index, 1, "add"), 1).astype(self.dtype)
        return total / count if is_inexact(self) else jnp.floor_divide(total, count)
    how, edge = ("max", -jnp.inf) if reduce == "amax" else ("min", jnp.inf)
    if not is_inexact(self):
        limits = jnp.iinfo(self.dtype)
        edge = limits.min if reduce == "amax" else limits.max
    start = self if include_self else _scattered(self, dim, index, edge, "set")
    value = _scattered(lax.stop_gradient(start), dim, index, lax.stop_gradient(src), how)
    if not is_inexact(self):
        return value
    # the gradient is shared among all that equal the extreme: self's entry and the entries of src
    places = _along(index, dim % self.ndim) if self.ndim else None
    cut = src[tuple(slice(n) for n in index.shape)] if self.ndim else src.reshape(())
    chosen = value[places] if places else value
    from_src, from_self = (cut == chosen).astype(self.dtype), (start == value).astype(self.dtype)
    if not include_self:
        untouched = _scattered(jnp.ones(self.shape, jnp.bool_), dim, index, False, "set")
        from_self = from_self * untouched
    ties = jnp.maximum(_scattered(from_self, dim, index, from_src, "add"), 1)
    linear = from_self * jnp.where(jnp.isfinite(start), start, 0) / ties
    linear = _scattered(linear, dim, index, from_src * cut / (ties[places] if places else ties), "add")
    return value + (linear - lax.stop_gradient(linear))


@register_op("aten.scatter_reduce.two")
def scatter_reduce(self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool = True) -> Array:
    """Return the sum, prod, mean, amax or amin of the entries whose index points to the same element."""
    if index.size == 0:
        return self
    return _reduced(self, dim, index, src, reduce, include_self)


def _whole(self: Array, dim: int, index: Array) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % max(self.ndim, 1)), index.reshape(-1))


def _at(self: Array, dim: int, index: Array, source: Array, how: str, alpha: Any = 1) -> Array:
    if self.ndim == 0:
        return _at(self.reshape(1), 0, index, source.reshape(-1), how, alpha).reshape(())
    source = source.astype(self.dtype)
    source = source if alpha == 1 else source * jnp.asarray(alpha, self.dtype)
    return getattr(self.at[_whole(self, dim, index)], how)(source)


@register_op("aten.index_add")
def index_add(self: Array, dim: int, index: Array, source: Array, alpha: Any = 1) -> Array:
    """Return self with `source`'s slices added at these indices."""
    return _at(self, dim, index, source, "add", alpha)


@register_op("aten.index_copy")
def index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    """Return self with the slices at these indices replaced by `source`'s."""
    return _at(self, dim, index, source, "set")


@register_op("aten.index_fill")
def index_fill(self: Array, dim: int, index: Array, value: Any) -> Array:
    """Return self with the slices at these indices filled with a value."""
    if self.ndim == 0:
        return jnp.asarray(value).astype(self.dtype)
    return self.at[_whole(self, dim, index)].set(jnp.asarray(value).astype(self.dtype))


@register_op("aten.masked_fill")
def masked_fill(self: Array, mask: Array, value: Any) -> Array:
    """Return self with a value where the mask is True."""
    return jnp.where(mask, jnp.asarray(value).astype(self.dtype), self)


@register_op("aten.masked_scatter")
def masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """Return self with the entries of source, in order, where the mask is True."""
    x, m = jnp.broadcast_arrays(self, mask.astype(jnp.bool_))
    order = jnp.clip(jnp.cumsum(m.reshape(-1)) - 1, 0, source.size - 1)
    return jnp.where(m, source.reshape(-1)[order].reshape(x.shape), x)


@register_op("aten.put")
def put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """Return self with the entries at these indices of the flattened tensor replaced, or added to."""
    place = self.reshape(-1).at[index.reshape(-1)]
    values = source.reshape(-1).astype(self.dtype)
    return (place.add(values) if accumulate else place.set(values)).reshape(self.shape)


# Embedding look-ups, whose padding row gets no gradient.


def _without_padding_gradient(weight: Array, padding_idx: int) -> Array:
    """Return the weight, its padding row detached."""
    if padding_idx < 0:
        return weight
    padding = (np.arange(weight.shape[0]) == padding_idx)[:, None]
    return jnp.where(padding, lax.stop_gradient(weight), weight)


def _by_frequency(rows: Array, indices: Array, size: int) -> Array:
    """Return the rows with gradients divided by how often each index occurs."""
    counts = jnp.zeros(size, rows.dtype).at[indices.reshape(-1)].add(1)
    scale = (1 / counts[indices])[..., None]
    scaled = rows * scale
    return lax.stop_gradient(rows) + (scaled - lax.stop_gradient(scaled))


@register_op("aten.embedding")
def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    """Return weight[indices], (..., width); the row `padding_idx` gets no gradient."""
    del sparse
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    return _by_frequency(rows, indices, weight.shape[0]) if scale_grad_by_freq else rows


@register_op("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows of each bag, without its padding.

    Only torch's backward reads the other three results; they are empty here.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    bags = starts.shape[0]
    bag = jnp.sum(jnp.arange(indices.shape[0])[:, None] >= starts[None, :], axis=1) - 1
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, weight.shape[0])
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jnp.zeros(bags, jnp.int64).at[bag].add(kept)
    if mode == 2:
        member = (bag[None, :] == jnp.arange(bags)[:, None]) & kept[None, :]
        candidates = jnp.where(member[..., None], lax.stop_gradient(rows)[None], -jnp.inf)
        best = jnp.argmax(candidates, axis=1)
        out = jnp.where((counts > 0)[:, None], jnp.take_along_axis(rows, best, axis=0), 0)
    else:
        out = jnp.zeros((bags, weight.shape[1]), weight.dtype).at[bag].add(jnp.where(kept[:, None], rows, 0))
        if mode == 1:
            out = out / jnp.maximum(counts, 1)[:, None].astype(weight.dtype)
    empty = jnp.zeros(0, indices.dtype)
    return out, empty, empty, empty
