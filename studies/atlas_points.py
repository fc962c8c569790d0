"""The points of the atlas: activations, pointwise functions, ties, limits, indexing, matrices,
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import erf, exp, inf, isinf, isnan, nan, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

F = torch.nn.functional
Torch = Callable[..., torch.Tensor]
Jax = Callable[..., jax.Array]


@dataclass(frozen=True)
class Point:
    """An operation and the inputs at which its derivative is a choice.

    Attributes:
        operation: the operation's name, in torch's words.
        at: the inputs, in words.
        inputs: numbers or nested lists of numbers, each an argument that is differentiated.
        torch: the operation in torch: tensors -> tensor.
        jax: the operation in JAX as its users write it: arrays -> array.
        sides: left and right derivative of a function of one number, from mathematics; None for
            anything else.
        tied: flat indices, within the first input, of the elements that are equal; empty where none
            are.
        note: what makes the two frameworks differ by definition; empty where nothing does.
    """

    operation: str
    at: str
    inputs: tuple[Any, ...]
    torch: Torch
    jax: Jax
    sides: tuple[float, float] | None = None
    tied: tuple[int, ...] = ()
    note: str = ""


def number(x: float) -> str:
    """Return a number as the table prints it."""
    if isnan(x):
        return "NaN"
    if isinf(x):
        return "inf" if x > 0 else "-inf"
    return f"{x:.6g}"


def kinks(
    operation: str,
    of_torch: Torch,
    of_jax: Jax,
    points: dict[float, float | tuple[float, float]],
    note: str = "",
) -> list[Point]:
    """Return the points of a function of one number.

    Args:
        operation: the operation's name.
        of_torch: the function in torch.
        of_jax: the function in JAX.
        points: x -> the derivative at x, or (left derivative, right derivative); NaN where there is
            none.
        note: what makes the two differ by definition.
    """
    sides = {
        x: found if isinstance(found, tuple) else (found, found) for x, found in points.items()
    }
    return [
        Point(operation, f"x = {number(x)}", (x,), of_torch, of_jax, sides[x], note=note)
        for x in points
    ]


def pairs(
    operation: str, of_torch: Torch, of_jax: Jax, *points: tuple[float, float]
) -> list[Point]:
    """Return the points of a function of two numbers."""
    return [
        Point(operation, f"x = {number(x)}, y = {number(y)}", (x, y), of_torch, of_jax)
        for x, y in points
    ]


def vectors(
    operation: str, of_torch: Torch, of_jax: Jax, *points: Sequence[float], note: str = ""
) -> list[Point]:
    """Return the points of a function of a vector."""
    return [
        Point(
            operation, f"x = [{', '.join(map(number, x))}]", (list(x),), of_torch, of_jax, note=note
        )
        for x in points
    ]


def ties(operation: str, of_torch: Torch, of_jax: Jax, x: Sequence[float], note: str = "") -> Point:
    """Return a point whose input has equal elements, which are tied.

    All are where none are equal.
    """
    (point,) = vectors(operation, of_torch, of_jax, x, note=note)
    return replace(
        point,
        tied=tuple(i for i, value in enumerate(x) if x.count(value) > 1) or tuple(range(len(x))),
    )


def stored(
    operation: str,
    of_torch: Torch,
    of_jax: Jax,
    y: Sequence[float] = (3.0, 4.0),
    at: str = "",
    note: str = "",
) -> Point:
    """Return a point of an operation that stores two values at the same index.

    Args:
        operation: the operation's name.
        of_torch: (x, index, y) -> x with y stored at the index.
        of_jax: (x, y) -> the same at the index `TWICE`.
        y: the values.
        at: what is special about them.
        note: what makes the two differ by definition.
    """
    weights = (1.0, 10.0)  # so that the gradient tells which value was stored

    def in_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return of_torch(x, _repeated(x), y) * _like(x, *weights)

    def in_jax(x: jax.Array, y: jax.Array) -> jax.Array:
        return of_jax(x, y) * jnp.asarray(weights, x.dtype)

    return Point(operation, f"i = [0, 0]{at}", (BASE, list(y)), in_torch, in_jax, note=note)


# JAX's side of activations is `jax.nn`, or `jnp.where` for what it lacks; that of losses is the
# formula in `jnp`.

# Klambauer et al. 2017, equation 14
SELU_SCALE, SELU_ALPHA = (1.0507009873554805, 1.6732632423543772)
GELU_AT_1 = 0.5 * (1 + erf(1 / sqrt(2))) + exp(-0.5) / sqrt(2 * pi)
EPS = 1e-5
TOP, BOTTOM, SAME, MIDDLE = [2.0, 0.0, 2.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0]
BASE, PLACE = [1.0, 2.0], [[1.0, 2.0]]
TWICE, TOKENS = np.array([0, 0]), np.array([0, 1, 1])
IDENTITY, RANK_1, ZERO = (
    [[1.0, 0.0], [0.0, 1.0]],
    [[1.0, 2.0], [2.0, 4.0]],
    [[0.0, 0.0], [0.0, 0.0]],
)
CORRECTED = "torch divides by n - 1, JAX by n"
STORED = "both store the last value; only the way back differs"
ADJUGATE = (
    "the gradient is the transposed adjugate, as JAX has it:"
    " https://github.com/pytorch/pytorch/issues/104675"
)
CLAMPED = "torch clamps the logarithm at -100"


def _like(x: torch.Tensor, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(
        x.shape if len(values) == x.numel() else -1
    )


def _classes(x: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=x.device)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return _classes(x, 0, 0)


def _row(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, -1)


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first element of a function's result: the sum of a softmax has no gradient."""
    return lambda x: function(x)[0]


