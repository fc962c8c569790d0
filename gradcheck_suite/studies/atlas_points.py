"""The points of the atlas: activations, pointwise functions, ties, limits, indexing, matrices, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

# A point of the atlas: an operation in both frameworks, and inputs at which its derivative is a choice.


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
        sides: left and right derivative of a function of one number, from mathematics; None for anything else.
        tied: flat indices, within the first input, of the elements that are equal; empty where none are.
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


def kinks(
    operation: str, torch_function: Torch, jax_function: Jax, points: dict[float, tuple[float, float]], note: str = ""
) -> tuple[Point, ...]:
    """Return the points of a function of one number.

    Args:
        operation: the operation's name.
        torch_function: the function in torch.
        jax_function: the function in JAX.
        points: x -> (left derivative, right derivative) at x; NaN where there is none.
        note: what makes the two differ by definition.
    """
    return tuple(
        Point(operation, f"x = {number(x)}", (x,), torch_function, jax_function, sides, note=note)
        for x, sides in points.items()
    )


def ties(
    operation: str, torch_function: Torch, jax_function: Jax, x: Sequence[float], *tied: int, note: str = ""
) -> Point:
    """Return a point whose input has equal elements, those at the indices `tied`."""
    values = ", ".join(map(number, x))
    return Point(operation, f"x = [{values}]", (list(x),), torch_function, jax_function, tied=tied, note=note)


def number(x: float) -> str:
    """Return a number as the table prints it."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return f"{x:.6g}"


# Activations at their kinks and far from zero. JAX's side is `jax.nn`, or `jnp.where` for what it lacks.


F = torch.nn.functional
_ACTIVATIONS_INF = math.inf
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017, equation 14


def _hardshrink(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) > 0.5, x, 0.0)


