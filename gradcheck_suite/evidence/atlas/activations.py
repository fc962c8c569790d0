"""Activations at their kinks and far from zero. JAX's side is `jax.nn`, or `jnp.where` for what it lacks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point, kinks

F = torch.nn.functional
_INF = math.inf
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017, equation 14


def _hardshrink(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) > 0.5, x, 0.0)


def _softshrink(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


_GELU_AT_1 = 0.5 * (1 + math.erf(1 / math.sqrt(2))) + math.exp(-0.5) / math.sqrt(2 * math.pi)
_LOGISTIC_AT_21 = 1 / (1 + math.exp(-21.0))

POINTS: tuple[Point, ...] = (
    *kinks("relu", F.relu, jax.nn.relu, {0.0: (0, 1), _INF: (1, 1)}),
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
    *kinks("elu", F.elu, jax.nn.elu, {0.0: (1, 1), -_INF: (0, 0)}),
    *kinks("elu (alpha 0.5)", lambda x: F.elu(x, 0.5), lambda x: jax.nn.elu(x, 0.5), {0.0: (0.5, 1)}),
    *kinks("celu (alpha 2)", lambda x: F.celu(x, 2.0), lambda x: jax.nn.celu(x, 2.0), {0.0: (1, 1)}),
    *kinks("selu", F.selu, jax.nn.selu, {0.0: (_SELU_SCALE * _SELU_ALPHA, _SELU_SCALE)}),
    *kinks("hardtanh", F.hardtanh, jax.nn.hard_tanh, {-1.0: (0, 1), 1.0: (1, 0)}),
    *kinks("hardsigmoid", F.hardsigmoid, jax.nn.hard_sigmoid, {-3.0: (0, 1 / 6), 3.0: (1 / 6, 0)}),
    *kinks("hardswish", F.hardswish, jax.nn.hard_silu, {-3.0: (0, -0.5), 3.0: (1.5, 1)}),
    *kinks("hardshrink", F.hardshrink, _hardshrink, {-0.5: (1, 0), 0.5: (0, 1)}),
    *kinks("softshrink", F.softshrink, _softshrink, {-0.5: (1, 0), 0.0: (0, 0), 0.5: (0, 1)}),
    *kinks("softsign", F.softsign, jax.nn.soft_sign, {0.0: (1, 1), _INF: (0, 0)}),
    *kinks(
        "softplus",
        F.softplus,
        jax.nn.softplus,
        {-1000.0: (0, 0), 0.0: (0.5, 0.5), 21.0: (_LOGISTIC_AT_21, _LOGISTIC_AT_21), 1000.0: (1, 1), _INF: (1, 1)},
        note="torch returns x itself above its threshold, 20",
    ),
    *kinks("logsigmoid", F.logsigmoid, jax.nn.log_sigmoid, {-1000.0: (1, 1), 0.0: (0.5, 0.5), -_INF: (1, 1)}),
    *kinks("sigmoid", torch.sigmoid, jax.nn.sigmoid, {-1000.0: (0, 0), 1000.0: (0, 0), -_INF: (0, 0)}),
    *kinks("tanh", torch.tanh, jnp.tanh, {1000.0: (0, 0), _INF: (0, 0)}),
    *kinks("silu", F.silu, jax.nn.silu, {-1000.0: (0, 0), -_INF: (0, 0), _INF: (1, 1)}),
    *kinks("mish", F.mish, jax.nn.mish, {-1000.0: (0, 0), -_INF: (0, 0), _INF: (1, 1)}),
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
        {1.0: (_GELU_AT_1, _GELU_AT_1), -1000.0: (0, 0), -_INF: (0, 0), _INF: (1, 1)},
    ),
    *kinks(
        "gelu (tanh)",
        lambda x: F.gelu(x, approximate="tanh"),
        jax.nn.gelu,
        {-1000.0: (0, 0), -_INF: (0, 0), _INF: (1, 1)},
    ),
    *kinks("tanhshrink", F.tanhshrink, lambda x: x - jnp.tanh(x), {0.0: (0, 0), _INF: (1, 1)}),
)
