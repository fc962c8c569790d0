"""Linear layers: y = x W^T + b over the feature axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, product, rows_to_features

FEATURES = (1, 2, 3, 4)


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ROWS:
        return ()
    return product(features=FEATURES[:2] if signal.form == "sequence" else FEATURES, bias=(False, True))


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Linear(signal.features, options["features"], bias=options["bias"])


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    y = x @ params["weight"].T
    return y + params["bias"] if options["bias"] else y


KINDS = (LayerDefinition("linear", _variants, rows_to_features("linear"), _torch, _jax, axes=1, trainable=True),)