def _norm(order: float) -> tuple[Torch, Jax]:
    return lambda x: torch.linalg.vector_norm(x, order), lambda x: jnp.linalg.norm(x, order)


def _embedding(padding_idx: int | None = None) -> Torch:
    return lambda w: F.embedding(_classes(w, *TOKENS.tolist()), w.reshape(2, 1), padding_idx)


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x - y)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    norms = jnp.maximum(jnp.linalg.norm(x), 1e-8) * jnp.maximum(jnp.linalg.norm(y), 1e-8)
    return (x * y).sum() / norms


def _smooth_l1(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < 1, x**2 / 2, jnp.abs(x) - 0.5)


def _hinge(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


def _bce(target: float) -> tuple[Torch, Jax]:
    return (
        lambda p: F.binary_cross_entropy(p, _like(p, target)),
        lambda p: -(target * jnp.log(p) + (1 - target) * jnp.log1p(-p)),
    )


def _bce_with_logits(x: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, _like(x, 1.0))


def _cross_entropy(logits: list[float], target: int) -> Point:
    return Point(
        "cross_entropy",
        f"logits [{', '.join(map(number, logits))}], target {target}",
        (logits,),
        lambda x: F.cross_entropy(x, torch.tensor(target, device=x.device)),
        lambda x: -jax.nn.log_softmax(x)[target],
    )


POINTS: tuple[Point, ...] = (
    # Activations at their kinks and far from zero.
    *kinks("relu", F.relu, jax.nn.relu, {0.0: (0, 1), inf: 1}),
    *kinks("relu (as maximum)", lambda x: torch.maximum(x, torch.zeros_like(x)), _hinge, {0.0: (0, 1)}),
    *kinks("relu6", F.relu6, jax.nn.relu6, {0.0: (0, 1), 6.0: (1, 0)}),
    *kinks("leaky_relu", F.leaky_relu, jax.nn.leaky_relu, {0.0: (0.01, 1)}),
    *kinks("prelu", lambda x: F.prelu(x.reshape(1), torch.full((1,), 0.25, dtype=x.dtype, device=x.device)),
        lambda x: jnp.where(x >= 0, x, 0.25 * x).reshape(1), {0.0: (0.25, 1)}),
    *kinks("threshold", lambda x: F.threshold(x, 1.0, 0.0), lambda x: jnp.where(x > 1.0, x, 0.0), {1.0: (0, 1)}),
    *kinks("elu", F.elu, jax.nn.elu, {0.0: 1, -inf: 0}),
    *kinks("elu (alpha 0.5)", lambda x: F.elu(x, 0.5), lambda x: jax.nn.elu(x, 0.5), {0.0: (0.5, 1)}),
    *kinks("celu (alpha 2)", lambda x: F.celu(x, 2.0), lambda x: jax.nn.celu(x, 2.0), {0.0: 1}),
    *kinks("selu", F.selu, jax.nn.selu, {0.0: (SELU_SCALE * SELU_ALPHA, SELU_SCALE)}),
    *kinks("hardtanh", F.hardtanh, jax.nn.hard_tanh, {-1.0: (0, 1), 1.0: (1, 0)}),
    *kinks("hardsigmoid", F.hardsigmoid, jax.nn.hard_sigmoid, {-3.0: (0, 1 / 6), 3.0: (1 / 6, 0)}),
    *kinks("hardswish", F.hardswish, jax.nn.hard_silu, {-3.0: (0, -0.5), 3.0: (1.5, 1)}),
    *kinks("hardshrink", F.hardshrink, lambda x: jnp.where(jnp.abs(x) > 0.5, x, 0.0), {-0.5: (1, 0), 0.5: (0, 1)}),
    *kinks("softshrink", F.softshrink, lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0),
        {-0.5: (1, 0), 0.0: 0, 0.5: (0, 1)}),
    *kinks("softsign", F.softsign, jax.nn.soft_sign, {0.0: 1, inf: 0}),
    *kinks("softplus", F.softplus, jax.nn.softplus,
        {-1000.0: 0, 0.0: 0.5, 21.0: 1 / (1 + exp(-21.0)), 1000.0: 1, inf: 1},
        "torch returns x itself above its threshold, 20"),
    *kinks("logsigmoid", F.logsigmoid, jax.nn.log_sigmoid, {-1000.0: 1, 0.0: 0.5, -inf: 1}),
    *kinks("sigmoid", torch.sigmoid, jax.nn.sigmoid, {-1000.0: 0, 1000.0: 0, -inf: 0}),
    *kinks("tanh", torch.tanh, jnp.tanh, {1000.0: 0, inf: 0}),
    *kinks("silu", F.silu, jax.nn.silu, {-1000.0: 0, -inf: 0, inf: 1}),
    *kinks("mish", F.mish, jax.nn.mish, {-1000.0: 0, -inf: 0, inf: 1}),
    *kinks("gelu", F.gelu, jax.nn.gelu, {1.0: GELU_AT_1},
        "torch's default is the exact form, JAX's the approximation by tanh"),
    *kinks("gelu (exact)", F.gelu, lambda x: jax.nn.gelu(x, approximate=False),
        {1.0: GELU_AT_1, -1000.0: 0, -inf: 0, inf: 1}),
    *kinks("gelu (tanh)", lambda x: F.gelu(x, approximate="tanh"), jax.nn.gelu, {-1000.0: 0, -inf: 0, inf: 1}),
    *kinks("tanhshrink", F.tanhshrink, lambda x: x - jnp.tanh(x), {0.0: 0, inf: 1}),
    # Functions of one number at kinks, jumps and the edges of their domains.
    *kinks("abs", torch.abs, jnp.abs, {0.0: (-1, 1)}),
    *kinks("sign", torch.sign, jnp.sign, {0.0: 0}),
    *kinks("floor", torch.floor, jnp.floor, {1.0: 0}),
    *kinks("ceil", torch.ceil, jnp.ceil, {1.0: 0}),
    *kinks("round", torch.round, jnp.round, {0.5: 0, 1.5: 0}),
    *kinks("trunc", torch.trunc, jnp.trunc, {1.0: 0}),
    *kinks("frac", torch.frac, lambda x: x - jnp.trunc(x), {0.0: 1, 1.0: 1}),
    *kinks("clamp(-1, 1)", lambda x: x.clamp(-1, 1), lambda x: jnp.clip(x, -1, 1), {-1.0: (0, 1), 1.0: (1, 0)}),
    *kinks("clamp_min(0)", lambda x: x.clamp_min(0), lambda x: jnp.clip(x, 0), {0.0: (0, 1)}),
    *kinks("clamp_max(0)", lambda x: x.clamp_max(0), lambda x: jnp.clip(x, max=0), {0.0: (1, 0)}),
    *kinks("sqrt", torch.sqrt, jnp.sqrt, {0.0: (nan, inf), inf: 0}),
    *kinks("rsqrt", torch.rsqrt, jax.lax.rsqrt, {0.0: (nan, -inf), inf: 0}),
    *kinks("reciprocal", torch.reciprocal, jnp.reciprocal, {0.0: -inf, inf: 0}),
    *kinks("square", torch.square, jnp.square, {0.0: 0}),
    *kinks("x ** 0", lambda x: x**0, lambda x: x**0, {0.0: 0}),
    *kinks("x ** 0.5", lambda x: x**0.5, lambda x: x**0.5, {0.0: (nan, inf)}),
    *kinks("x ** 1", lambda x: x**1, lambda x: x**1, {0.0: 1}),
    *kinks("x ** 2", lambda x: x**2, lambda x: x**2, {0.0: 0}),
    *kinks("x ** -1", lambda x: x**-1, lambda x: x**-1, {0.0: -inf}),
    *kinks("exp", torch.exp, jnp.exp, {1000.0: inf, -inf: 0}),
    *kinks("log", torch.log, jnp.log, {0.0: (nan, inf), -1.0: nan, inf: 0}),
    *kinks("log1p", torch.log1p, jnp.log1p, {-1.0: (nan, inf)}),
    *kinks("asin", torch.asin, jnp.arcsin, {1.0: (inf, nan)}),
    *kinks("acos", torch.acos, jnp.arccos, {1.0: (-inf, nan)}),
    *kinks("acosh", torch.acosh, jnp.arccosh, {1.0: (nan, inf)}),
    *kinks("atanh", torch.atanh, jnp.arctanh, {1.0: (inf, nan)}),
    *kinks("sinc", torch.sinc, jnp.sinc, {0.0: 0}),
    *kinks("erfinv", torch.erfinv, jax.scipy.special.erfinv, {1.0: (inf, nan)}),
    *kinks("logit", torch.logit, jax.scipy.special.logit, {0.0: (nan, inf), 1.0: (inf, nan)}),
    *kinks("nan_to_num", torch.nan_to_num, jnp.nan_to_num, {nan: 0, inf: 0}),
    *kinks("where(x > 0, log x, 0)", lambda x: torch.where(x > 0, torch.log(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.log(x), 0.0), {0.0: (0, inf)}),
    *kinks("where(x > 0, sqrt x, 0)", lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), {0.0: (0, inf), -1.0: 0}),
    # Functions of two numbers.
    *pairs("x ** y", torch.pow, jnp.power, (0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (-1.0, 2.0)),
    *pairs("xlogy", torch.xlogy, jax.scipy.special.xlogy, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)),
    *pairs("atan2", torch.atan2, jnp.arctan2, (0.0, 0.0), (0.0, -1.0)),
    *pairs("hypot", torch.hypot, jnp.hypot, (0.0, 0.0)),
    *pairs("x / y", torch.div, jnp.divide, (0.0, 0.0), (1.0, 0.0), (inf, inf)),
    *pairs("x * y", torch.mul, jnp.multiply, (inf, 0.0)),
    *pairs("fmod", torch.fmod, jnp.fmod, (2.0, 1.0)),
    *pairs("remainder", torch.remainder, jnp.remainder, (2.0, 1.0)),
    *pairs("copysign", torch.copysign, jnp.copysign, (0.0, 1.0), (1.0, 0.0)),
    *pairs("maximum", torch.maximum, jnp.maximum, (1.0, 1.0), (1.0, nan)),
    *pairs("minimum", torch.minimum, jnp.minimum, (1.0, 1.0)),
    *pairs("fmax", torch.fmax, jnp.fmax, (1.0, 1.0), (1.0, nan)),
    *pairs("fmin", torch.fmin, jnp.fmin, (1.0, 1.0)),
    *pairs("logaddexp", torch.logaddexp, jnp.logaddexp, (0.0, 0.0), (-inf, -inf), (inf, inf), (0.0, -inf)),
    # Selections and orders among equal elements: which of them receives the gradient.
    ties("max", torch.max, jnp.max, TOP),
    ties("min", torch.min, jnp.min, BOTTOM),
    ties("max(dim)", lambda x: x.max(0).values, lambda x: x.max(0), TOP),
    ties("min(dim)", lambda x: x.min(0).values, lambda x: x.min(0), BOTTOM),
    ties("amax", torch.amax, jnp.max, TOP),
    ties("amin", torch.amin, jnp.min, BOTTOM),
    ties("aminmax", lambda x: x.aminmax().max, jnp.max, TOP),
    ties("median of three", torch.median, jnp.median, [1.0, 1.0, 2.0]),
    ties("median of four", torch.median, jnp.median, MIDDLE),
    ties("median of two", torch.median, jnp.median, [1.0, 2.0],
        "torch returns the lower of the two middle elements, JAX their mean"),
    ties("quantile(0.5)", lambda x: x.quantile(0.5), lambda x: jnp.quantile(x, 0.5), MIDDLE),
    ties("sort, first", lambda x: x.sort().values[0], lambda x: jnp.sort(x)[0], SAME),
    ties("sort, last", lambda x: x.sort().values[-1], lambda x: jnp.sort(x)[-1], SAME),
    ties("topk(1)", lambda x: x.topk(1).values, lambda x: jax.lax.top_k(x, 1)[0], TOP),
    ties("topk(2) of three", lambda x: x.topk(2).values, lambda x: jax.lax.top_k(x, 2)[0], SAME),
    ties("kthvalue(1)", lambda x: x.kthvalue(1).values, lambda x: jnp.sort(x)[0], BOTTOM),
    ties("mode", lambda x: x.mode().values, lambda x: x[0], [1.0, 1.0, 2.0]),
    ties("cummax, last", lambda x: x.cummax(0).values[-1], lambda x: jax.lax.cummax(x)[-1], SAME),
    ties("cummin, last", lambda x: x.cummin(0).values[-1], lambda x: jax.lax.cummin(x)[-1], SAME),
    ties("max_pool1d", lambda x: F.max_pool1d(_row(x), 2).reshape(-1),
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID"), [1.0, 1.0]),
    ties("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(_row(x), 1).reshape(-1), jnp.max, SAME),
    ties("scatter_reduce(amax)", lambda x: _like(x, 0.0).scatter_reduce(0, _classes(x, 0, 0, 0), x, "amax"),
        lambda x: jnp.zeros(1, x.dtype).at[jnp.zeros(3, int)].max(x), TOP),
    ties("vector_norm(inf)", *_norm(inf), TOP),
    ties("logsumexp", lambda x: x.logsumexp(0), jax.scipy.special.logsumexp, SAME),
    # Reductions and normalizations of zeros, infinities, constants and single elements.
    *vectors("vector_norm(2)", *_norm(2), [0.0, 0.0], [0.0]),
    *vectors("vector_norm(1)", *_norm(1), [0.0, 1.0]),
    *vectors("vector_norm(3)", *_norm(3), [0.0, 0.0]),
    *vectors("vector_norm(0.5)", *_norm(0.5), [0.0, 1.0]),
    *vectors("vector_norm(inf)", *_norm(inf), [0.0, 0.0]),
    *vectors("vector_norm(0)", *_norm(0), [0.0, 1.0]),
    *vectors("normalize", _first(lambda x: F.normalize(x, dim=0)),
        _first(lambda x: x / jnp.maximum(jnp.linalg.norm(x), 1e-12)), [0.0, 0.0]),
    *vectors("std, unbiased", lambda x: x.std(), lambda x: x.std(ddof=1), [1.0], [1.0, 1.0]),
    *vectors("std, biased", lambda x: x.std(correction=0), lambda x: x.std(), [1.0], [1.0, 1.0]),
    *vectors("std, default", lambda x: x.std(), lambda x: x.std(), [1.0, 2.0], note=CORRECTED),
    *vectors("var, unbiased", lambda x: x.var(), lambda x: x.var(ddof=1), [1.0], [1.0, 1.0]),
    *vectors("var, biased", lambda x: x.var(correction=0), lambda x: x.var(), [1.0]),
    *vectors("var, default", lambda x: x.var(), lambda x: x.var(), [1.0, 2.0], note=CORRECTED),
    *vectors("layer_norm", _first(lambda x: F.layer_norm(x, x.shape, eps=EPS)),
        _first(lambda x: (x - x.mean()) * jax.lax.rsqrt(x.var() + EPS)), [1.0, 1.0], [1.0]),
    *vectors("rms_norm", _first(lambda x: F.rms_norm(x, x.shape, eps=EPS)),
        _first(lambda x: x * jax.lax.rsqrt((x**2).mean() + EPS)), [0.0, 0.0]),
    *vectors("mean of nothing", lambda x: x[:0].mean(), lambda x: x[:0].mean(), [1.0]),
    *vectors("sum of nothing", lambda x: x[:0].sum(), lambda x: x[:0].sum(), [1.0]),
    *vectors("prod", torch.prod, jnp.prod, [0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]),
    *vectors("cumprod", lambda x: x.cumprod(0), jnp.cumprod, [0.0, 2.0, 3.0], [2.0, 0.0, 0.0]),
    *vectors("cumsum", lambda x: x.cumsum(0), jnp.cumsum, [inf, -inf]),
    *vectors("logcumsumexp", lambda x: x.logcumsumexp(0), jax.lax.cumlogsumexp, [-inf, 0.0], [-inf, -inf]),
    *vectors("logsumexp", lambda x: x.logsumexp(0), jax.scipy.special.logsumexp,
        [-inf, 0.0], [-inf, -inf], [inf, 0.0], [1000.0, 1000.0]),
    *vectors("softmax, first", _first(lambda x: x.softmax(0)), _first(jax.nn.softmax),
        [0.0, -inf], [-inf, -inf], [inf, 0.0], [1000.0, -1000.0]),
    *vectors("log_softmax, first", _first(lambda x: x.log_softmax(0)), _first(jax.nn.log_softmax),
        [0.0, -inf], [-inf, 0.0], [-inf, -inf]),
    # Indices that occur twice, and indices of padding.
    Point("x[i]", "i = [0, 0]", (BASE,), lambda x: x[_repeated(x)], lambda x: x[TWICE]),
    Point("gather", "i = [0, 0]", (BASE,), lambda x: x.gather(0, _repeated(x)), lambda x: jnp.take(x, TWICE)),
    stored("index_put (set)", lambda x, i, y: x.index_put((i,), y), lambda x, y: x.at[TWICE].set(y), note=STORED),
    stored("index_put (add)", lambda x, i, y: x.index_put((i,), y, accumulate=True), lambda x, y: x.at[TWICE].add(y)),
    stored("index_add", lambda x, i, y: x.index_add(0, i, y), lambda x, y: x.at[TWICE].add(y)),
    stored("index_copy", lambda x, i, y: x.index_copy(0, i, y), lambda x, y: x.at[TWICE].set(y), note=STORED),
    stored("scatter", lambda x, i, y: x.scatter(0, i, y), lambda x, y: x.at[TWICE].set(y), note=STORED),
    stored("scatter_reduce(prod)", lambda x, i, y: x.scatter_reduce(0, i, y, "prod"),
        lambda x, y: jnp.stack([x[0] * jnp.prod(y), x[1]]), [0.0, 4.0], ", a value 0"),
    stored("scatter_reduce(amax)", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), lambda x, y: x.at[TWICE].max(y),
        [3.0, 3.0], ", equal values"),
    Point("embedding", "tokens [0, 1, 1]", (BASE,), _embedding(), lambda w: w[TOKENS]),
    Point("embedding(padding_idx=1)", "tokens [0, 1, 1]", (BASE,), _embedding(padding_idx=1), lambda w: w[TOKENS],
        note="torch gives the padding row no gradient; JAX has no such option"),
    Point("embedding_bag(mean, padding_idx=1)", "a bag of padding alone", (BASE,),
        lambda w: F.embedding_bag(_row(_classes(w, 1, 1)), w.reshape(2, 1), padding_idx=1, mode="mean"),
        lambda w: (w[np.array([1, 1])] * 0).sum() / jnp.maximum(jnp.zeros(()), 1.0)),
    Point("masked_fill", "all masked", (BASE,), lambda x: x.masked_fill(x == x, 0), lambda x: jnp.where(x == x, 0, x)),
    # Distances of equal points, and factorisations of singular and symmetric matrices.
    Point("cdist", "the same point twice", (PLACE, PLACE), torch.cdist, _distance),
    Point("pairwise_distance", "the same point twice", (PLACE, PLACE), lambda x, y: F.pairwise_distance(x, y, eps=0.0),
        _distance),
    Point("cosine_similarity", "x = [0, 0]", ([[0.0, 0.0]], PLACE), lambda x, y: F.cosine_similarity(x, y), _cosine),
    Point("det", "a matrix of rank 1", (RANK_1,), torch.det, jnp.linalg.det, note=ADJUGATE),
    Point("det", "the zero matrix", (ZERO,), torch.det, jnp.linalg.det),
    Point("slogdet", "the identity", (IDENTITY,), lambda x: x.slogdet().logabsdet, lambda x: jnp.linalg.slogdet(x)[1]),
    Point("matrix_norm(fro)", "the zero matrix", (ZERO,), torch.linalg.matrix_norm, jnp.linalg.norm),
    Point("matrix_norm(2)", "the identity: equal singular values", (IDENTITY,),
        lambda x: torch.linalg.matrix_norm(x, 2), lambda x: jnp.linalg.norm(x, 2)),
    Point("matrix_norm(nuc)", "a matrix of rank 1", (RANK_1,), lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: jnp.linalg.norm(x, "nuc")),
    Point("eigvalsh", "the identity: equal eigenvalues", (IDENTITY,), lambda x: torch.linalg.eigvalsh(x)[0],
        lambda x: jnp.linalg.eigvalsh(x)[0]),
    Point("eigh, largest eigenvector squared", "the identity: equal eigenvalues", (IDENTITY,),
        lambda x: torch.linalg.eigh(x).eigenvectors[0, 1] ** 2, lambda x: jnp.linalg.eigh(x)[1][0, 1] ** 2),
    Point("svdvals", "a matrix of rank 1", (RANK_1,), lambda x: torch.linalg.svdvals(x).sum(),
        lambda x: jnp.linalg.svd(x, compute_uv=False).sum()),
    Point("pinv", "the zero matrix", (ZERO,), lambda x: torch.linalg.pinv(x).sum(), lambda x: jnp.linalg.pinv(x).sum()),
    # Losses at their kinks, and where a target or a probability is at the edge.
    *kinks("l1_loss (target 0)", lambda x: F.l1_loss(x, _like(x, 0.0)), jnp.abs, {0.0: (-1, 1)}),
    *kinks("mse_loss (target 0)", lambda x: F.mse_loss(x, _like(x, 0.0)), jnp.square, {0.0: 0}),
    *kinks("smooth_l1_loss (target 0)", lambda x: F.smooth_l1_loss(x, _like(x, 0.0)), _smooth_l1, {0.0: 0, 1.0: 1}),
    *kinks("smooth_l1_loss (beta 0)", lambda x: F.smooth_l1_loss(x, _like(x, 0.0), beta=0.0), jnp.abs, {0.0: (-1, 1)}),
    *kinks("huber_loss (target 0)", lambda x: F.huber_loss(x, _like(x, 0.0)), _smooth_l1, {0.0: 0, -1.0: -1}),
    *kinks("hinge_embedding_loss (target -1, margin 1)", lambda x: F.hinge_embedding_loss(x, _like(x, -1.0)),
        lambda x: _hinge(1.0 - x), {1.0: (-1, 0)}),
    *kinks("margin_ranking_loss (x against 0, target 1)",
        lambda x: F.margin_ranking_loss(x, _like(x, 0.0), _like(x, 1.0)), lambda x: _hinge(-x), {0.0: (-1, 0)}),
    *kinks("multi_margin_loss ([0, x], target 0)",
        lambda x: F.multi_margin_loss(_row(torch.stack([torch.zeros_like(x), x])), _classes(x, 0)),
        lambda x: _hinge(1.0 + x) / 2, {-1.0: (0, 0.5)}),
    *kinks("soft_margin_loss (target 1)", lambda x: F.soft_margin_loss(x, _like(x, 1.0)),
        lambda x: jnp.logaddexp(-x, 0.0), {0.0: -0.5, -1000.0: -1}),
    *kinks("binary_cross_entropy (target 0)", *_bce(0.0), {0.0: (nan, 1), 1.0: (inf, nan)}, CLAMPED),
    *kinks("binary_cross_entropy (target 1)", *_bce(1.0), {0.0: (nan, -inf), 1.0: (-1, nan)}, CLAMPED),
    *kinks("binary_cross_entropy_with_logits (target 1)", _bce_with_logits,
        lambda x: -1.0 * jax.nn.log_sigmoid(x) - 0.0 * jax.nn.log_sigmoid(-x),
        {0.0: -0.5, -1000.0: -1, 1000.0: 0, inf: 0}),
    # the formula that torch's documentation derives, whose two kinks at 0 do not cancel in JAX
    *kinks("binary_cross_entropy_with_logits (target 1; in JAX by max and abs)", _bce_with_logits,
        lambda x: jnp.maximum(x, 0) - x * 1.0 + jnp.log1p(jnp.exp(-jnp.abs(x))), {0.0: -0.5},
        "the kinks of max(x, 0) and abs(x) at 0 cancel only if each takes the mean of its sides"),
    *kinks("kl_div (target 0)", lambda x: F.kl_div(x, _like(x, 0.0), reduction="sum"),
        lambda x: jax.scipy.special.xlogy(0.0, 0.0) - 0.0 * x, {0.0: 0, -inf: 0}),
    *kinks("poisson_nll_loss (target 0)", lambda x: F.poisson_nll_loss(x, _like(x, 0.0)),
        lambda x: jnp.exp(x) - 0.0 * x, {-inf: 0, 1000.0: inf}),
    *kinks("gaussian_nll_loss (variance x, error 1)",
        lambda x: F.gaussian_nll_loss(_like(x, 1.0).reshape(1), _like(x, 0.0).reshape(1), x.reshape(1)),
        lambda x: 0.5 * (jnp.log(jnp.maximum(x, 1e-6)) + 1 / jnp.maximum(x, 1e-6)),
        {1.0: 0, 1e-6: (0, 0.5 * (1e6 - 1e12)), 0.0: (nan, 0)},
        "torch clamps the variance outside of the graph, so that its gradient passes the clamp"),
    _cross_entropy([0.0, -inf], 0),
    _cross_entropy([0.0, -inf], 1),
    Point("cross_entropy", "every target ignored", ([0.0, 1.0],), lambda x: F.cross_entropy(_row(x), _classes(x, -100)),
        lambda x: 0.0 * -jax.nn.log_softmax(x)[0] / jnp.zeros((), x.dtype),
        note="torch's loss is NaN and its gradient 0; a mean written as sum over count is 0/0 in both"),
    _cross_entropy([1000.0, -1000.0], 1),
    Point("cosine_embedding_loss", "x = [0, 0], target 1", ([0.0, 0.0],),
        lambda x: F.cosine_embedding_loss(_row(x), torch.ones_like(_row(x)), _classes(x, 1)),
        lambda x: 1 - x.sum() / jnp.sqrt(((x**2).sum() + 1e-12) * (2 + 1e-12))),
    Point("triplet_margin_loss", "three equal points", ([0.0, 0.0],),
        lambda x: F.triplet_margin_loss(_row(x), torch.zeros_like(_row(x)), torch.zeros_like(_row(x)), eps=0.0),
        lambda x: _hinge(jnp.linalg.norm(x) - jnp.linalg.norm(x) + 1.0)),
)  # fmt: skip
"""Every point of the atlas, in the order of the table."""