def _softshrink(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


_GELU_AT_1 = 0.5 * (1 + math.erf(1 / math.sqrt(2))) + math.exp(-0.5) / math.sqrt(2 * math.pi)
_LOGISTIC_AT_21 = 1 / (1 + math.exp(-21.0))

ACTIVATIONS_POINTS: tuple[Point, ...] = (
    *kinks("relu", F.relu, jax.nn.relu, {0.0: (0, 1), _ACTIVATIONS_INF: (1, 1)}),
    *kinks(
        "relu (as maximum)",
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: jnp.maximum(x, 0.0),
        {0.0: (0, 1)},
    ),
    *kinks("relu6", F.relu6, jax.nn.relu6, {0.0: (0, 1), 6.0: (1, 0)}),
    *kinks("leaky_relu", F.leaky_relu, jax.nn.leaky_relu, {0.0: (0.01, 1)}),
    *kinks(
        "prelu",
        lambda x: F.prelu(x.reshape(1), torch.full((1,), 0.25, dtype=x.dtype, device=x.device)),
        lambda x: jnp.where(x >= 0, x, 0.25 * x).reshape(1),
        {0.0: (0.25, 1)},
    ),
    *kinks("threshold", lambda x: F.threshold(x, 1.0, 0.0), lambda x: jnp.where(x > 1.0, x, 0.0), {1.0: (0, 1)}),
    *kinks("elu", F.elu, jax.nn.elu, {0.0: (1, 1), -_ACTIVATIONS_INF: (0, 0)}),
    *kinks("elu (alpha 0.5)", lambda x: F.elu(x, 0.5), lambda x: jax.nn.elu(x, 0.5), {0.0: (0.5, 1)}),
    *kinks("celu (alpha 2)", lambda x: F.celu(x, 2.0), lambda x: jax.nn.celu(x, 2.0), {0.0: (1, 1)}),
    *kinks("selu", F.selu, jax.nn.selu, {0.0: (_SELU_SCALE * _SELU_ALPHA, _SELU_SCALE)}),
    *kinks("hardtanh", F.hardtanh, jax.nn.hard_tanh, {-1.0: (0, 1), 1.0: (1, 0)}),
    *kinks("hardsigmoid", F.hardsigmoid, jax.nn.hard_sigmoid, {-3.0: (0, 1 / 6), 3.0: (1 / 6, 0)}),
    *kinks("hardswish", F.hardswish, jax.nn.hard_silu, {-3.0: (0, -0.5), 3.0: (1.5, 1)}),
    *kinks("hardshrink", F.hardshrink, _hardshrink, {-0.5: (1, 0), 0.5: (0, 1)}),
    *kinks("softshrink", F.softshrink, _softshrink, {-0.5: (1, 0), 0.0: (0, 0), 0.5: (0, 1)}),
    *kinks("softsign", F.softsign, jax.nn.soft_sign, {0.0: (1, 1), _ACTIVATIONS_INF: (0, 0)}),
    *kinks(
        "softplus",
        F.softplus,
        jax.nn.softplus,
        {
            -1000.0: (0, 0),
            0.0: (0.5, 0.5),
            21.0: (_LOGISTIC_AT_21, _LOGISTIC_AT_21),
            1000.0: (1, 1),
            _ACTIVATIONS_INF: (1, 1),
        },
        note="torch returns x itself above its threshold, 20",
    ),
    *kinks(
        "logsigmoid", F.logsigmoid, jax.nn.log_sigmoid, {-1000.0: (1, 1), 0.0: (0.5, 0.5), -_ACTIVATIONS_INF: (1, 1)}
    ),
    *kinks("sigmoid", torch.sigmoid, jax.nn.sigmoid, {-1000.0: (0, 0), 1000.0: (0, 0), -_ACTIVATIONS_INF: (0, 0)}),
    *kinks("tanh", torch.tanh, jnp.tanh, {1000.0: (0, 0), _ACTIVATIONS_INF: (0, 0)}),
    *kinks("silu", F.silu, jax.nn.silu, {-1000.0: (0, 0), -_ACTIVATIONS_INF: (0, 0), _ACTIVATIONS_INF: (1, 1)}),
    *kinks("mish", F.mish, jax.nn.mish, {-1000.0: (0, 0), -_ACTIVATIONS_INF: (0, 0), _ACTIVATIONS_INF: (1, 1)}),
    *kinks(
        "gelu",
        F.gelu,
        jax.nn.gelu,
        {1.0: (_GELU_AT_1, _GELU_AT_1)},
        note="torch's default is the exact form, JAX's the approximation by tanh",
    ),
    *kinks(
        "gelu (exact)",
        F.gelu,
        _normal_cdf,
        {1.0: (_GELU_AT_1, _GELU_AT_1), -1000.0: (0, 0), -_ACTIVATIONS_INF: (0, 0), _ACTIVATIONS_INF: (1, 1)},
    ),
    *kinks(
        "gelu (tanh)",
        lambda x: F.gelu(x, approximate="tanh"),
        jax.nn.gelu,
        {-1000.0: (0, 0), -_ACTIVATIONS_INF: (0, 0), _ACTIVATIONS_INF: (1, 1)},
    ),
    *kinks("tanhshrink", F.tanhshrink, lambda x: x - jnp.tanh(x), {0.0: (0, 0), _ACTIVATIONS_INF: (1, 1)}),
)


# Functions of one number, and of two, at kinks, jumps and the edges of their domains.


_POINTWISE_INF, _POINTWISE_NAN = math.inf, math.nan
_POINTWISE_ZERO = (0.0, 0.0)


def _pairs(
    operation: str, torch_function: object, jax_function: object, *points: tuple[float, float]
) -> tuple[Point, ...]:
    return tuple(
        Point(operation, f"x = {number(x)}, y = {number(y)}", (x, y), torch_function, jax_function)  # type: ignore[arg-type]
        for x, y in points
    )


_OF_ONE: tuple[tuple[Point, ...], ...] = (
    kinks("abs", torch.abs, jnp.abs, {0.0: (-1, 1)}),
    kinks("sign", torch.sign, jnp.sign, {0.0: _POINTWISE_ZERO}),
    kinks("floor", torch.floor, jnp.floor, {1.0: _POINTWISE_ZERO}),
    kinks("ceil", torch.ceil, jnp.ceil, {1.0: _POINTWISE_ZERO}),
    kinks("round", torch.round, jnp.round, {0.5: _POINTWISE_ZERO, 1.5: _POINTWISE_ZERO}),
    kinks("trunc", torch.trunc, jnp.trunc, {1.0: _POINTWISE_ZERO}),
    kinks("frac", torch.frac, lambda x: x - jnp.trunc(x), {0.0: (1, 1), 1.0: (1, 1)}),
    kinks("clamp(-1, 1)", lambda x: x.clamp(-1, 1), lambda x: jnp.clip(x, -1, 1), {-1.0: (0, 1), 1.0: (1, 0)}),
    kinks("clamp_min(0)", lambda x: x.clamp_min(0), lambda x: jnp.clip(x, 0), {0.0: (0, 1)}),
    kinks("clamp_max(0)", lambda x: x.clamp_max(0), lambda x: jnp.clip(x, max=0), {0.0: (1, 0)}),
    kinks("sqrt", torch.sqrt, jnp.sqrt, {0.0: (_POINTWISE_NAN, _POINTWISE_INF), _POINTWISE_INF: _POINTWISE_ZERO}),
    kinks(
        "rsqrt", torch.rsqrt, jax.lax.rsqrt, {0.0: (_POINTWISE_NAN, -_POINTWISE_INF), _POINTWISE_INF: _POINTWISE_ZERO}
    ),
    kinks(
        "reciprocal",
        torch.reciprocal,
        jnp.reciprocal,
        {0.0: (-_POINTWISE_INF, -_POINTWISE_INF), _POINTWISE_INF: _POINTWISE_ZERO},
    ),
    kinks("square", torch.square, jnp.square, {0.0: _POINTWISE_ZERO}),
    kinks("x ** 0", lambda x: x**0, lambda x: x**0, {0.0: _POINTWISE_ZERO}),
    kinks("x ** 0.5", lambda x: x**0.5, lambda x: x**0.5, {0.0: (_POINTWISE_NAN, _POINTWISE_INF)}),
    kinks("x ** 1", lambda x: x**1, lambda x: x**1, {0.0: (1, 1)}),
    kinks("x ** 2", lambda x: x**2, lambda x: x**2, {0.0: _POINTWISE_ZERO}),
    kinks("x ** -1", lambda x: x**-1, lambda x: x**-1, {0.0: (-_POINTWISE_INF, -_POINTWISE_INF)}),
    kinks("exp", torch.exp, jnp.exp, {1000.0: (_POINTWISE_INF, _POINTWISE_INF), -_POINTWISE_INF: _POINTWISE_ZERO}),
    kinks(
        "log",
        torch.log,
        jnp.log,
        {
            0.0: (_POINTWISE_NAN, _POINTWISE_INF),
            -1.0: (_POINTWISE_NAN, _POINTWISE_NAN),
            _POINTWISE_INF: _POINTWISE_ZERO,
        },
    ),
    kinks("log1p", torch.log1p, jnp.log1p, {-1.0: (_POINTWISE_NAN, _POINTWISE_INF)}),
    kinks("asin", torch.asin, jnp.arcsin, {1.0: (_POINTWISE_INF, _POINTWISE_NAN)}),
    kinks("acos", torch.acos, jnp.arccos, {1.0: (-_POINTWISE_INF, _POINTWISE_NAN)}),
    kinks("acosh", torch.acosh, jnp.arccosh, {1.0: (_POINTWISE_NAN, _POINTWISE_INF)}),
    kinks("atanh", torch.atanh, jnp.arctanh, {1.0: (_POINTWISE_INF, _POINTWISE_NAN)}),
    kinks("sinc", torch.sinc, jnp.sinc, {0.0: _POINTWISE_ZERO}),
    kinks("erfinv", torch.erfinv, jax.scipy.special.erfinv, {1.0: (_POINTWISE_INF, _POINTWISE_NAN)}),
    kinks(
        "logit",
        torch.logit,
        jax.scipy.special.logit,
        {0.0: (_POINTWISE_NAN, _POINTWISE_INF), 1.0: (_POINTWISE_INF, _POINTWISE_NAN)},
    ),
    kinks(
        "nan_to_num",
        torch.nan_to_num,
        jnp.nan_to_num,
        {_POINTWISE_NAN: _POINTWISE_ZERO, _POINTWISE_INF: _POINTWISE_ZERO},
    ),
    kinks(
        "where(x > 0, log x, 0)",
        lambda x: torch.where(x > 0, torch.log(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.log(x), 0.0),
        {0.0: (0, _POINTWISE_INF)},
    ),
    kinks(
        "where(x > 0, sqrt x, 0)",
        lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        {0.0: (0, _POINTWISE_INF), -1.0: _POINTWISE_ZERO},
    ),
)
_OF_TWO: tuple[tuple[Point, ...], ...] = (
    _pairs("x ** y", torch.pow, jnp.power, (0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (-1.0, 2.0)),
    _pairs("xlogy", torch.xlogy, jax.scipy.special.xlogy, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)),
    _pairs("atan2", torch.atan2, jnp.arctan2, (0.0, 0.0), (0.0, -1.0)),
    _pairs("hypot", torch.hypot, jnp.hypot, (0.0, 0.0)),
    _pairs("x / y", torch.div, jnp.divide, (0.0, 0.0), (1.0, 0.0), (_POINTWISE_INF, _POINTWISE_INF)),
    _pairs("x * y", torch.mul, jnp.multiply, (_POINTWISE_INF, 0.0)),
    _pairs("fmod", torch.fmod, jnp.fmod, (2.0, 1.0)),
    _pairs("remainder", torch.remainder, jnp.remainder, (2.0, 1.0)),
    _pairs("copysign", torch.copysign, jnp.copysign, (0.0, 1.0), (1.0, 0.0)),
    _pairs("maximum", torch.maximum, jnp.maximum, (1.0, 1.0), (1.0, _POINTWISE_NAN)),
    _pairs("minimum", torch.minimum, jnp.minimum, (1.0, 1.0)),
    _pairs("fmax", torch.fmax, jnp.fmax, (1.0, 1.0), (1.0, _POINTWISE_NAN)),
    _pairs("fmin", torch.fmin, jnp.fmin, (1.0, 1.0)),
    _pairs(
        "logaddexp",
        torch.logaddexp,
        jnp.logaddexp,
        (0.0, 0.0),
        (-_POINTWISE_INF, -_POINTWISE_INF),
        (_POINTWISE_INF, _POINTWISE_INF),
        (0.0, -_POINTWISE_INF),
    ),
)
POINTWISE_POINTS: tuple[Point, ...] = tuple(point for points in (*_OF_ONE, *_OF_TWO) for point in points)


# Selections and orders among equal elements: which of them receives the gradient.


def _pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")


def _max_pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(x.reshape(1, 1, -1), 2).reshape(-1)


def _adaptive(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_max_pool1d(x.reshape(1, 1, -1), 1).reshape(-1)


_SAME = [1.0, 1.0, 1.0]
_TOP = [2.0, 0.0, 2.0]
_MID = [0.0, 1.0, 1.0, 2.0]

TIES_POINTS: tuple[Point, ...] = (
    ties("max", torch.max, jnp.max, _TOP, 0, 2),
    ties("min", torch.min, jnp.min, [0.0, 2.0, 0.0], 0, 2),
    ties("max(dim)", lambda x: x.max(0).values, lambda x: x.max(0), _TOP, 0, 2),
    ties("min(dim)", lambda x: x.min(0).values, lambda x: x.min(0), [0.0, 2.0, 0.0], 0, 2),
    ties("amax", torch.amax, jnp.max, _TOP, 0, 2),
    ties("amin", torch.amin, jnp.min, [0.0, 2.0, 0.0], 0, 2),
    ties("aminmax", lambda x: x.aminmax().max, jnp.max, _TOP, 0, 2),
    ties("median of three", torch.median, jnp.median, [1.0, 1.0, 2.0], 0, 1),
    ties("median of four", torch.median, jnp.median, _MID, 1, 2),
    ties(
        "median of two",
        torch.median,
        jnp.median,
        [1.0, 2.0],
        0,
        1,
        note="torch returns the lower of the two middle elements, JAX their mean",
    ),
    ties("quantile(0.5)", lambda x: x.quantile(0.5), lambda x: jnp.quantile(x, 0.5), _MID, 1, 2),
    ties("sort, first", lambda x: x.sort().values[0], lambda x: jnp.sort(x)[0], _SAME, 0, 1, 2),
    ties("sort, last", lambda x: x.sort().values[-1], lambda x: jnp.sort(x)[-1], _SAME, 0, 1, 2),
    ties("topk(1)", lambda x: x.topk(1).values, lambda x: jax.lax.top_k(x, 1)[0], _TOP, 0, 2),
    ties("topk(2) of three", lambda x: x.topk(2).values, lambda x: jax.lax.top_k(x, 2)[0], _SAME, 0, 1, 2),
    ties("kthvalue(1)", lambda x: x.kthvalue(1).values, lambda x: jnp.sort(x)[0], [0.0, 2.0, 0.0], 0, 2),
    ties("mode", lambda x: x.mode().values, lambda x: x[0], [1.0, 1.0, 2.0], 0, 1),
    ties("cummax, last", lambda x: x.cummax(0).values[-1], lambda x: jax.lax.cummax(x)[-1], _SAME, 0, 1, 2),
    ties("cummin, last", lambda x: x.cummin(0).values[-1], lambda x: jax.lax.cummin(x)[-1], _SAME, 0, 1, 2),
    ties("max_pool1d", _max_pool, _pooled, [1.0, 1.0], 0, 1),
    ties("adaptive_max_pool1d", _adaptive, jnp.max, _SAME, 0, 1, 2),
    ties(
        "scatter_reduce(amax)",
        lambda x: torch.zeros(1, dtype=x.dtype, device=x.device).scatter_reduce(
            0, torch.zeros(3, dtype=torch.long, device=x.device), x, "amax"
        ),
        lambda x: jnp.zeros(1, x.dtype).at[jnp.zeros(3, int)].max(x),
        _TOP,
        0,
        2,
    ),
    ties(
        "vector_norm(inf)",
        lambda x: torch.linalg.vector_norm(x, float("inf")),
        lambda x: jnp.linalg.norm(x, jnp.inf),
        _TOP,
        0,
        2,
    ),
    ties("logsumexp", lambda x: x.logsumexp(0), jax.scipy.special.logsumexp, _SAME, 0, 1, 2),
)


# Reductions and normalizations of zeros, infinities, constants and single elements.


_ACTIVATIONS_INF = math.inf
_EPS = 1e-5


def _of_vector(operation: str, of_torch: Torch, of_jax: Jax, *vectors: Sequence[float], note: str = "") -> list[Point]:
    return [
        Point(operation, f"x = [{', '.join(map(number, x))}]", (list(x),), of_torch, of_jax, note=note) for x in vectors
    ]


def _normalized(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x), 1e-12)


def _layer_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + _EPS)


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean() + _EPS)


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first element of a function's result: the sum of a softmax has no gradient."""
    return lambda x: function(x)[0]


