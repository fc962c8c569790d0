"""Variances, standard deviations, medians and order statistics."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_complex
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.reductions import Dims, axes_of, take_one


def _var(x: Array, axes: tuple[int, ...], correction: float, keepdim: bool) -> tuple[Array, Array]:
    """Return the variance and the mean."""
    count = math.prod(x.shape[a] for a in axes)
    centre = jnp.sum(x, axis=axes, keepdims=True) / count if count else jnp.sum(x, axis=axes, keepdims=True) * jnp.nan
    off = x - centre
    squares = jnp.real(off * jnp.conj(off)) if is_complex(x) else off * off
    total = jnp.sum(squares, axis=axes, keepdims=keepdim)
    degrees = max(count - correction, 0)
    variance = total / degrees if degrees else total * jnp.asarray(1.0, total.dtype) / 0.0
    return variance, centre if keepdim else jnp.squeeze(centre, axes)


def _root(variance: Array) -> Array:
    """Return the square root with gradient 0 at 0, as torch's `std` has it."""
    return jnp.where(variance == 0, 0, jnp.sqrt(jnp.where(variance == 0, 1, variance)))


def _correction(correction: Any) -> Any:
    return 1 if correction is None else correction


@register_op("aten.var.correction")
def var(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    """Return the variance, divided by (count - correction)."""
    return _var(self, axes_of(self, dim), _correction(correction), keepdim)[0]


@register_op("aten.var_mean.correction")
def var_mean(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the variance and the mean."""
    return _var(self, axes_of(self, dim), _correction(correction), keepdim)


@register_op("aten.std.correction")
def std(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    """Return the standard deviation; the gradient is 0 where it is 0."""
    return _root(var(self, dim, correction=correction, keepdim=keepdim))


@register_op("aten.std_mean.correction")
def std_mean(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the standard deviation and the mean."""
    variance, centre = var_mean(self, dim, correction=correction, keepdim=keepdim)
    return _root(variance), centre


def _kth(x: Array, k: int, dim: int, keepdim: bool) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(lax.stop_gradient(x), axis=dim)
    index = lax.slice_in_dim(order, k, k + 1, axis=dim % x.ndim).astype(jnp.int64)
    return take_one(x, index, dim, keepdim), index if keepdim else jnp.squeeze(index, dim)


@register_op("aten.kthvalue")
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the kth smallest value, counted from 1, and its index."""
    return _kth(self, k - 1, dim, keepdim)


@register_op("aten.median.dim")
def median_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the lower median and its index; a slice with a NaN gives NaN."""
    return _median(self, dim, keepdim, skip_nan=False)


@register_op("aten.nanmedian.dim")
def nanmedian_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the lower median of the entries that are not NaN, and its index."""
    return _median(self, dim, keepdim, skip_nan=True)


def _median(x: Array, dim: int, keepdim: bool, *, skip_nan: bool) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    detached = lax.stop_gradient(x)
    order, missing = jnp.argsort(detached, axis=dim), jnp.isnan(detached)
    numbers = jnp.sum(~missing, axis=dim, keepdims=True)
    place = jnp.maximum(numbers - 1, 0) // 2
    if not skip_nan:
        place = jnp.where(numbers < x.shape[dim], numbers, place)
    index = jnp.take_along_axis(order, place, axis=dim).astype(jnp.int64)
    return take_one(x, index, dim, keepdim), index if keepdim else jnp.squeeze(index, dim)


def _evenly(x: Array, value: Array) -> Array:
    """Return `value`, an entry of x, whose gradient all equal entries share evenly."""
    detached = lax.stop_gradient(x)
    same = (detached == value) | (jnp.isnan(detached) & jnp.isnan(value))
    return jnp.sum(jnp.where(same, x, 0)) / jnp.sum(same)


@register_op("aten.median.default")
def median(self: Array) -> Array:
    """Return the median of all entries; equal entries share the gradient evenly."""
    flat = self.reshape(-1)
    return _evenly(flat, lax.stop_gradient(_median(flat, 0, False, skip_nan=False)[0]))


@register_op("aten.nanmedian.default")
def nanmedian(self: Array) -> Array:
    """Return the median of all entries that are not NaN; equal entries share the gradient evenly."""
    flat = self.reshape(-1)
    return _evenly(flat, lax.stop_gradient(_median(flat, 0, False, skip_nan=True)[0]))
