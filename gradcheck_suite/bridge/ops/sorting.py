"""Sorting, and cumulative sums, products and extrema."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.reductions import as_accumulated


def _sorted(self: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Return the sorted values and their indices; the sort is stable, and NaN is the largest."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    order = jnp.argsort(lax.stop_gradient(self), axis=dim, stable=True, descending=descending).astype(jnp.int64)
    return jnp.take_along_axis(self, order, axis=dim), order


@register_op("aten.sort.default")
def sort(self: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Return the sorted values and their indices."""
    return _sorted(self, dim, descending)


@register_op("aten.sort.stable")
def sort_stable(
    self: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """Return the sorted values and their indices; equal values keep their order."""
    del stable
    return _sorted(self, dim, descending)


@register_op("aten.argsort.default")
def argsort(self: Array, dim: int = -1, descending: bool = False) -> Array:
    """Return the indices that sort the tensor."""
    return _sorted(self, dim, descending)[1]


register_op("aten.argsort.stable")(lambda self, *, stable, dim=-1, descending=False: _sorted(self, dim, descending)[1])


@register_op("aten.topk")
def topk(self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """Return the k largest values, in descending order, and their indices."""
    del sorted
    values, order = _sorted(self, dim, largest)
    if self.ndim == 0:
        return values, order
    return tuple(lax.slice_in_dim(x, 0, k, axis=dim % self.ndim) for x in (values, order))  # type: ignore[return-value]


@register_op("aten.cumsum")
def cumsum(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """Return cumulative sums, int64 for integers."""
    x = as_accumulated(self, dtype)
    return x if x.ndim == 0 else jnp.cumsum(x, axis=dim)


@register_op("aten.cumprod")
def cumprod(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """Return cumulative products; the gradient is right where factors are 0, too."""
    x = as_accumulated(self, dtype)
    return x if x.ndim == 0 or x.size == 0 else lax.associative_scan(jnp.multiply, x, axis=dim % x.ndim)


@register_op("aten.logcumsumexp")
def logcumsumexp(self: Array, dim: int) -> Array:
    """Return the logarithms of cumulative sums of exponentials."""
    return self if self.ndim == 0 or self.size == 0 else lax.cumlogsumexp(self, axis=dim % self.ndim)


def _running(self: Array, dim: int, better: Any) -> tuple[Array, Array]:
    if self.ndim == 0 or self.size == 0:
        return self, jnp.zeros(self.shape, jnp.int64)
    axis = dim % self.ndim
    detached = lax.stop_gradient(self)
    shape = [1] * self.ndim
    shape[axis] = self.shape[axis]
    place = jnp.broadcast_to(jnp.arange(self.shape[axis]).reshape(shape), self.shape)

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        wins = better(b[0], a[0]) | jnp.isnan(b[0])
        wins = wins & ~(jnp.isnan(a[0]) & ~jnp.isnan(b[0]))
        return jnp.where(wins, b[0], a[0]), jnp.where(wins, b[1], a[1])

    _, index = lax.associative_scan(later, (detached, place), axis=axis)
    return jnp.take_along_axis(self, index, axis=axis), index.astype(jnp.int64)


@register_op("aten.cummax")
def cummax(self: Array, dim: int) -> tuple[Array, Array]:
    """Return the cumulative maximum and its index, the last of equal entries."""
    return _running(self, dim, jnp.greater_equal)


@register_op("aten.cummin")
def cummin(self: Array, dim: int) -> tuple[Array, Array]:
    """Return the cumulative minimum and its index, the last of equal entries."""
    return _running(self, dim, jnp.less_equal)