def _norm(order: float) -> tuple[Torch, Jax]:
    return lambda x: torch.linalg.vector_norm(x, order), lambda x: jnp.linalg.norm(x, order)


_SOFTMAX = _first(lambda x: x.softmax(0)), _first(jax.nn.softmax)
_LOG_SOFTMAX = _first(lambda x: x.log_softmax(0)), _first(jax.nn.log_softmax)
_CORRECTED = "torch divides by n - 1, JAX by n"

LIMITS_POINTS: tuple[Point, ...] = (
    *_of_vector("vector_norm(2)", *_norm(2), [0.0, 0.0], [0.0]),
    *_of_vector("vector_norm(1)", *_norm(1), [0.0, 1.0]),
    *_of_vector("vector_norm(3)", *_norm(3), [0.0, 0.0]),
    *_of_vector("vector_norm(0.5)", *_norm(0.5), [0.0, 1.0]),
    *_of_vector("vector_norm(inf)", *_norm(_ACTIVATIONS_INF), [0.0, 0.0]),
    *_of_vector("vector_norm(0)", *_norm(0), [0.0, 1.0]),
    *_of_vector("normalize", _first(lambda x: F.normalize(x, dim=0)), _first(_normalized), [0.0, 0.0]),
    *_of_vector("std, unbiased", lambda x: x.std(), lambda x: x.std(ddof=1), [1.0], [1.0, 1.0]),
    *_of_vector("std, biased", lambda x: x.std(correction=0), lambda x: x.std(), [1.0], [1.0, 1.0]),
    *_of_vector("std, default", lambda x: x.std(), lambda x: x.std(), [1.0, 2.0], note=_CORRECTED),
    *_of_vector("var, unbiased", lambda x: x.var(), lambda x: x.var(ddof=1), [1.0], [1.0, 1.0]),
    *_of_vector("var, biased", lambda x: x.var(correction=0), lambda x: x.var(), [1.0]),
    *_of_vector("var, default", lambda x: x.var(), lambda x: x.var(), [1.0, 2.0], note=_CORRECTED),
    *_of_vector(
        "layer_norm", _first(lambda x: F.layer_norm(x, x.shape, eps=_EPS)), _first(_layer_norm), [1.0, 1.0], [1.0]
    ),
    *_of_vector("rms_norm", _first(lambda x: F.rms_norm(x, x.shape, eps=_EPS)), _first(_rms_norm), [0.0, 0.0]),
    *_of_vector("mean of nothing", lambda x: x[:0].mean(), lambda x: x[:0].mean(), [1.0]),
    *_of_vector("sum of nothing", lambda x: x[:0].sum(), lambda x: x[:0].sum(), [1.0]),
    *_of_vector("prod", torch.prod, jnp.prod, [0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]),
    *_of_vector("cumprod", lambda x: x.cumprod(0), jnp.cumprod, [0.0, 2.0, 3.0], [2.0, 0.0, 0.0]),
    *_of_vector("cumsum", lambda x: x.cumsum(0), jnp.cumsum, [_ACTIVATIONS_INF, -_ACTIVATIONS_INF]),
    *_of_vector(
        "logcumsumexp",
        lambda x: x.logcumsumexp(0),
        jax.lax.cumlogsumexp,
        [-_ACTIVATIONS_INF, 0.0],
        [-_ACTIVATIONS_INF, -_ACTIVATIONS_INF],
    ),
    *_of_vector(
        "logsumexp",
        lambda x: x.logsumexp(0),
        jax.scipy.special.logsumexp,
        [-_ACTIVATIONS_INF, 0.0],
        [-_ACTIVATIONS_INF, -_ACTIVATIONS_INF],
        [_ACTIVATIONS_INF, 0.0],
        [1000.0, 1000.0],
    ),
    *_of_vector(
        "softmax, first",
        *_SOFTMAX,
        [0.0, -_ACTIVATIONS_INF],
        [-_ACTIVATIONS_INF, -_ACTIVATIONS_INF],
        [_ACTIVATIONS_INF, 0.0],
        [1000.0, -1000.0],
    ),
    *_of_vector(
        "log_softmax, first",
        *_LOG_SOFTMAX,
        [0.0, -_ACTIVATIONS_INF],
        [-_ACTIVATIONS_INF, 0.0],
        [-_ACTIVATIONS_INF, -_ACTIVATIONS_INF],
    ),
)


