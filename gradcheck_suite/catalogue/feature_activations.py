"""Activations of whole feature rows (softmax, GLU) or with a parameter (PReLU)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import (
    FLOATS,
    ROWS,
    Options,
    Signal,
    expect,
    expect_form,
    keeps_signal,
    on,
    product,
)


def _log_softmax(x: jax.Array) -> jax.Array:
    # subtracting the row's maximum changes neither value nor gradient, and prevents overflow
    x = x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return x - jnp.log(jnp.exp(x).sum(axis=-1, keepdims=True))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax over the last axis."""
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return e / e.sum(axis=-1, keepdims=True)


def _over_features(
    name: str, module: Callable[..., torch.nn.Module], function: Callable[[jax.Array], jax.Array]
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*ROWS),
        keeps_signal(name, *ROWS),
        lambda signal, o: module(dim=-1),
        lambda o, params, x, extras: function(x),
        axes=1,
    )


def _glu_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form in ROWS and signal.features % 2 == 0 else ()


def _glu_out(signal: Signal, options: Options) -> Signal:
    expect(signal.form in ROWS and signal.features % 2 == 0, "glu", "an even number of features", signal)
    return signal.with_features(signal.features // 2)


def _glu(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    value, gate = jnp.split(x, 2, axis=-1)
    return value * jax.nn.sigmoid(gate)


def _prelu_variants(signal: Signal) -> Sequence[Options]:
    if signal.form == "tokens":
        return ()
    return product(per_feature=(False, True) if signal.form == "vector" else (False,))


def _prelu_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "prelu", *FLOATS)
    # torch's channels are the second axis: the features of a vector, the positions of a sequence
    expect(signal.form == "vector" or not options["per_feature"], "prelu", "a vector for per_feature=True", signal)
    return signal


def _prelu_module(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.PReLU(signal.features if options["per_feature"] else 1)


def _prelu(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.where(x > 0, x, params["weight"] * x)


KINDS = (
    _over_features("softmax", torch.nn.Softmax, softmax),
    _over_features("log_softmax", torch.nn.LogSoftmax, _log_softmax),
    LayerDefinition("glu", _glu_variants, _glu_out, lambda signal, o: torch.nn.GLU(dim=-1), _glu, axes=1),
    # not trainable: an item above 0 gives the slope a zero gradient
    LayerDefinition("prelu", _prelu_variants, _prelu_out, _prelu_module, _prelu, axes=1),
)
