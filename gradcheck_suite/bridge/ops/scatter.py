"""Writes by index. An overwritten entry gets gradient 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_inexact
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.indexing import fancy


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
