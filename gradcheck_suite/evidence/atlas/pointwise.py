"""Functions of one number, and of two, at kinks, jumps and the edges of their domains."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point, kinks, number

_INF, _NAN = math.inf, math.nan
_ZERO = (0.0, 0.0)


def _pairs(
    operation: str, torch_function: object, jax_function: object, *points: tuple[float, float]
) -> tuple[Point, ...]:
    return tuple(
        Point(operation, f"x = {number(x)}, y = {number(y)}", (x, y), torch_function, jax_function)  # type: ignore[arg-type]
        for x, y in points
    )


_OF_ONE: tuple[tuple[Point, ...], ...] = (
    kinks("abs", torch.abs, jnp.abs, {0.0: (-1, 1)}),
    kinks("sign", torch.sign, jnp.sign, {0.0: _ZERO}),
    kinks("floor", torch.floor, jnp.floor, {1.0: _ZERO}),
    kinks("ceil", torch.ceil, jnp.ceil, {1.0: _ZERO}),
    kinks("round", torch.round, jnp.round, {0.5: _ZERO, 1.5: _ZERO}),
    kinks("trunc", torch.trunc, jnp.trunc, {1.0: _ZERO}),
    kinks("frac", torch.frac, lambda x: x - jnp.trunc(x), {0.0: (1, 1), 1.0: (1, 1)}),
    kinks("clamp(-1, 1)", lambda x: x.clamp(-1, 1), lambda x: jnp.clip(x, -1, 1), {-1.0: (0, 1), 1.0: (1, 0)}),
    kinks("clamp_min(0)", lambda x: x.clamp_min(0), lambda x: jnp.clip(x, 0), {0.0: (0, 1)}),
    kinks("clamp_max(0)", lambda x: x.clamp_max(0), lambda x: jnp.clip(x, max=0), {0.0: (1, 0)}),
    kinks("sqrt", torch.sqrt, jnp.sqrt, {0.0: (_NAN, _INF), _INF: _ZERO}),
    kinks("rsqrt", torch.rsqrt, jax.lax.rsqrt, {0.0: (_NAN, -_INF), _INF: _ZERO}),
    kinks("reciprocal", torch.reciprocal, jnp.reciprocal, {0.0: (-_INF, -_INF), _INF: _ZERO}),
    kinks("square", torch.square, jnp.square, {0.0: _ZERO}),
    kinks("x ** 0", lambda x: x**0, lambda x: x**0, {0.0: _ZERO}),
    kinks("x ** 0.5", lambda x: x**0.5, lambda x: x**0.5, {0.0: (_NAN, _INF)}),
    kinks("x ** 1", lambda x: x**1, lambda x: x**1, {0.0: (1, 1)}),
    kinks("x ** 2", lambda x: x**2, lambda x: x**2, {0.0: _ZERO}),
    kinks("x ** -1", lambda x: x**-1, lambda x: x**-1, {0.0: (-_INF, -_INF)}),
    kinks("exp", torch.exp, jnp.exp, {1000.0: (_INF, _INF), -_INF: _ZERO}),
    kinks("log", torch.log, jnp.log, {0.0: (_NAN, _INF), -1.0: (_NAN, _NAN), _INF: _ZERO}),
    kinks("log1p", torch.log1p, jnp.log1p, {-1.0: (_NAN, _INF)}),
    kinks("asin", torch.asin, jnp.arcsin, {1.0: (_INF, _NAN)}),
    kinks("acos", torch.acos, jnp.arccos, {1.0: (-_INF, _NAN)}),
    kinks("acosh", torch.acosh, jnp.arccosh, {1.0: (_NAN, _INF)}),
    kinks("atanh", torch.atanh, jnp.arctanh, {1.0: (_INF, _NAN)}),
    kinks("sinc", torch.sinc, jnp.sinc, {0.0: _ZERO}),
    kinks("erfinv", torch.erfinv, jax.scipy.special.erfinv, {1.0: (_INF, _NAN)}),
    kinks("logit", torch.logit, jax.scipy.special.logit, {0.0: (_NAN, _INF), 1.0: (_INF, _NAN)}),
    kinks("nan_to_num", torch.nan_to_num, jnp.nan_to_num, {_NAN: _ZERO, _INF: _ZERO}),
    kinks(
        "where(x > 0, log x, 0)",
        lambda x: torch.where(x > 0, torch.log(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.log(x), 0.0),
        {0.0: (0, _INF)},
    ),
    kinks(
        "where(x > 0, sqrt x, 0)",
        lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        {0.0: (0, _INF), -1.0: _ZERO},
    ),
)
_OF_TWO: tuple[tuple[Point, ...], ...] = (
    _pairs("x ** y", torch.pow, jnp.power, (0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (-1.0, 2.0)),
    _pairs("xlogy", torch.xlogy, jax.scipy.special.xlogy, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)),
    _pairs("atan2", torch.atan2, jnp.arctan2, (0.0, 0.0), (0.0, -1.0)),
    _pairs("hypot", torch.hypot, jnp.hypot, (0.0, 0.0)),
    _pairs("x / y", torch.div, jnp.divide, (0.0, 0.0), (1.0, 0.0), (_INF, _INF)),
    _pairs("x * y", torch.mul, jnp.multiply, (_INF, 0.0)),
    _pairs("fmod", torch.fmod, jnp.fmod, (2.0, 1.0)),
    _pairs("remainder", torch.remainder, jnp.remainder, (2.0, 1.0)),
    _pairs("copysign", torch.copysign, jnp.copysign, (0.0, 1.0), (1.0, 0.0)),
    _pairs("maximum", torch.maximum, jnp.maximum, (1.0, 1.0), (1.0, _NAN)),
    _pairs("minimum", torch.minimum, jnp.minimum, (1.0, 1.0)),
    _pairs("fmax", torch.fmax, jnp.fmax, (1.0, 1.0), (1.0, _NAN)),
    _pairs("fmin", torch.fmin, jnp.fmin, (1.0, 1.0)),
    _pairs("logaddexp", torch.logaddexp, jnp.logaddexp, (0.0, 0.0), (-_INF, -_INF), (_INF, _INF), (0.0, -_INF)),
)
POINTS: tuple[Point, ...] = tuple(point for points in (*_OF_ONE, *_OF_TWO) for point in points)
