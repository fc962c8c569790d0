"""Linear layers with weight normalization: the weight is g v / |v|, and g and v are the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, product, rows_to_features

FEATURES = (2, 3)


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ROWS:
        return ()
    return product(features=FEATURES[:1] if signal.form == "sequence" else FEATURES, whole=(False, True))


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    linear = torch.nn.Linear(signal.features, options["features"])
    # dim=-1 takes one norm over the whole weight
    return torch.nn.utils.parametrizations.weight_norm(linear, dim=-1 if options["whole"] else 0)


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    magnitude, direction = (params[f"parametrizations.weight.original{i}"] for i in range(2))
    square = direction**2
    norm = jnp.sqrt(square.sum() if options["whole"] else square.sum(1, keepdims=True))
    return x @ (magnitude * direction / norm).T + params["bias"]


KINDS = (
    LayerDefinition("weight_norm", _variants, rows_to_features("weight_norm"), _torch, _jax, axes=1, trainable=True),
)
