"""Reads by index. Negative indices count from the end; torch rejected indices out of range at export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, promote
from gradcheck_suite.bridge.op_table import register_op


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
