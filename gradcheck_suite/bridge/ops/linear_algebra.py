"""Products, distances, decompositions, solvers, attention, Fourier transforms and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg as scipy_linalg

from gradcheck_suite.bridge.op_table import (
    Array,
    Lowering,
    RandomnessError,
    jax_dtype,
    register_op,
    register_table,
)
from gradcheck_suite.bridge.ops.reductions import vector_norm

HIGHEST = lax.Precision.HIGHEST
einsum = partial(jnp.einsum, precision=HIGHEST)


def product(a: Array, b: Array) -> Array:
    """Return the matrix product, batched over leading axes, without a loss of precision on any
    device.
    """
    return jnp.matmul(a, b, precision=HIGHEST)


def affine(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return x W' + b."""
    out = product(x, weight.T)
    return out if bias is None else out + bias


def _added(multiplied: Callable[[Array, Array], Array]) -> Lowering:
    """Return beta * self + alpha * (a product of two).

    With beta = 0 a NaN in self does not propagate.
    """

    def lowering(self: Array, one: Array, two: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
        out = multiplied(one, two)
        out = out if alpha == 1 else out * jnp.asarray(alpha, out.dtype)
        # as in BLAS, which then does not read self
        if beta == 0:
            return out
        return (self if beta == 1 else self * jnp.asarray(beta, self.dtype)) + out

    return lowering


@register_op("aten._trilinear")
def trilinear(i1: Array, i2: Array, i3: Array, *arguments: Any) -> Array:
    """Return the sum over some axes of the product of three tensors, each expanded by others, as
    `nn.Bilinear` has it.

    The further arguments are the axes by which each is expanded, those of the sum, and one by which
    torch's loop runs.
    """
    terms = []
    for x, axes in zip((i1, i2, i3), arguments[:3], strict=True):
        for axis in axes:
            x = jnp.expand_dims(x, axis)
        terms.append(x)
    return jnp.sum(terms[0] * terms[1] * terms[2], axis=tuple(arguments[3]))


def _cdist(x1: Array, x2: Array, p: float = 2.0, compute_mode: int | None = None) -> Array:
    """Return the distances between all rows of x1 and all rows of x2."""
    # by a product of matrices or not: only rounding differs
    del compute_mode
    return vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)


def _pdist(self: Array, p: float = 2.0) -> Array:
    """Return the distances between all pairs of rows."""
    rows, columns = jnp.triu_indices(self.shape[0], 1)
    return vector_norm(self[rows] - self[columns], p, -1)


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _no_error(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], jnp.int32)


@register_op("aten.linalg_cholesky_ex")
def cholesky_ex(
    self: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    """Return the triangular factor, and 0 for success."""
    del check_errors
    lower = jnp.linalg.cholesky(self, symmetrize_input=True)
    return (jnp.conj(_t(lower)) if upper else lower), _no_error(self)


def _solved(a: Array, b: Array, left: bool) -> Array:
    if not left:
        return _t(_solved(_t(a), _t(b), True))
    if b.ndim == a.ndim - 1:
        return jnp.linalg.solve(a, b[..., None])[..., 0]
    return jnp.linalg.solve(a, b)


@register_op("aten._linalg_solve_ex")
def solve_ex(
    a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, ...]:
    """Return X with A X = B, or X A = B; the factors that torch's backward reads are empty here."""
    del check_errors
    empty = jnp.zeros(0, a.dtype)
    return _solved(a, b, left), empty, empty, _no_error(a)


def _slogdet(a: Array) -> tuple[Array, ...]:
    """Return the sign and the logarithm of the determinant; the factors are empty here, too."""
    empty = jnp.zeros(0, a.dtype)
    return *jnp.linalg.slogdet(a), empty, empty


def _det(a: Array) -> tuple[Array, ...]:
    """Return the determinant; the factors that torch's backward reads are empty here."""
    # the determinant of no rows is the empty product
    found = jnp.linalg.det(a) if a.shape[-1] else jnp.ones(a.shape[:-2], a.dtype)
    empty = jnp.zeros(0, a.dtype)
    return found, empty, empty


@register_op("aten.linalg_solve_triangular")
def solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """Return X with A X = B for a triangular A."""
    if not left:
        return _t(solve_triangular(_t(a), _t(b), upper=not upper, unitriangular=unitriangular))
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    # JAX's solver takes equal leading axes alone
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    return lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, unit_diagonal=unitriangular
    )


