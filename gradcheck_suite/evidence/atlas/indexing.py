"""Indices that occur twice, and indices of padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point

F = torch.nn.functional
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

POINTS: tuple[Point, ...] = (
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
