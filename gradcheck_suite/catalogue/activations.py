"""Pointwise activations, from their definitions.

At a kink an activation has several subgradients, of which torch returns one. Inputs at a kink are common: a dropped or
clamped value is exactly 0, 1 or 6. Each definition below therefore states with `>` or `>=` on which side a kink lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy.special import erf

from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, keeps_signal

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017, equation 14

Function = Callable[..., jax.Array]


def _below(x: jax.Array) -> jax.Array:
    """Return min(x, 0), so that the exponential in the branch not taken cannot overflow to NaN."""
    return jnp.where(x > 0, 0.0, x)


def _between(x: jax.Array, low: float, high: float, inside: jax.Array) -> jax.Array:
    """Return `inside` strictly between the bounds, and the nearer bound elsewhere."""
    return jnp.where((x > low) & (x < high), inside, jnp.where(x >= high, high, low))


def relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0); the derivative at 0 is 0."""
    return jnp.where(x > 0, x, 0.0)


def gelu(x: jax.Array) -> jax.Array:
    """Return x times the standard normal distribution function."""
    return 0.5 * x * (1 + erf(x / jnp.sqrt(2.0)))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def _elu(x: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x)))


def _celu(x: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x) / alpha))


def _selu(x: jax.Array) -> jax.Array:
    return _SELU_SCALE * _elu(x, _SELU_ALPHA)


def _hardswish(x: jax.Array) -> jax.Array:
    return jnp.where(x >= 3, x, jnp.where(x > -3, x * (x + 3) / 6, 0.0))


def _shrink(x: jax.Array, lambd: float, by: float) -> jax.Array:
    return jnp.where(x > lambd, x - by, jnp.where(x < -lambd, x + by, 0.0))


_Row = tuple[Callable[..., torch.nn.Module], Function, Sequence[dict[str, Any]]]
_PLAIN: Sequence[dict[str, Any]] = ({},)
_ACTIVATIONS: dict[str, _Row] = {
    "relu": (torch.nn.ReLU, relu, _PLAIN),
    "tanh": (torch.nn.Tanh, jnp.tanh, _PLAIN),
    "sigmoid": (torch.nn.Sigmoid, jax.nn.sigmoid, _PLAIN),
    "gelu": (torch.nn.GELU, gelu, _PLAIN),
    "gelu_tanh": (lambda: torch.nn.GELU(approximate="tanh"), _gelu_tanh, _PLAIN),
    "silu": (torch.nn.SiLU, lambda x: x * jax.nn.sigmoid(x), _PLAIN),
    "mish": (torch.nn.Mish, lambda x: x * jnp.tanh(jnp.logaddexp(x, 0.0)), _PLAIN),
    "softplus": (
        torch.nn.Softplus,
        lambda x, beta, threshold: jnp.where(beta * x > threshold, x, jnp.logaddexp(beta * x, 0.0) / beta),
        ({"beta": 1.0, "threshold": 20.0}, {"beta": 2.0, "threshold": 1.0}),
    ),
    "log_sigmoid": (torch.nn.LogSigmoid, lambda x: -jnp.logaddexp(-x, 0.0), _PLAIN),
    "leaky_relu": (
        torch.nn.LeakyReLU,
        lambda x, negative_slope: jnp.where(x > 0, x, negative_slope * x),
        ({"negative_slope": 0.01}, {"negative_slope": 0.5}),
    ),
    "elu": (torch.nn.ELU, _elu, ({"alpha": 1.0}, {"alpha": 0.5})),
    "celu": (torch.nn.CELU, _celu, ({"alpha": 2.0},)),
    "selu": (torch.nn.SELU, _selu, _PLAIN),
    "hardtanh": (torch.nn.Hardtanh, lambda x: _between(x, -1.0, 1.0, x), _PLAIN),
    "relu6": (torch.nn.ReLU6, lambda x: _between(x, 0.0, 6.0, x), _PLAIN),
    "hardswish": (torch.nn.Hardswish, _hardswish, _PLAIN),
    "softshrink": (torch.nn.Softshrink, lambda x: _shrink(x, 0.5, 0.5), _PLAIN),
    "hardshrink": (torch.nn.Hardshrink, lambda x: _shrink(x, 0.5, 0.0), _PLAIN),
    "softsign": (torch.nn.Softsign, lambda x: x / (1 + jnp.where(x > 0, x, -x)), _PLAIN),
    "tanhshrink": (torch.nn.Tanhshrink, lambda x: x - jnp.tanh(x), _PLAIN),
}


def _kind(
    name: str, module: Callable[..., torch.nn.Module], function: Function, options: Sequence[Options]
) -> LayerDefinition:
    def variants(signal: Signal) -> Sequence[Options]:
        return () if signal.form == "tokens" else options

    return LayerDefinition(
        name,
        variants,
        keeps_signal(name, *FLOATS),
        lambda signal, o: module(**o),
        lambda o, params, x, extras: function(x, **o),
        axes=0,
    )


KINDS = tuple(_kind(name, *row) for name, row in _ACTIVATIONS.items())
