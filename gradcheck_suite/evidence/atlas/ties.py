"""Selections and orders among equal elements: which of them receives the gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point, ties

F = torch.nn.functional


def _pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")


def _max_pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(x.reshape(1, 1, -1), 2).reshape(-1)


def _adaptive(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_max_pool1d(x.reshape(1, 1, -1), 1).reshape(-1)


_SAME = [1.0, 1.0, 1.0]
_TOP = [2.0, 0.0, 2.0]
_MID = [0.0, 1.0, 1.0, 2.0]

POINTS: tuple[Point, ...] = (
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