# Indices that occur twice, and indices of padding.


_TWICE = [0, 0]
_BASE, _VALUES = [1.0, 2.0], [3.0, 4.0]
_WEIGHTS = [1.0, 10.0]
"""Weights of the result's elements, so that the gradient tells which value was stored."""


def _where(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_TWICE, device=x.device)


def _weighted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(_WEIGHTS, dtype=x.dtype, device=x.device)


def _jax_weighted(x: jax.Array) -> jax.Array:
    return x * jnp.asarray(_WEIGHTS, x.dtype)


def _embedding(weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    return F.embedding(torch.tensor([0, 1, 1], device=weight.device), weight, padding_idx)


def _bag(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(torch.tensor([[1, 1]], device=weight.device), weight, padding_idx=1, mode="mean")


def _scatter(base: torch.Tensor, values: torch.Tensor, how: str | None = None) -> torch.Tensor:
    where = _where(base)
    found = base.scatter(0, where, values) if how is None else base.scatter_reduce(0, where, values, how)
    return _weighted(found)


_STORED = "both store the last value; only the way back differs"

INDEXING_POINTS: tuple[Point, ...] = (
    Point("x[i]", "i = [0, 0]", (_BASE,), lambda x: x[_where(x)], lambda x: x[jnp.array(_TWICE)]),
    Point("gather", "i = [0, 0]", (_BASE,), lambda x: x.gather(0, _where(x)), lambda x: jnp.take(x, jnp.array(_TWICE))),
    Point(
        "index_put (set)",
        "i = [0, 0]",
        (_BASE, _VALUES),
        lambda x, y: _weighted(x.index_put((_where(x),), y)),
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].set(y)),
        note=_STORED,
    ),
    Point(
        "index_put (add)",
        "i = [0, 0]",
        (_BASE, _VALUES),
        lambda x, y: _weighted(x.index_put((_where(x),), y, accumulate=True)),
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].add(y)),
    ),
    Point(
        "index_add",
        "i = [0, 0]",
        (_BASE, _VALUES),
        lambda x, y: _weighted(x.index_add(0, _where(x), y)),
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].add(y)),
    ),
    Point(
        "index_copy",
        "i = [0, 0]",
        (_BASE, _VALUES),
        lambda x, y: _weighted(x.index_copy(0, _where(x), y)),
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].set(y)),
        note=_STORED,
    ),
    Point(
        "scatter",
        "i = [0, 0]",
        (_BASE, _VALUES),
        _scatter,
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].set(y)),
        note=_STORED,
    ),
    Point(
        "scatter_reduce(prod)",
        "i = [0, 0], a value 0",
        (_BASE, [0.0, 4.0]),
        lambda x, y: _scatter(x, y, "prod"),
        lambda x, y: _jax_weighted(jnp.stack([x[0] * jnp.prod(y), x[1]])),
    ),
    Point(
        "scatter_reduce(amax)",
        "i = [0, 0], equal values",
        (_BASE, [3.0, 3.0]),
        lambda x, y: _scatter(x, y, "amax"),
        lambda x, y: _jax_weighted(x.at[jnp.array(_TWICE)].max(y)),
    ),
    Point(
        "embedding",
        "tokens [0, 1, 1]",
        (_BASE,),
        lambda w: _embedding(w.reshape(2, 1)),
        lambda w: w[jnp.array([0, 1, 1])],
    ),
    Point(
        "embedding(padding_idx=1)",
        "tokens [0, 1, 1]",
        (_BASE,),
        lambda w: _embedding(w.reshape(2, 1), padding_idx=1),
        lambda w: w[jnp.array([0, 1, 1])],
        note="torch gives the padding row no gradient; JAX has no such option",
    ),
    Point(
        "embedding_bag(mean, padding_idx=1)",
        "a bag of padding alone",
        (_BASE,),
        lambda w: _bag(w.reshape(2, 1)),
        lambda w: (w[jnp.array([1, 1])] * 0).sum() / jnp.maximum(jnp.zeros(()), 1.0),
    ),
    Point("masked_fill", "all masked", (_BASE,), lambda x: x.masked_fill(x == x, 0), lambda x: jnp.where(x == x, 0, x)),
)


