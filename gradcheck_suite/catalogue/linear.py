"""Linear: y = x W^T + b over the feature axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (1, 2, 3, 4)


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ("vector", "sequence"):
        return ()
    return product(features=FEATURES[:2] if signal.form == "sequence" else FEATURES, bias=(False, True))


def _out(signal: Signal, options: Options) -> Signal:
    expect(signal.form in ("vector", "sequence"), "linear", "a vector or a sequence", signal)
    expect(options["features"] >= 1, "linear", "features of at least 1", options["features"])
    return signal.with_features(options["features"])


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Linear(signal.features, options["features"], bias=options["bias"])


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    y = x @ params["weight"].T
    return y + params["bias"] if options["bias"] else y


KINDS = (LayerDefinition("linear", _variants, _out, _torch, _jax, axes=1, trainable=True),)
