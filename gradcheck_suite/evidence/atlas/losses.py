"""Losses at their kinks, and where a target or a probability is at the edge. JAX's side is the formula in `jnp`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point, kinks

F = torch.nn.functional
_INF, _NAN = math.inf, math.nan
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


POINTS: tuple[Point, ...] = (
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
        {0.0: (_NAN, 1), 1.0: (_INF, _NAN)},
        note=_CLAMPED,
    ),
    *kinks(
        "binary_cross_entropy (target 1)",
        lambda p: F.binary_cross_entropy(p, _like(p, 1.0)),
        lambda p: _bce(p, 1.0),
        {0.0: (_NAN, -_INF), 1.0: (-1, _NAN)},
        note=_CLAMPED,
    ),
    *kinks(
        "binary_cross_entropy_with_logits (target 1)",
        lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 1.0)),
        lambda x: _bce_with_logits(x, 1.0),
        {0.0: (-0.5, -0.5), -1000.0: (-1, -1), 1000.0: (0, 0), _INF: (0, 0)},
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
        {0.0: (0, 0), -_INF: (0, 0)},
    ),
    *kinks(
        "poisson_nll_loss (target 0)",
        lambda x: F.poisson_nll_loss(x, _like(x, 0.0)),
        lambda x: jnp.exp(x) - 0.0 * x,
        {-_INF: (0, 0), 1000.0: (_INF, _INF)},
    ),
    *kinks(
        "gaussian_nll_loss (variance x, error 1)",
        lambda x: F.gaussian_nll_loss(_like(x, 1.0).reshape(1), _like(x, 0.0).reshape(1), x.reshape(1)),
        lambda x: 0.5 * (jnp.log(jnp.maximum(x, 1e-6)) + 1 / jnp.maximum(x, 1e-6)),
        {1.0: (0, 0), 1e-6: (0, 0.5 * (1e6 - 1e12)), 0.0: (_NAN, 0)},
        note="torch clamps the variance outside of the graph, so that its gradient passes the clamp",
    ),
    Point(
        "cross_entropy",
        "logits [0, -inf], target 0",
        ([0.0, -_INF],),
        lambda x: F.cross_entropy(x, torch.tensor(0, device=x.device)),
        lambda x: _cross_entropy(x, 0),
    ),
    Point(
        "cross_entropy",
        "logits [0, -inf], target 1",
        ([0.0, -_INF],),
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