# Distances of equal points, and factorisations of singular and symmetric matrices.


_POINT = [[1.0, 2.0]]
_IDENTITY, _RANK_1, _LINEAR_ALGEBRA_ZERO = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]

_ADJUGATE = "the gradient is the transposed adjugate, as JAX has it: https://github.com/pytorch/pytorch/issues/104675"


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x - y)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    norms = jnp.maximum(jnp.linalg.norm(x), 1e-8) * jnp.maximum(jnp.linalg.norm(y), 1e-8)
    return (x * y).sum() / norms


LINEAR_ALGEBRA_POINTS: tuple[Point, ...] = (
    Point("cdist", "the same point twice", (_POINT, _POINT), torch.cdist, _distance),
    Point(
        "pairwise_distance",
        "the same point twice",
        (_POINT, _POINT),
        lambda x, y: F.pairwise_distance(x, y, eps=0.0),
        _distance,
    ),
    Point("cosine_similarity", "x = [0, 0]", ([[0.0, 0.0]], _POINT), lambda x, y: F.cosine_similarity(x, y), _cosine),
    Point("det", "a matrix of rank 1", (_RANK_1,), torch.det, jnp.linalg.det, note=_ADJUGATE),
    Point("det", "the zero matrix", (_LINEAR_ALGEBRA_ZERO,), torch.det, jnp.linalg.det),
    Point("slogdet", "the identity", (_IDENTITY,), lambda x: x.slogdet().logabsdet, lambda x: jnp.linalg.slogdet(x)[1]),
    Point(
        "matrix_norm(fro)",
        "the zero matrix",
        (_LINEAR_ALGEBRA_ZERO,),
        torch.linalg.matrix_norm,
        jnp.linalg.norm,
    ),
    Point(
        "matrix_norm(2)",
        "the identity: equal singular values",
        (_IDENTITY,),
        lambda x: torch.linalg.matrix_norm(x, 2),
        lambda x: jnp.linalg.norm(x, 2),
    ),
    Point(
        "matrix_norm(nuc)",
        "a matrix of rank 1",
        (_RANK_1,),
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: jnp.linalg.norm(x, "nuc"),
    ),
    Point(
        "eigvalsh",
        "the identity: equal eigenvalues",
        (_IDENTITY,),
        lambda x: torch.linalg.eigvalsh(x)[0],
        lambda x: jnp.linalg.eigvalsh(x)[0],
    ),
    Point(
        "eigh, largest eigenvector squared",
        "the identity: equal eigenvalues",
        (_IDENTITY,),
        lambda x: torch.linalg.eigh(x).eigenvectors[0, 1] ** 2,
        lambda x: jnp.linalg.eigh(x)[1][0, 1] ** 2,
    ),
    Point(
        "svdvals",
        "a matrix of rank 1",
        (_RANK_1,),
        lambda x: torch.linalg.svdvals(x).sum(),
        lambda x: jnp.linalg.svd(x, compute_uv=False).sum(),
    ),
    Point(
        "pinv",
        "the zero matrix",
        (_LINEAR_ALGEBRA_ZERO,),
        lambda x: torch.linalg.pinv(x).sum(),
        lambda x: jnp.linalg.pinv(x).sum(),
    ),
)


