"""Embedding bags: the sum, mean or maximum of an item's token vectors, one bag per item."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LayerDefinition
from gradcheck_suite.catalogue.embeddings import PADDING
from gradcheck_suite.catalogue.pooling import first_maximum
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form, vector

FEATURES = 2
MODES = ("sum", "mean", "max")


def _options(mode: str, *, sparse: bool = False, padding_idx: bool = False, weighted: bool = False) -> Options:
    return {"features": FEATURES, "mode": mode, "sparse": sparse, "padding_idx": padding_idx, "weighted": weighted}


# torch supports per-sample weights for mode 'sum' only, and no sparse gradient for mode 'max'
_VARIANTS = (
    _options("sum"),
    _options("mean"),
    _options("max"),
    _options("sum", sparse=True),
    _options("mean", padding_idx=True),
    _options("max", padding_idx=True),
    _options("sum", weighted=True),
    _options("mean", sparse=True, padding_idx=True),
)


def _variants(signal: Signal) -> Sequence[Options]:
    return _VARIANTS if signal.form == "tokens" else ()


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "embedding_bag", "tokens")
    expect(options["features"] >= 1, "embedding_bag", "features of at least 1", options["features"])
    expect(options["mode"] in MODES, "embedding_bag", f"mode to be one of {', '.join(MODES)}", options["mode"])
    plain = options["mode"] != "max" or not options["sparse"]
    expect(plain, "embedding_bag", "a dense gradient for mode 'max'", "sparse=True")
    plain = options["mode"] == "sum" or not options["weighted"]
    expect(plain, "embedding_bag", "weights for mode 'sum' only", f"mode {options['mode']!r}")
    return vector(options["features"])


class Bag(torch.nn.EmbeddingBag):
    """`EmbeddingBag` of (n, T) ids, one bag per row, with optional weights of the same shape."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, per_sample_weights=weights)


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return Bag(
        signal.vocabulary,
        options["features"],
        mode=options["mode"],
        sparse=options["sparse"],
        padding_idx=PADDING if options["padding_idx"] else None,
    )


def _extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"weights": rng.standard_normal((items, *signal.size))} if options["weighted"] else {}


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    rows = params["weight"][x]
    kept = (x != PADDING if options["padding_idx"] else jnp.full(x.shape, True))[:, :, None]
    if options["mode"] == "max":
        largest = first_maximum(jnp.swapaxes(jnp.where(kept, rows, -jnp.inf), 1, 2))
        # torch returns a zero vector for a bag of padding only
        return jnp.where(kept.any(1), largest, 0.0)
    if options["weighted"]:
        rows = rows * extras["weights"][:, :, None]
    total = jnp.where(kept, rows, 0.0).sum(1)
    return total / jnp.maximum(kept.sum(1), 1) if options["mode"] == "mean" else total


KINDS = (LayerDefinition("embedding_bag", _variants, _out, _torch, _jax, extras=_extras, trainable=True),)
