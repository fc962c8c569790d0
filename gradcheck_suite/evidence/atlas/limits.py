"""Reductions and normalizations of zeros, infinities, constants and single elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Jax, Point, Torch, number

F = torch.nn.functional
_INF = math.inf
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

POINTS: tuple[Point, ...] = (
    *_of_vector("vector_norm(2)", *_norm(2), [0.0, 0.0], [0.0]),
    *_of_vector("vector_norm(1)", *_norm(1), [0.0, 1.0]),
    *_of_vector("vector_norm(3)", *_norm(3), [0.0, 0.0]),
    *_of_vector("vector_norm(0.5)", *_norm(0.5), [0.0, 1.0]),
    *_of_vector("vector_norm(inf)", *_norm(_INF), [0.0, 0.0]),
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
    *_of_vector("cumsum", lambda x: x.cumsum(0), jnp.cumsum, [_INF, -_INF]),
    *_of_vector("logcumsumexp", lambda x: x.logcumsumexp(0), jax.lax.cumlogsumexp, [-_INF, 0.0], [-_INF, -_INF]),
    *_of_vector(
        "logsumexp",
        lambda x: x.logsumexp(0),
        jax.scipy.special.logsumexp,
        [-_INF, 0.0],
        [-_INF, -_INF],
        [_INF, 0.0],
        [1000.0, 1000.0],
    ),
    *_of_vector("softmax, first", *_SOFTMAX, [0.0, -_INF], [-_INF, -_INF], [_INF, 0.0], [1000.0, -1000.0]),
    *_of_vector("log_softmax, first", *_LOG_SOFTMAX, [0.0, -_INF], [-_INF, 0.0], [-_INF, -_INF]),
)
