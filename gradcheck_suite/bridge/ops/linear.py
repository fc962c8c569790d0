"""Matrix and vector products, distances between points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, absolute, is_inexact
from gradcheck_suite.bridge.op_table import register_op

HIGHEST = lax.Precision.HIGHEST


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


@register_op("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot")
def matmul(self: Array, *args: Array, **kwargs: Array) -> Array:
    """Return the matrix product, batched over leading axes."""
    (other,) = (*args, *kwargs.values())
    return _product(self, other)


@register_op("aten.vdot")
def vdot(self: Array, other: Array) -> Array:
    """Return the inner product with the first vector conjugated."""
    return _product(jnp.conj(self), other)


@register_op("aten.linear")
def linear(input: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return x W' + b."""
    out = _product(input, weight.T if weight.ndim > 1 else weight)
    return out if bias is None else out + bias


def _added(self: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """Return beta * self + alpha * product; with beta = 0 a NaN in self does not propagate."""
    product = product if alpha == 1 else product * jnp.asarray(alpha, product.dtype)
    if beta == 0:
        return product
    return (self if beta == 1 else self * jnp.asarray(beta, self.dtype)) + product


@register_op("aten.addmm")
def addmm(self: Array, mat1: Array, mat2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """Return beta * self + alpha * mat1 mat2."""
    return _added(self, _product(mat1, mat2), beta, alpha)


@register_op("aten.baddbmm")
def baddbmm(self: Array, batch1: Array, batch2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """Return beta * self + alpha * batch1 batch2, one product per batch entry."""
    return _added(self, _product(batch1, batch2), beta, alpha)


@register_op("aten.addbmm")
def addbmm(self: Array, batch1: Array, batch2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """Return beta * self + alpha * the sum of the batch's products."""
    return _added(self, jnp.sum(_product(batch1, batch2), axis=0), beta, alpha)


@register_op("aten.addmv")
def addmv(self: Array, mat: Array, vec: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """Return beta * self + alpha * mat vec."""
    return _added(self, _product(mat, vec), beta, alpha)


@register_op("aten.addr")
def addr(self: Array, vec1: Array, vec2: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    """Return beta * self + alpha * vec1 vec2'."""
    return _added(self, jnp.outer(vec1, vec2), beta, alpha)


@register_op("aten._trilinear")
def trilinear(
    i1: Array,
    i2: Array,
    i3: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """Return the sum over `sumdim` of the product of three tensors, as `torch.nn.Bilinear` uses it."""
    del unroll_dim
    expanded = []
    for x, axes in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for axis in axes:
            x = jnp.expand_dims(x, axis)
        expanded.append(x)
    return jnp.sum(expanded[0] * expanded[1] * expanded[2], axis=tuple(sumdim))


def _distances(off: Array, p: float) -> Array:
    """Return p-norms over the last axis; the gradient is 0 where two points coincide."""
    size = absolute(off)
    if p == 0:
        return jnp.sum(lax.stop_gradient(off != 0), axis=-1).astype(off.dtype)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == float("inf"):
        return jnp.max(size, axis=-1)
    powers = jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** p)
    total = jnp.sum(powers, axis=-1)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / p))


@register_op("aten._cdist_forward")
def cdist(x1: Array, x2: Array, p: float, compute_mode: int | None = None) -> Array:
    """Return the distances between all rows of x1 and all rows of x2."""
    del compute_mode
    return _distances(x1[..., :, None, :] - x2[..., None, :, :], float(p))


@register_op("aten._euclidean_dist")
def euclidean_dist(x1: Array, x2: Array) -> Array:
    """Return the Euclidean distances between all rows of x1 and all rows of x2."""
    return cdist(x1, x2, 2.0)


@register_op("aten._pdist_forward")
def pdist(self: Array, p: float = 2.0) -> Array:
    """Return the distances between all pairs of rows."""
    rows, columns = jnp.triu_indices(self.shape[0], 1)
    return _distances(self[rows] - self[columns], float(p))


@register_op("aten.linalg_cross")
def linalg_cross(self: Array, other: Array, dim: int = -1) -> Array:
    """Return the cross product along an axis of length 3."""
    x, y = jnp.broadcast_arrays(self, other)
    return jnp.cross(x, y, axis=dim)


@register_op("aten.trace")
def trace(self: Array) -> Array:
    """Return the sum of the diagonal."""
    return jnp.trace(self) if is_inexact(self) else jnp.trace(self).astype(jnp.int64)


@register_op("aten.kron")
def kron(self: Array, other: Array) -> Array:
    """Return the Kronecker product."""
    return jnp.kron(self, other)
