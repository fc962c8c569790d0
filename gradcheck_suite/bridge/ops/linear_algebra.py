"""Matrix and vector products, distances between points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg as scipy_linalg

from gradcheck_suite.bridge.op_table import Array, RandomnessError, absolute, is_inexact, jax_dtype, register_op

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


# Matrix decompositions and solvers of linear systems.


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


# Scaled dot-product attention.


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise RandomnessError(f"attention's dropout is active (dropout_p = {dropout_p:g})")


def _scores(query: Array, key: Array, attn_mask: Array | None, is_causal: bool, scale: float | None) -> Array:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, precision=lax.Precision.HIGHEST) * factor
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(allowed, scores, -jnp.inf)
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        return jnp.where(attn_mask, scores, -jnp.inf)
    return scores if attn_mask is None else scores + attn_mask


@register_op("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Return softmax(q k' * scale + mask) v; a query whose keys are all masked gives zeros."""
    _refuse_dropout(dropout_p)
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (jnp.repeat(x, heads // x.shape[-3], axis=-3) for x in (key, value))
    scores = _scores(query, key, attn_mask, is_causal, scale)
    fully_masked = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    weights = jnp.where(fully_masked, 0, jax.nn.softmax(jnp.where(fully_masked, 0, scores), axis=-1))
    return jnp.einsum("...qk,...kd->...qd", weights, value, precision=lax.Precision.HIGHEST)


@register_op("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Return the attention output and the log-sum-exp of each row's scores, (N, heads, rows)."""
    out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out, jax.nn.logsumexp(_scores(query, key, attn_mask, is_causal, scale), axis=-1)


# Products of matrices in groups, with which mixtures of experts multiply every expert's tokens by its own weights.


def _sizes(ends: Array) -> Array:
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))


@register_op("aten._grouped_mm")
def grouped_mm(
    self: Array, mat2: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: Any = None
) -> Array:
    """Return one product for each group; `offs` are the ends of the groups along the axis that is cut.

    The groups are rows of `self` (S, K) with `mat2` (G, K, N), columns of `mat2` (K, S) with `self` (G, M, K), or
    parts of the axis that is summed: (M, S) and (S, N) give (G, M, N). What lies behind the last group is 0 here, and
    uninitialised in torch. torch refuses a bias.
    """
    del bias
    if offs is None:
        out = jnp.matmul(self, mat2, precision=HIGHEST)
    elif mat2.ndim == 3:
        out = lax.ragged_dot(self, mat2, _sizes(offs), precision=HIGHEST)
    elif self.ndim == 3:
        out = lax.ragged_dot(mat2.T, self.swapaxes(1, 2), _sizes(offs), precision=HIGHEST).T
    else:
        places = jnp.arange(self.shape[1])
        group = jnp.searchsorted(offs, places, side="right")
        parts = jnp.where(group == jnp.arange(offs.size)[:, None], self[:, None], 0)
        out = jnp.einsum("mgs,sn->gmn", parts, mat2, precision=HIGHEST)
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


@register_op("transformers.grouped_mm_fallback")
def grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """Return the products of the groups of rows: transformers' own operation for dtypes that torch's has not."""
    return grouped_mm(input, weight, offs)


# Fourier transforms. torch's normalization is a number: 0 none, 1 by 1/sqrt(n), 2 by 1/n.


def _factor(normalization: int, count: int) -> float:
    return {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization]


@register_op("aten._fft_c2c")
def fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """Return the complex-to-complex transform, or its inverse."""
    if not dim:
        return self
    count = math.prod(self.shape[d] for d in dim)
    if forward:
        return jnp.fft.fftn(self, axes=tuple(dim)) * _factor(normalization, count)
    return jnp.fft.ifftn(self, axes=tuple(dim)) * (count * _factor(normalization, count))


@register_op("aten._fft_r2c")
def fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Return the real-to-complex transform, one-sided along the last of the axes where asked for."""
    count = math.prod(self.shape[d] for d in dim)
    out = jnp.fft.rfftn(self, axes=tuple(dim)) if onesided else jnp.fft.fftn(self, axes=tuple(dim))
    return out * _factor(normalization, count)


@register_op("aten._fft_c2r")
def fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Return the complex-to-real inverse transform of a spectrum one-sided along the last of the axes."""
    sizes = [self.shape[d] for d in dim[:-1]] + [last_dim_size]
    count = math.prod(sizes)
    out = jnp.fft.irfftn(self, s=sizes, axes=tuple(dim))
    return out * (count * _factor(normalization, count))


# Recurrent layers: a scan of one cell over time. Gates are in torch's order.


State = tuple[Array, ...]
Cell = Callable[[State, Array, tuple[Array, ...]], tuple[State, Array]]


def _affine(x: Array, weight: Array, bias: Array | None) -> Array:
    out = jnp.matmul(x, weight.T, precision=lax.Precision.HIGHEST)
    return out if bias is None else out + bias


def _split(weights: tuple[Array, ...]) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return w_ih, w_hh, b_ih, b_hh, w_hr; absent ones are None."""
    w_ih, w_hh, *rest = weights
    biases = [w for w in rest if w.ndim == 1]
    projection = [w for w in rest if w.ndim == 2]
    b_ih, b_hh = biases or (None, None)
    return w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None


def lstm_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return the next (h, c) and h; the gates are input, forget, cell and output."""
    (h, c), (w_ih, w_hh, b_ih, b_hh, w_hr) = state, _split(weights)
    i, f, g, o = jnp.split(_affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    h = h if w_hr is None else _affine(h, w_hr, None)
    return (h, c), h


def gru_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return the next (h,) and h; the gates are reset, update and new."""
    (h,), (w_ih, w_hh, b_ih, b_hh, _) = state, _split(weights)
    r_x, z_x, n_x = jnp.split(_affine(x, w_ih, b_ih), 3, axis=-1)
    r_h, z_h, n_h = jnp.split(_affine(h, w_hh, b_hh), 3, axis=-1)
    r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + r * n_h)
    h = n + z * (h - n)
    return (h,), h


def _plain(state: State, x: Array, weights: tuple[Array, ...]) -> Array:
    (h,), (w_ih, w_hh, b_ih, b_hh, _) = state, _split(weights)
    return _affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh)


def tanh_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return h = tanh(W x + U h), as the state and as the output."""
    h = jnp.tanh(_plain(state, x, weights))
    return (h,), h


def relu_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return h = max(0, W x + U h), as the state and as the output; the gradient at 0 is 0."""
    h = _plain(state, x, weights)
    h = jnp.where(h <= 0, 0, h)
    return (h,), h


def _through_time(
    cell: Cell, state: State, xs: Array, weights: tuple[Array, ...], reverse: bool
) -> tuple[State, Array]:
    return lax.scan(lambda s, x: cell(s, x, weights), state, xs, reverse=reverse)


def _layers(  # noqa: PLR0913 - the arguments of torch's recurrent operations
    cell: Cell,
    x: Array,
    states: Sequence[Array],
    params: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, list[Array]]:
    """Return the outputs, and the final states, each (layers * directions, batch, width)."""
    if train and dropout > 0 and num_layers > 1:
        raise RandomnessError(f"dropout between recurrent layers is active (p = {dropout:g})")
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    assert per_cell in ((4, 5) if has_biases else (2, 3))
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    finals: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = tuple(params[place * per_cell : (place + 1) * per_cell])
            state = tuple(s[place] for s in states)
            final, out = _through_time(cell, state, x, weights, direction == 1)
            finals.append(final)
            outputs.append(out)
        x = jnp.concatenate(outputs, axis=-1)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    return x, [jnp.stack(parts) for parts in zip(*finals, strict=True)]


@register_op("aten.lstm.input")
def lstm(input: Array, hx: Sequence[Array], params: Sequence[Array], *arguments: Any) -> tuple[Array, ...]:
    """Return the outputs of all steps and the last h and c."""
    out, states = _layers(lstm_step, input, hx, params, *arguments)
    return out, *states


def _one_state(name: str, cell: Cell) -> None:
    def layers(input: Array, hx: Array, params: Sequence[Array], *arguments: Any) -> tuple[Array, ...]:
        """Return the outputs of all steps and the last h."""
        out, states = _layers(cell, input, [hx], params, *arguments)
        return out, *states

    register_op(name)(layers)


_one_state("aten.gru.input", gru_step)
_one_state("aten.rnn_tanh.input", tanh_step)
_one_state("aten.rnn_relu.input", relu_step)


def _cell_weights(w_ih: Array, w_hh: Array, b_ih: Array | None, b_hh: Array | None) -> tuple[Array, ...]:
    return tuple(w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None)


@register_op("aten.lstm_cell")
def lstm_cell(
    input: Array, hx: Sequence[Array], w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None
) -> tuple[Array, ...]:
    """Return h and c after one step."""
    return lstm_step(tuple(hx), input, _cell_weights(w_ih, w_hh, b_ih, b_hh))[0]


def _register_cell(name: str, cell: Cell) -> None:
    def one(
        input: Array, hx: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None
    ) -> Array:
        """Return h after one step."""
        return cell((hx,), input, _cell_weights(w_ih, w_hh, b_ih, b_hh))[1]

    register_op(name)(one)


_register_cell("aten.gru_cell", gru_step)
_register_cell("aten.rnn_tanh_cell", tanh_step)
_register_cell("aten.rnn_relu_cell", relu_step)
