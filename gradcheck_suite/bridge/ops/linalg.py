"""Matrix decompositions and solvers of linear systems."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg as scipy_linalg

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _no_error(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], jnp.int32)


@register_op("aten.linalg_cholesky_ex")
def cholesky_ex(self: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    """Return the triangular factor, and 0 for success."""
    del check_errors
    lower = jnp.linalg.cholesky(self, symmetrize_input=True)
    return (jnp.conj(_t(lower)) if upper else lower), _no_error(self)


register_op("aten.cholesky")(lambda self, upper=False: cholesky_ex(self, upper=upper)[0])


@register_op("aten.linalg_inv_ex")
def inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:  # noqa: N803  (the schema's name)
    """Return the inverse, and 0 for success."""
    del check_errors
    return jnp.linalg.inv(A), _no_error(A)


@register_op("aten._linalg_det")
def det(A: Array) -> tuple[Array, Array, Array]:  # noqa: N803
    """Return the determinant; the factors that torch's backward reads are empty here."""
    empty = jnp.zeros(0, A.dtype)
    return jnp.linalg.det(A) if A.shape[-1] else jnp.ones(A.shape[:-2], A.dtype), empty, empty


@register_op("aten._linalg_slogdet")
def slogdet(A: Array) -> tuple[Array, Array, Array, Array]:  # noqa: N803
    """Return sign and log |determinant|; the factors that torch's backward reads are empty here."""
    empty = jnp.zeros(0, A.dtype)
    sign, log = jnp.linalg.slogdet(A)
    return sign, log, empty, empty


def _solved(a: Array, b: Array, left: bool) -> Array:
    if not left:
        return _t(_solved(_t(a), _t(b), True))
    if b.ndim == a.ndim - 1 or (b.ndim == 1 and a.ndim == 2):
        return jnp.linalg.solve(a, b[..., None])[..., 0]
    return jnp.linalg.solve(a, b)


@register_op("aten._linalg_solve_ex")
def solve_ex(
    A: Array,  # noqa: N803
    B: Array,  # noqa: N803
    *,
    left: bool = True,
    check_errors: bool = False,
) -> tuple[Array, ...]:
    """Return X with A X = B, or X A = B; the factors that torch's backward reads are empty here."""
    del check_errors
    empty = jnp.zeros(0, A.dtype)
    return _solved(A, B, left), empty, empty, _no_error(A)


@register_op("aten.linalg_solve_triangular")
def solve_triangular(
    self: Array,
    B: Array,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Array:
    """Return X with A X = B for a triangular A."""
    if not left:
        return _t(solve_triangular(_t(self), _t(B), upper=not upper, unitriangular=unitriangular))
    batch = jnp.broadcast_shapes(self.shape[:-2], B.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (self, B))
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, unit_diagonal=unitriangular)


@register_op("aten.triangular_solve")
def triangular_solve(
    self: Array,
    A: Array,  # noqa: N803
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    """Return the solution for a triangular A, and A: the signature of `torch.triangular_solve`."""
    a, up = (jnp.conj(_t(A)) if jnp.iscomplexobj(A) else _t(A), not upper) if transpose else (A, upper)
    return solve_triangular(a, self, upper=up, unitriangular=unitriangular), A


@register_op("aten.cholesky_solve")
def cholesky_solve(self: Array, input2: Array, upper: bool = False, **_: Any) -> Array:
    """Return X with L L' X = B for the Cholesky factor L."""
    lower = jnp.conj(_t(input2)) if upper else input2
    # torch reads a triangle, but differentiates as if it had read the whole matrix
    lower = lower + lax.stop_gradient(jnp.tril(lower) - lower)
    return _solved(jnp.matmul(lower, jnp.conj(_t(lower))), self, True)


@register_op("aten.cholesky_inverse")
def cholesky_inverse(self: Array, upper: bool = False) -> Array:
    """Return the inverse of L L' for the Cholesky factor L."""
    return cholesky_solve(jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper)


@register_op("aten.linalg_qr")
def qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:  # noqa: N803
    """Return Q and R."""
    if mode == "r":
        return jnp.zeros(0, A.dtype), jnp.linalg.qr(A, mode="r")
    q, r = jnp.linalg.qr(A, mode=mode)
    return q, r


@register_op("aten._linalg_svd")
def svd(
    A: Array,  # noqa: N803
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Array, Array, Array]:
    """Return U, the singular values and V'; the signs of U's and V's columns are arbitrary."""
    del driver
    if not compute_uv:
        empty = jnp.zeros(0, A.dtype)
        return empty, jnp.linalg.svd(A, compute_uv=False), empty
    u, s, v = jnp.linalg.svd(A, full_matrices=False)
    if full_matrices and A.shape[-1] != A.shape[-2]:
        # torch gives the null space's vectors no derivative
        whole_u, _, whole_v = jnp.linalg.svd(lax.stop_gradient(A), full_matrices=True)
        u = jnp.concatenate([u, whole_u[..., :, u.shape[-1] :]], axis=-1)
        v = jnp.concatenate([v, whole_v[..., v.shape[-2] :, :]], axis=-2)
    return u, s, v


@register_op("aten._linalg_eigh")
def eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:  # noqa: N803
    """Return the eigenvalues in ascending order and the eigenvectors, whose signs are arbitrary."""
    triangle = jnp.tril(A) if UPLO == "L" else _t(jnp.triu(A)).conj()
    whole = triangle + jnp.conj(_t(jnp.tril(triangle, -1)))
    # torch reads a triangle, but differentiates as if it had read the whole matrix
    values, vectors = jnp.linalg.eigh(A + lax.stop_gradient(whole - A), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(0, A.dtype)


@register_op("aten.linalg_matrix_exp")
def matrix_exp(self: Array) -> Array:
    """Return the matrix exponential."""
    return scipy_linalg.expm(self)
