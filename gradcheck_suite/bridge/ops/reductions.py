"""Sums, products, extrema and norms over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from gradcheck_suite.bridge.op_table import (
    Array,
    absolute,
    default_float,
    is_complex,
    is_inexact,
    jax_dtype,
    register_op,
)
from gradcheck_suite.bridge.ops.elementwise import log_sigmoid

Dims = int | Sequence[int] | None


def axes_of(x: Array, dim: Dims) -> tuple[int, ...]:
    """Return the axes that torch's `dim` names: None and an empty list name all axes."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return () if x.ndim == 0 else tuple(d % x.ndim for d in dims)


def as_accumulated(self: Array, dtype: torch.dtype | None) -> Array:
    """Return self in the dtype of torch's sums and products: int64 for integers and booleans if none is given."""
    if dtype is not None:
        return self.astype(jax_dtype(dtype))
    return self if is_inexact(self) else self.astype(jnp.int64)


@register_op("aten.sum.dim_IntList")
def sum_(self: Array, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    """Return the sum; integers and booleans are summed as int64."""
    return jnp.sum(as_accumulated(self, dtype), axis=axes_of(self, dim), keepdims=keepdim)


register_op("aten.sum.default")(lambda self, dtype=None: sum_(self, None, False, dtype))


@register_op("aten.nansum")
def nansum(self: Array, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    """Return the sum with NaN replaced by 0."""
    x = as_accumulated(self, dtype)
    return jnp.sum(jnp.where(jnp.isnan(x), 0, x), axis=axes_of(self, dim), keepdims=keepdim)


def _count(x: Array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


@register_op("aten.mean.dim")
def mean(self: Array, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    """Return the mean, which is NaN for no entries."""
    x = self if dtype is None else self.astype(jax_dtype(dtype))
    axes = axes_of(x, dim)
    return jnp.sum(x, axis=axes, keepdims=keepdim) / jnp.asarray(_count(x, axes), x.dtype)


register_op("aten.mean.default")(lambda self, dtype=None: mean(self, None, False, dtype))


@register_op("aten.prod.dim_int")
def prod(self: Array, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    """Return the product; its gradient is right where factors are 0, too."""
    return jnp.prod(as_accumulated(self, dtype), axis=axes_of(self, dim), keepdims=keepdim)


register_op("aten.prod.default")(lambda self, dtype=None: jnp.prod(as_accumulated(self, dtype)))


@register_op("aten.amax")
def amax(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    """Return the maximum; equal maxima share the gradient evenly."""
    return jnp.max(self, axis=axes_of(self, dim), keepdims=keepdim)


@register_op("aten.amin")
def amin(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    """Return the minimum; equal minima share the gradient evenly."""
    return jnp.min(self, axis=axes_of(self, dim), keepdims=keepdim)


register_op("aten.max.default")(lambda self: amax(self))
register_op("aten.min.default")(lambda self: amin(self))


@register_op("aten.aminmax")
def aminmax(self: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the minimum and the maximum."""
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


def take_one(x: Array, index: Array, dim: int, keepdim: bool) -> Array:
    """Return the entries that `index` (with `dim` kept) selects along `dim`."""
    taken = jnp.take_along_axis(x, index, axis=dim)
    return taken if keepdim else jnp.squeeze(taken, dim)


def _selected(x: Array, dim: int, keepdim: bool, which: Any) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    index = which(lax.stop_gradient(x), axis=dim, keepdims=True).astype(jnp.int64)
    return take_one(x, index, dim, keepdim), index if keepdim else jnp.squeeze(index, dim)


@register_op("aten.max.dim")
def max_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the maximum and its index; only the entry at that index gets the gradient."""
    return _selected(self, dim, keepdim, jnp.argmax)


@register_op("aten.min.dim")
def min_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the minimum and its index; only the entry at that index gets the gradient."""
    return _selected(self, dim, keepdim, jnp.argmin)


def _arg(self: Array, dim: int | None, keepdim: bool, which: Any) -> Array:
    if self.ndim == 0:
        return jnp.zeros((), jnp.int64)
    return which(self, axis=dim, keepdims=keepdim).astype(jnp.int64)


@register_op("aten.argmax")
def argmax(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """Return the index of the first maximum."""
    return _arg(self, dim, keepdim, jnp.argmax)


@register_op("aten.argmin")
def argmin(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """Return the index of the first minimum."""
    return _arg(self, dim, keepdim, jnp.argmin)


def _of_booleans(self: Array, result: Array) -> Array:
    return result.astype(jnp.uint8) if self.dtype == jnp.uint8 else result


@register_op("aten.any")
def any_(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """Return whether any entry is nonzero, as uint8 for a uint8 tensor."""
    return _of_booleans(self, jnp.any(self != 0, axis=axes_of(self, dim), keepdims=keepdim))


@register_op("aten.all")
def all_(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """Return whether all entries are nonzero, as uint8 for a uint8 tensor."""
    return _of_booleans(self, jnp.all(self != 0, axis=axes_of(self, dim), keepdims=keepdim))


@register_op("aten.count_nonzero")
def count_nonzero(self: Array, dim: Dims = None) -> Array:
    """Return the number of nonzero entries."""
    return jnp.sum(self != 0, axis=axes_of(self, dim), dtype=jnp.int64)


@register_op("aten.logsumexp")
def logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Array:
    """Return log sum e^x, which is -infinity where all entries are."""
    x = self if is_inexact(self) else self.astype(default_float())
    axes = axes_of(x, dim)
    if x.size == 0:
        return jnp.log(jnp.sum(jnp.exp(x), axis=axes, keepdims=keepdim))
    top = lax.stop_gradient(jnp.max(jnp.real(x) if is_complex(x) else x, axis=axes, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    out = jnp.log(jnp.sum(jnp.exp(x - top), axis=axes, keepdims=True)) + top
    return out if keepdim else jnp.squeeze(out, axes)


@register_op("aten.linalg_vector_norm")
def vector_norm(
    self: Array, ord: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Array:
    """Return (sum |x|^ord)^(1/ord); the gradient is 0 where the norm is 0."""
    x = self if dtype is None else self.astype(jax_dtype(dtype))
    axes, order = axes_of(x, dim), float(ord)
    size = absolute(x)
    if order == 0:
        return jnp.sum(lax.stop_gradient(size != 0), axis=axes, keepdims=keepdim, dtype=size.dtype)
    if order == 1:
        return jnp.sum(size, axis=axes, keepdims=keepdim)
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(size, axis=axes, keepdims=keepdim)
    if order == 2:
        powers = size * size if is_complex(x) else x * x
        total = jnp.sum(powers, axis=axes, keepdims=keepdim)
        return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    if order > 0:
        # a zero entry contributes no gradient, though the derivative of |x|^ord may be infinite there
        powers = jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** order)
        total = jnp.sum(powers, axis=axes, keepdims=keepdim)
        return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / order))
    return jnp.sum(size**order, axis=axes, keepdims=keepdim) ** (1 / order)


def _norm(self: Array, p: Any, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Array:
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype)


register_op("aten.norm.Scalar")(lambda self, p=2: _norm(self, p, None, False, None))
register_op("aten.norm.ScalarOpt_dtype")(lambda self, p, dtype: _norm(self, p, None, False, dtype))
register_op("aten.norm.ScalarOpt_dim")(lambda self, p, dim, keepdim=False: _norm(self, p, dim, keepdim, None))
register_op("aten.norm.ScalarOpt_dim_dtype")(
    lambda self, p, dim, keepdim=False, *, dtype: _norm(self, p, dim, keepdim, dtype)
)


# Sorting, and cumulative sums, products and extrema.


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


# Variances, standard deviations, medians and order statistics.


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


# Normalization over features, groups and batches. New running statistics are returned, never written in place.


def _standardised(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Return (x - mean) * rstd, mean and rstd, the reduced axes kept with length 1."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    off = x - mean
    rstd = 1 / jnp.sqrt(jnp.mean(off * off, axis=axes, keepdims=True) + eps)
    return off * rstd, mean, rstd


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@register_op("aten.native_layer_norm")
def native_layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Return the layer norm over the last axes, the mean and the reciprocal standard deviation."""
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    out, mean, rstd = _standardised(input, axes, eps)
    return _affine(out, weight, bias), mean, rstd


@register_op("aten._fused_rms_norm")
def fused_rms_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """Return x / sqrt(mean x^2 + eps) over the last axes; eps defaults to the dtype's machine epsilon."""
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    rstd = 1 / jnp.sqrt(jnp.mean(input * input, axis=axes, keepdims=True) + eps)
    return _affine(input * rstd, weight, None), rstd


@register_op("aten.native_group_norm")
def native_group_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,  # noqa: N803  (the schema's name)
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Return the group norm, and mean and reciprocal standard deviation of (N, group)."""
    out, mean, rstd = _standardised(input.reshape(N, group, C // group * HxW), (2,), eps)
    shape = (1, C, *[1] * (input.ndim - 2))
    out = out.reshape(input.shape)
    weight, bias = (None if p is None else p.reshape(shape) for p in (weight, bias))
    return _affine(out, weight, bias), mean[..., 0], rstd[..., 0]


def _per_channel(p: Array | None, x: Array) -> Array | None:
    return None if p is None else p.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Return the output, the batch's mean and rstd (empty outside training) and the new running statistics."""
    axes = (0, *range(2, input.ndim))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        rstd = 1 / jnp.sqrt(running_var + eps)
        mean_, rstd_ = _per_channel(running_mean, input), _per_channel(rstd, input)
        assert mean_ is not None
        assert rstd_ is not None
        out = _affine((input - mean_) * rstd_, _per_channel(weight, input), _per_channel(bias, input))
        empty = jnp.zeros(0, input.dtype)
        return out, empty, empty, running_mean, running_var
    out, mean, rstd = _standardised(input, axes, eps)
    out = _affine(out, _per_channel(weight, input), _per_channel(bias, input))
    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    count = math.prod(input.shape[a] for a in axes)
    if running_mean is not None:
        running_mean = momentum * lax.stop_gradient(mean) + (1 - momentum) * running_mean
    if running_var is not None:
        unbiased = jnp.var(lax.stop_gradient(input), axis=axes) * (count / max(count - 1, 1))
        running_var = momentum * unbiased + (1 - momentum) * running_var
    return out, mean, rstd, running_mean, running_var


# One line for each of torch's signatures. The functional ones return the new running statistics as well; the last one
# also returns an empty reserve buffer before them.
register_op("aten._native_batch_norm_legit_functional")(_batch_norm)
register_op("aten.native_batch_norm")(lambda *arguments: _batch_norm(*arguments)[:3])
register_op("aten._native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, *arguments: _batch_norm(x, weight, bias, None, None, *arguments)[:3]
)
register_op("aten._native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, var, *factors: _batch_norm(x, weight, bias, mean, var, False, *factors)[:3]
)


@register_op("aten._batch_norm_with_update_functional")
def batch_norm_with_update(
    input: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array, *factors: float
) -> tuple[Any, ...]:
    """Return the batch norm, its mean and rstd, an empty reserve buffer and the new running statistics."""
    out, mean, rstd, *running = _batch_norm(input, weight, bias, running_mean, running_var, True, *factors)
    return out, mean, rstd, jnp.zeros(0, jnp.uint8), *running


@register_op("aten._weight_norm_interface")
def weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    """Return g * v / |v| with the norm over all axes but `dim`, and the detached norm."""
    axes = tuple(a for a in range(v.ndim) if a != dim % v.ndim)
    norm = jnp.sqrt(jnp.sum(v * v, axis=axes, keepdims=True))
    return v * (g / norm), lax.stop_gradient(norm)


@register_op("aten.renorm")
def renorm(self: Array, p: Any, dim: int, maxnorm: Any) -> Array:
    """Return the slices along `dim` scaled down to a norm of at most `maxnorm`."""
    axes = tuple(a for a in range(self.ndim) if a != dim % self.ndim)
    norm = vector_norm(self, p, axes, keepdim=True)
    return jnp.where(norm > maxnorm, self * (maxnorm / (norm + 1e-7)), self)


# Losses that are one ATen operation; torch composes its other losses of these and of arithmetic.


MEAN, SUM = 1, 2


def _reduced(items: Array, reduction: int) -> Array:
    """Return the mean (1) or the sum (2) of the item losses, or the item losses (0)."""
    return {MEAN: jnp.mean, SUM: jnp.sum}.get(reduction, lambda x: x)(items)


@register_op("aten.mse_loss")
def mse_loss(self: Array, target: Array, reduction: int = MEAN) -> Array:
    """Return (x - t)^2, reduced."""
    off = self - target
    return _reduced(off * off, reduction)


@register_op("aten.smooth_l1_loss")
def smooth_l1_loss(self: Array, target: Array, reduction: int = MEAN, beta: float = 1.0) -> Array:
    """Return the smooth L1 loss: quadratic within beta, linear beyond."""
    off = self - target
    size = absolute(off)
    if beta == 0:
        return _reduced(size, reduction)
    return _reduced(jnp.where(size < beta, 0.5 * off * off / beta, size - 0.5 * beta), reduction)


@register_op("aten.huber_loss")
def huber_loss(self: Array, target: Array, reduction: int = MEAN, delta: float = 1.0) -> Array:
    """Return the Huber loss: quadratic within delta, linear beyond."""
    off = self - target
    size = absolute(off)
    return _reduced(jnp.where(size < delta, 0.5 * off * off, delta * (size - 0.5 * delta)), reduction)


def _nll(x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int) -> tuple[Array, Array]:
    """Return the loss and the sum of weights, for x (N, C, *rest) and target (N, *rest)."""
    valid = target != ignore_index
    index = jnp.where(valid, target, 0)
    picked = -jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
    share = jnp.ones((), x.dtype) if weight is None else weight[index]
    share = jnp.where(valid, share, 0)
    # an ignored position's log-probability may be infinite and must not reach the sum
    items = jnp.where(valid, share * jnp.where(valid, picked, 0), 0)
    if reduction == 0:
        return items, jnp.zeros((), x.dtype)
    total = jnp.sum(share)
    if reduction == SUM:
        return jnp.sum(items), total
    # the mean of no valid targets is NaN, and its gradient is 0
    empty = lax.stop_gradient(jnp.sum(items)) * jnp.nan
    none = ~jnp.any(valid)
    return jnp.where(none, empty, jnp.sum(items) / jnp.where(none, 1, total)), total


@register_op("aten.nll_loss_forward")
def nll_loss_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Return -x[target] weighted by class, and the sum of the weights; x is (N, C) or (C,)."""
    if self.ndim == 1:
        # of a single item, torch returns the weight without a reduction too
        _, total = _nll(self[None], target.reshape(1), weight, SUM, ignore_index)
        items, _ = _nll(self[None], target.reshape(1), weight, reduction, ignore_index)
        return (items.reshape(()), total)
    return _nll(self, target, weight, reduction, ignore_index)


@register_op("aten.nll_loss2d_forward")
def nll_loss2d_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Return `nll_loss_forward` for x (N, C, H, W)."""
    return _nll(self, target, weight, reduction, ignore_index)


@register_op("aten.binary_cross_entropy")
def binary_cross_entropy(self: Array, target: Array, weight: Array | None = None, reduction: int = MEAN) -> Array:
    """Return -(t log x + (1 - t) log(1 - x)) with logarithms of at least -100.

    The gradient is torch's, (x - t) / max(x (1 - x), 1e-12), which is not the derivative of the value where a logarithm
    is clamped.
    """
    value = lax.stop_gradient(
        -(target * jnp.maximum(jnp.log(self), -100) + (1 - target) * jnp.maximum(jnp.log1p(-self), -100))
    )
    x = lax.stop_gradient(self)
    slope = (x - lax.stop_gradient(target)) / jnp.maximum((1 - x) * x, 1e-12)
    of_target = lax.stop_gradient(jnp.maximum(jnp.log1p(-x), -100) - jnp.maximum(jnp.log(x), -100))
    linear = slope * self + of_target * target
    items = value + (linear - lax.stop_gradient(linear))
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    self: Array, target: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Return the binary cross-entropy of sigmoid(x), without overflow."""
    rest = log_sigmoid(self)
    if pos_weight is not None:
        rest = (1 + (pos_weight - 1) * target) * rest
    items = (1 - target) * self - rest
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.soft_margin_loss")
def soft_margin_loss(self: Array, target: Array, reduction: int = MEAN) -> Array:
    """Return log(1 + e^(-t * x)), reduced."""
    return _reduced(jnp.log1p(jnp.exp(-target * self)), reduction)


@register_op("aten.multi_margin_loss")
def multi_margin_loss(
    self: Array, target: Array, p: Any = 1, margin: Any = 1, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Return the sum over c != t of max(0, margin - x[t] + x[c])^p, divided by the number of classes."""
    x, t = jnp.atleast_2d(self), jnp.atleast_1d(target)
    off = margin - jnp.take_along_axis(x, t[:, None], axis=1) + x
    counted = (off > 0) & (jnp.arange(x.shape[1]) != t[:, None])
    off = jnp.where(counted, off, 0)
    each = off if p == 1 else off * off
    each = each if weight is None else each * weight[t][:, None]
    items = jnp.sum(each, axis=1) / x.shape[1]
    return _reduced(items.reshape(self.shape[:-1]), reduction)


@register_op("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    """Return the margin loss between the targets before the first -1 and all other classes, and the mask of targets."""
    x, t = jnp.atleast_2d(self), jnp.atleast_2d(target)
    named = jnp.cumprod(t >= 0, axis=1).astype(jnp.bool_)
    index = jnp.where(named, t, 0)
    is_target = jnp.any((index[..., None] == jnp.arange(x.shape[1])) & named[..., None], axis=1)
    at_target = jnp.take_along_axis(x, index, axis=1)
    off = 1 - at_target[:, :, None] + x[:, None, :]
    counted = named[:, :, None] & ~is_target[:, None, :] & (off > 0)
    items = jnp.sum(jnp.where(counted, off, 0), axis=(1, 2)) / x.shape[1]
    return _reduced(items.reshape(self.shape[:-1]), reduction), is_target.astype(self.dtype).reshape(self.shape)


@register_op("aten._ctc_loss", "aten._ctc_loss.Tensor")
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """Return -log of the probability of all alignments, (N,), for log_probs (T, N, C) and targets (N, S) or (sum S,).

    Only torch's backward reads the second result; it is empty here.
    """
    del zero_infinity  # torch zeroes infinities after this operation and in its backward
    times, batch, _ = log_probs.shape
    lengths, inputs = jnp.asarray(target_lengths), jnp.asarray(input_lengths)
    if targets.ndim == 1:
        longest = int(jnp.max(lengths)) if batch else 0
        starts = jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)[:-1]])
        place = jnp.clip(starts[:, None] + jnp.arange(longest), 0, max(targets.shape[0] - 1, 0))
        targets = targets[place]
    longest = targets.shape[1]
    labels = jnp.full((batch, 2 * longest + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    labels = jnp.where(jnp.arange(labels.shape[1]) < 2 * lengths[:, None] + 1, labels, blank)
    may_skip = jnp.concatenate(
        [jnp.zeros((batch, 2), jnp.bool_), (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2])], axis=1
    )
    low = -jnp.inf

    def add(*terms: Array) -> Array:
        top = lax.stop_gradient(jnp.max(jnp.stack(terms), axis=0))
        none = top == low
        total = sum(jnp.exp(jnp.where(t == low, low, t - jnp.where(none, 0, top))) for t in terms)
        return jnp.where(none, low, jnp.log(jnp.where(none, 1, total)) + jnp.where(none, 0, top))

    emit = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (times, *labels.shape)), axis=2)
    alpha = jnp.full(labels.shape, low, log_probs.dtype).at[:, :2].set(emit[0, :, :2])
    alpha = jnp.where((jnp.arange(labels.shape[1]) == 1) & (lengths[:, None] == 0), low, alpha)

    def later(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        time, emitted = at
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)[:, : alpha.shape[1]]
        step = add(alpha, one, jnp.where(may_skip, two, low)) + emitted
        return jnp.where((time < inputs)[:, None], step, alpha), None

    alpha, _ = lax.scan(later, alpha, (jnp.arange(1, times), emit[1:]))
    last = jnp.take_along_axis(alpha, 2 * lengths[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(alpha, jnp.maximum(2 * lengths[:, None] - 1, 0), axis=1)[:, 0]
    return -add(last, jnp.where(lengths > 0, before, low)), jnp.zeros(0, log_probs.dtype)
