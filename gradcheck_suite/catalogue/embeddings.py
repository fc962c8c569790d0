"""Embeddings of token ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form, on

FEATURES = (2, 4)
PADDING = 0


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "embedding", "tokens")
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
        # the padding row gets no gradient
        table = jnp.where((jnp.arange(len(table)) == PADDING)[:, None], jax.lax.stop_gradient(table), table)
    return table[x]


KINDS = (
    LayerDefinition(
        "embedding",
        on("tokens", features=FEATURES, sparse=(False, True), padding_idx=(False, True)),
        _out,
        _torch,
        _jax,
        trainable=True,
    ),
)