@register_op("aten.triangular_solve")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    """Return the solution for a triangular A, and A: the signature of `torch.triangular_solve`."""
    factor, up = (jnp.conj(_t(a)), not upper) if transpose else (a, upper)
    return solve_triangular(factor, b, upper=up, unitriangular=unitriangular), a


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
    return cholesky_solve(
        jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper
    )


@register_op("aten.linalg_qr")
def qr(a: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Return Q and R."""
    if mode == "r":
        return jnp.zeros(0, a.dtype), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@register_op("aten._linalg_svd")
def svd(
    a: Array, full_matrices: bool = False, compute_uv: bool = True, **driver: Any
) -> tuple[Array, Array, Array]:
    """Return U, the singular values and V'; the signs of U's and V's columns are arbitrary."""
    del driver
    if not compute_uv:
        empty = jnp.zeros(0, a.dtype)
        return empty, jnp.linalg.svd(a, compute_uv=False), empty
    u, s, v = jnp.linalg.svd(a, full_matrices=False)
    if full_matrices and a.shape[-1] != a.shape[-2]:
        # torch gives the null space's vectors no derivative
        whole_u, _, whole_v = jnp.linalg.svd(lax.stop_gradient(a), full_matrices=True)
        u = jnp.concatenate([u, whole_u[..., :, u.shape[-1] :]], axis=-1)
        v = jnp.concatenate([v, whole_v[..., v.shape[-2] :, :]], axis=-2)
    return u, s, v


@register_op("aten._linalg_eigh")
def eigh(a: Array, triangle: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """Return the eigenvalues in ascending order and the eigenvectors, whose signs are arbitrary."""
    lower = jnp.tril(a) if triangle == "L" else _t(jnp.triu(a)).conj()
    whole = lower + jnp.conj(_t(jnp.tril(lower, -1)))
    # torch reads a triangle, but differentiates as if it had read the whole matrix
    values, vectors = jnp.linalg.eigh(a + lax.stop_gradient(whole - a), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(0, a.dtype)


def _sizes(ends: Array) -> Array:
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))


@register_op("aten._grouped_mm")
def grouped_mm(
    self: Array,
    mat2: Array,
    offs: Array | None = None,
    bias: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """Return one product for each group.

    `offs` are the ends of the groups along the axis that is cut. The groups are rows of `self` (S,
    K) with `mat2` (G, K, N), columns of `mat2` (K, S) with `self` (G, M, K), or parts of the axis
    that is summed: (M, S) and (S, N) give (G, M, N). What lies behind the last group is 0 here, and
    uninitialised in torch. torch refuses a bias.
    """
    del bias
    if offs is None:
        out = product(self, mat2)
    elif mat2.ndim == 3:
        out = lax.ragged_dot(
            self,
            mat2,
            _sizes(offs),
            precision=HIGHEST,
        )
    elif self.ndim == 3:
        out = lax.ragged_dot(mat2.T, self.swapaxes(1, 2), _sizes(offs), precision=HIGHEST).T
    else:
        places = jnp.arange(self.shape[1])
        group = jnp.searchsorted(offs, places, side="right")
        parts = jnp.where(group == jnp.arange(offs.size)[:, None], self[:, None], 0)
        out = einsum("mgs,sn->gmn", parts, mat2)
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


_NORMALIZATIONS = ("backward", "ortho", "forward")
"""The names, for a forward transform, of torch's numbers: 0 multiplies by 1, 1 by 1 / sqrt(n), 2 by 1 / n."""


@register_op("aten._fft_c2c")
def fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """Return the complex-to-complex transform, or its inverse."""
    if not dim:
        return self
    if forward:
        return jnp.fft.fftn(self, axes=tuple(dim), norm=_NORMALIZATIONS[normalization])
    return jnp.fft.ifftn(self, axes=tuple(dim), norm=_NORMALIZATIONS[2 - normalization])


@register_op("aten._fft_r2c")
def fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Return the real-to-complex transform, one-sided along the last of the axes where asked for."""
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(self, axes=tuple(dim), norm=_NORMALIZATIONS[normalization])


@register_op("aten._fft_c2r")
def fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Return the complex-to-real inverse transform of a spectrum one-sided along the last of the
    axes.
    """
    sizes = [*(self.shape[d] for d in dim[:-1]), last_dim_size]
    return jnp.fft.irfftn(
        self,
        s=sizes,
        axes=tuple(dim),
        norm=_NORMALIZATIONS[2 - normalization],
    )


State = tuple[Array, ...]
Cell = Callable[[State, Array, tuple[Array, ...]], State]
"""A step of a recurrent layer, from (h,) or (h, c), an input and the weights to the next state."""


def _split(
    weights: tuple[Array, ...],
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return w_ih, w_hh, b_ih, b_hh, w_hr; absent ones are None."""
    w_ih, w_hh, *rest = weights
    biases = [w for w in rest if w.ndim == 1]
    projection = [w for w in rest if w.ndim == 2]
    b_ih, b_hh = biases or (None, None)
    return w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None


def _lstm(state: State, x: Array, weights: tuple[Array, ...]) -> State:
    """Return the next (h, c); the gates are input, forget, cell and output."""
    h, c = state
    w_ih, w_hh, b_ih, b_hh, w_hr = _split(weights)
    gates = affine(x, w_ih, b_ih) + affine(h, w_hh, b_hh)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h if w_hr is None else affine(h, w_hr)), c


def _gru(state: State, x: Array, weights: tuple[Array, ...]) -> State:
    """Return the next (h,); the gates are reset, update and new."""
    (h,) = state
    w_ih, w_hh, b_ih, b_hh, _ = _split(weights)
    r_x, z_x, n_x = jnp.split(affine(x, w_ih, b_ih), 3, axis=-1)
    r_h, z_h, n_h = jnp.split(affine(h, w_hh, b_hh), 3, axis=-1)
    n = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_h) * n_h)
    return (n + jax.nn.sigmoid(z_x + z_h) * (h - n),)


def _rnn(activation: Callable[[Array], Array]) -> Cell:
    def cell(state: State, x: Array, weights: tuple[Array, ...]) -> State:
        (h,) = state
        w_ih, w_hh, b_ih, b_hh, _ = _split(weights)
        return (activation(affine(x, w_ih, b_ih) + affine(h, w_hh, b_hh)),)

    return cell


def _layers(cell: Cell) -> Lowering:
    """Return the layers of a cell: a scan over time.

    torch's decomposition would unroll it: some 15 operations for each step, layer and direction.
    """

    def lowering(  # noqa: PLR0913 - the arguments of torch's recurrent operations
        x: Array,
        states: Array | Sequence[Array],
        params: Sequence[Array],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        """Return the outputs of all steps, and the last h (and c), each (layers * directions,
        batch, width).
        """
        if train and dropout > 0 and num_layers > 1:
            raise RandomnessError(f"dropout between recurrent layers is active (p = {dropout:g})")
        states = [states] if isinstance(states, Array) else states
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

                def step(
                    state: State, x: Array, weights: tuple[Array, ...] = weights
                ) -> tuple[State, Array]:
                    state = cell(state, x, weights)
                    return state, state[0]

                final, out = lax.scan(
                    step, tuple(s[place] for s in states), x, reverse=direction == 1
                )
                finals.append(final)
                outputs.append(out)
            x = jnp.concatenate(outputs, axis=-1)
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        return x, *(jnp.stack(parts) for parts in zip(*finals, strict=True))

    return lowering


register_table(
    {
        "aten._cdist_forward": _cdist,
        "aten._euclidean_dist": _cdist,
        "aten._linalg_det": _det,
        "aten._linalg_slogdet": _slogdet,
        "aten._pdist_forward": _pdist,
        "aten.addbmm": _added(lambda one, two: jnp.sum(product(one, two), axis=0)),
        "aten.addmm": _added(product),
        "aten.addmv": _added(product),
        "aten.bmm": product,
        "aten.cholesky": lambda self, upper=False: cholesky_ex(self, upper=upper)[0],
        "aten.gru.input": _layers(_gru),
        "aten.linalg_inv_ex": lambda a, **_: (jnp.linalg.inv(a), _no_error(a)),
        "aten.linalg_matrix_exp": lambda self: scipy_linalg.expm(self),
        # torch decomposes linear and matmul into views and one product: several times as many
        # operations
        "aten.linear": affine,
        "aten.lstm.input": _layers(_lstm),
        "aten.matmul": product,
        "aten.mm": product,
        # the gradient at 0 is 0
        "aten.rnn_relu.input": _layers(_rnn(lambda x: jnp.where(x <= 0, 0, x))),
        "aten.rnn_tanh.input": _layers(_rnn(jnp.tanh)),
        # an operation of transformers for dtypes that torch's has not
        "transformers.grouped_mm_fallback": grouped_mm,
    }
)
