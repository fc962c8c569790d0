"""Sums, products, extrema and norms over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, absolute, default_float, is_complex, is_inexact, jax_dtype
from gradcheck_suite.bridge.op_table import register_op

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
