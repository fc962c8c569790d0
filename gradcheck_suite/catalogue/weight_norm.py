"""A linear layer whose weight is g v / |v|: the optimizer sees g and v, a parametrization makes the weight."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (2, 3)


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ("vector", "sequence"):
        return ()
    return product(features=FEATURES[:1] if signal.form == "sequence" else FEATURES, whole=(False, True))


def _out(signal: Signal, options: Options) -> Signal:
    expect(signal.form in ("vector", "sequence"), "weight_norm", "a vector or a sequence", signal)
    expect(options["features"] >= 1, "weight_norm", "features of at least 1", options["features"])
    return signal.with_features(options["features"])


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    linear = torch.nn.Linear(signal.features, options["features"])
    # -1 is torch's name for one norm over the whole weight
    return torch.nn.utils.parametrizations.weight_norm(linear, dim=-1 if options["whole"] else 0)


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    magnitude, direction = (params[f"parametrizations.weight.original{i}"] for i in range(2))
    square = direction**2
    norm = jnp.sqrt(square.sum() if options["whole"] else square.sum(1, keepdims=True))
    return x @ (magnitude * direction / norm).T + params["bias"]


KINDS = (LayerDefinition("weight_norm", _variants, _out, _torch, _jax, axes=1, trainable=True),)
