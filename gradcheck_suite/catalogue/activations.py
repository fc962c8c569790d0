"""Pointwise activations, from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax.scipy.special import erf

from gradcheck_suite.catalogue.kinds import LayerKind, Signal, same


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.logaddexp(x, 0.0)


_MEANINGS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[jax.Array], jax.Array]]] = {
    "tanh": (torch.nn.Tanh, jnp.tanh),
    "relu": (torch.nn.ReLU, lambda x: jnp.where(x > 0, x, 0.0)),
    "gelu": (torch.nn.GELU, lambda x: x * 0.5 * (1 + erf(x / jnp.sqrt(2.0)))),
}


def _kind(name: str, module: Callable[[], torch.nn.Module], meaning: Callable[[jax.Array], jax.Array]) -> LayerKind:
    def variants(signal: Signal) -> tuple[dict[str, object], ...]:
        return () if signal.form == "tokens" else ({},)

    return LayerKind(
        name, variants, same, lambda signal, options: module(), lambda options, params, x, extras: meaning(x), axes=0
    )


KINDS = tuple(_kind(name, *meaning) for name, meaning in _MEANINGS.items())