# Losses at their kinks, and where a target or a probability is at the edge. JAX's side is the formula in `jnp`.


_LOSSES_INF, _LOSSES_NAN = math.inf, math.nan
_CLAMPED = "torch clamps the logarithm at -100"


def _like(x: torch.Tensor, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(x.shape if len(values) == x.numel() else -1)


def _classes(x: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=x.device)


def _smooth_l1(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < 1, x**2 / 2, jnp.abs(x) - 0.5)


def _bce(p: jax.Array, y: float) -> jax.Array:
    return -(y * jnp.log(p) + (1 - y) * jnp.log1p(-p))


def _bce_with_logits(x: jax.Array, y: float) -> jax.Array:
    return -y * jax.nn.log_sigmoid(x) - (1 - y) * jax.nn.log_sigmoid(-x)


def _bce_with_max_and_abs(x: jax.Array, y: float) -> jax.Array:
    """Return the formula that torch's documentation derives, whose two kinks at 0 do not cancel in JAX."""
    return jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _cross_entropy(x: jax.Array, target: int) -> jax.Array:
    return -jax.nn.log_softmax(x)[target]


def _hinge(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


def _triplet(x: jax.Array) -> jax.Array:
    return _hinge(jnp.linalg.norm(x) - jnp.linalg.norm(x) + 1.0)


LOSSES_POINTS: tuple[Point, ...] = (
    *kinks("l1_loss (target 0)", lambda x: F.l1_loss(x, _like(x, 0.0)), jnp.abs, {0.0: (-1, 1)}),
    *kinks("mse_loss (target 0)", lambda x: F.mse_loss(x, _like(x, 0.0)), jnp.square, {0.0: (0, 0)}),
    *kinks(
        "smooth_l1_loss (target 0)",
        lambda x: F.smooth_l1_loss(x, _like(x, 0.0)),
        _smooth_l1,
        {0.0: (0, 0), 1.0: (1, 1)},
    ),
    *kinks("smooth_l1_loss (beta 0)", lambda x: F.smooth_l1_loss(x, _like(x, 0.0), beta=0.0), jnp.abs, {0.0: (-1, 1)}),
    *kinks(
        "huber_loss (target 0)", lambda x: F.huber_loss(x, _like(x, 0.0)), _smooth_l1, {0.0: (0, 0), -1.0: (-1, -1)}
    ),
    *kinks(
        "hinge_embedding_loss (target -1, margin 1)",
        lambda x: F.hinge_embedding_loss(x, _like(x, -1.0)),
        lambda x: _hinge(1.0 - x),
        {1.0: (-1, 0)},
    ),
    *kinks(
        "margin_ranking_loss (x against 0, target 1)",
        lambda x: F.margin_ranking_loss(x, _like(x, 0.0), _like(x, 1.0)),
        lambda x: _hinge(-x),
        {0.0: (-1, 0)},
    ),
    *kinks(
        "multi_margin_loss ([0, x], target 0)",
        lambda x: F.multi_margin_loss(torch.stack([torch.zeros_like(x), x]).reshape(1, 2), _classes(x, 0)),
        lambda x: _hinge(1.0 + x) / 2,
        {-1.0: (0, 0.5)},
    ),
    *kinks(
        "soft_margin_loss (target 1)",
        lambda x: F.soft_margin_loss(x, _like(x, 1.0)),
        lambda x: jnp.logaddexp(-x, 0.0),
        {0.0: (-0.5, -0.5), -1000.0: (-1, -1)},
    ),
    *kinks(
        "binary_cross_entropy (target 0)",
        lambda p: F.binary_cross_entropy(p, _like(p, 0.0)),
        lambda p: _bce(p, 0.0),
        {0.0: (_LOSSES_NAN, 1), 1.0: (_LOSSES_INF, _LOSSES_NAN)},
        note=_CLAMPED,
    ),
    *kinks(
        "binary_cross_entropy (target 1)",
        lambda p: F.binary_cross_entropy(p, _like(p, 1.0)),
        lambda p: _bce(p, 1.0),
        {0.0: (_LOSSES_NAN, -_LOSSES_INF), 1.0: (-1, _LOSSES_NAN)},
        note=_CLAMPED,
    ),
    *kinks(
        "binary_cross_entropy_with_logits (target 1)",
        lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 1.0)),
        lambda x: _bce_with_logits(x, 1.0),
        {0.0: (-0.5, -0.5), -1000.0: (-1, -1), 1000.0: (0, 0), _LOSSES_INF: (0, 0)},
    ),
    *kinks(
        "binary_cross_entropy_with_logits (target 1; in JAX by max and abs)",
        lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 1.0)),
        lambda x: _bce_with_max_and_abs(x, 1.0),
        {0.0: (-0.5, -0.5)},
        note="the kinks of max(x, 0) and abs(x) at 0 cancel only if each takes the mean of its sides",
    ),
    *kinks(
        "kl_div (target 0)",
        lambda x: F.kl_div(x, _like(x, 0.0), reduction="sum"),
        lambda x: jax.scipy.special.xlogy(0.0, 0.0) - 0.0 * x,
        {0.0: (0, 0), -_LOSSES_INF: (0, 0)},
    ),
    *kinks(
        "poisson_nll_loss (target 0)",
        lambda x: F.poisson_nll_loss(x, _like(x, 0.0)),
        lambda x: jnp.exp(x) - 0.0 * x,
        {-_LOSSES_INF: (0, 0), 1000.0: (_LOSSES_INF, _LOSSES_INF)},
    ),
    *kinks(
        "gaussian_nll_loss (variance x, error 1)",
        lambda x: F.gaussian_nll_loss(_like(x, 1.0).reshape(1), _like(x, 0.0).reshape(1), x.reshape(1)),
        lambda x: 0.5 * (jnp.log(jnp.maximum(x, 1e-6)) + 1 / jnp.maximum(x, 1e-6)),
        {1.0: (0, 0), 1e-6: (0, 0.5 * (1e6 - 1e12)), 0.0: (_LOSSES_NAN, 0)},
        note="torch clamps the variance outside of the graph, so that its gradient passes the clamp",
    ),
    Point(
        "cross_entropy",
        "logits [0, -inf], target 0",
        ([0.0, -_LOSSES_INF],),
        lambda x: F.cross_entropy(x, torch.tensor(0, device=x.device)),
        lambda x: _cross_entropy(x, 0),
    ),
    Point(
        "cross_entropy",
        "logits [0, -inf], target 1",
        ([0.0, -_LOSSES_INF],),
        lambda x: F.cross_entropy(x, torch.tensor(1, device=x.device)),
        lambda x: _cross_entropy(x, 1),
    ),
    Point(
        "cross_entropy",
        "every target ignored",
        ([0.0, 1.0],),
        lambda x: F.cross_entropy(x.reshape(1, 2), _classes(x, -100)),
        lambda x: 0.0 * _cross_entropy(x, 0) / jnp.zeros((), x.dtype),
        note="torch's loss is NaN and its gradient 0; a mean written as sum over count is 0/0 in both",
    ),
    Point(
        "cross_entropy",
        "logits [1000, -1000], target 1",
        ([1000.0, -1000.0],),
        lambda x: F.cross_entropy(x, torch.tensor(1, device=x.device)),
        lambda x: _cross_entropy(x, 1),
    ),
    Point(
        "cosine_embedding_loss",
        "x = [0, 0], target 1",
        ([0.0, 0.0],),
        lambda x: F.cosine_embedding_loss(x.reshape(1, 2), torch.ones_like(x).reshape(1, 2), _classes(x, 1)),
        lambda x: 1 - x.sum() / jnp.sqrt(((x**2).sum() + 1e-12) * (2 + 1e-12)),
    ),
    Point(
        "triplet_margin_loss",
        "three equal points",
        ([0.0, 0.0],),
        lambda x: F.triplet_margin_loss(
            x.reshape(1, 2), torch.zeros_like(x).reshape(1, 2), torch.zeros_like(x).reshape(1, 2), eps=0.0
        ),
        _triplet,
    ),
)
