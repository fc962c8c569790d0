"""Token ids to vectors."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (2, 4)
PADDING = 0


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form != "tokens":
        return ()
    return product(features=FEATURES, sparse=(False, True), padding_idx=(False, True))


def _out(signal: Signal, options: Options) -> Signal:
    expect(signal.form == "tokens", "embedding", "tokens", signal)
    expect(options["features"] >= 1, "embedding", "features of at least 1", options["features"])
    return Signal("sequence", (*signal.size, options["features"]), signal.padded)


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Embedding(
        signal.vocabulary,
        options["features"],
        padding_idx=PADDING if options["padding_idx"] else None,
        sparse=options["sparse"],
    )


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    table = params["weight"]
    if options["padding_idx"]:
        # the padding row is read but never learned
        table = jnp.where((jnp.arange(len(table)) == PADDING)[:, None], jax.lax.stop_gradient(table), table)
    return table[x]


KINDS = (LayerDefinition("embedding", _variants, _out, _torch, _jax, trainable=True),)
