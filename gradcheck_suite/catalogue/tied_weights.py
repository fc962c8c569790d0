"""One weight used in two places: its gradient is the sum of both uses'."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (1, 2)


class TiedLinear(torch.nn.Module):
    """tanh(x W^T) W: an autoencoder whose decoder is its encoder's transpose."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.size, self.hidden = size, hidden
        self.weight = torch.nn.Parameter(torch.empty(hidden, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, self.weight)) @ self.weight


class TiedEmbedding(torch.nn.Module):
    """tanh(E[token]) E^T: a language model that scores words by the vectors it reads them with."""

    def __init__(self, vocabulary: int, features: int, sparse: bool) -> None:
        super().__init__()
        self.vocabulary, self.features, self.sparse = vocabulary, features, sparse
        self.weight = torch.nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.nn.functional.embedding(x, self.weight, sparse=self.sparse)
        return torch.nn.functional.linear(torch.tanh(read), self.weight)


def _linear_variants(signal: Signal) -> Sequence[Options]:
    return product(features=FEATURES) if signal.form in ("vector", "sequence") else ()


def _linear_out(signal: Signal, options: Options) -> Signal:
    expect(signal.form in ("vector", "sequence"), "tied_linear", "a vector or a sequence", signal)
    expect(options["features"] >= 1, "tied_linear", "features of at least 1", options["features"])
    return signal


def _linear_module(signal: Signal, options: Options) -> torch.nn.Module:
    return TiedLinear(signal.features, options["features"])


def _linear(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.tanh(x @ params["weight"].T) @ params["weight"]


def _embedding_variants(signal: Signal) -> Sequence[Options]:
    # sparse: the two uses' gradients are a sparse and a dense tensor, which autograd has to add
    return product(features=FEATURES, sparse=(False, True)) if signal.form == "tokens" else ()


def _embedding_out(signal: Signal, options: Options) -> Signal:
    expect(signal.form == "tokens", "tied_embedding", "tokens", signal)
    expect(options["features"] >= 1, "tied_embedding", "features of at least 1", options["features"])
    return Signal("sequence", (*signal.size, signal.vocabulary), signal.padded)


def _embedding_module(signal: Signal, options: Options) -> torch.nn.Module:
    return TiedEmbedding(signal.vocabulary, options["features"], options["sparse"])


def _embedding(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.tanh(params["weight"][x]) @ params["weight"].T


KINDS = (
    LayerDefinition("tied_linear", _linear_variants, _linear_out, _linear_module, _linear, axes=1, trainable=True),
    LayerDefinition(
        "tied_embedding", _embedding_variants, _embedding_out, _embedding_module, _embedding, trainable=True
    ),
)
