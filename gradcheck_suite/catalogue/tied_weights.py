"""Layers that use one weight twice: its gradient is the sum over both uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, expect, expect_form, on

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
    """tanh(E[token]) E^T: a language model whose output layer is its input embedding."""

    def __init__(self, vocabulary: int, features: int, sparse: bool) -> None:
        super().__init__()
        self.vocabulary, self.features, self.sparse = vocabulary, features, sparse
        self.weight = torch.nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.nn.functional.embedding(x, self.weight, sparse=self.sparse)
        return torch.nn.functional.linear(torch.tanh(read), self.weight)


def _linear_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "tied_linear", *ROWS)
    expect(options["features"] >= 1, "tied_linear", "features of at least 1", options["features"])
    return signal


def _linear_module(signal: Signal, options: Options) -> torch.nn.Module:
    return TiedLinear(signal.features, options["features"])


def _linear(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.tanh(x @ params["weight"].T) @ params["weight"]


def _embedding_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "tied_embedding", "tokens")
    expect(options["features"] >= 1, "tied_embedding", "features of at least 1", options["features"])
    return Signal("sequence", (*signal.size, signal.vocabulary), signal.padded)


def _embedding_module(signal: Signal, options: Options) -> torch.nn.Module:
    return TiedEmbedding(signal.vocabulary, options["features"], options["sparse"])


def _embedding(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.tanh(params["weight"][x]) @ params["weight"].T


KINDS = (
    LayerDefinition(
        "tied_linear", on(*ROWS, features=FEATURES), _linear_out, _linear_module, _linear, axes=1, trainable=True
    ),
    LayerDefinition(
        "tied_embedding",
        # sparse: autograd adds the sparse gradient of one use to the dense gradient of the other
        on("tokens", features=FEATURES, sparse=(False, True)),
        _embedding_out,
        _embedding_module,
        _embedding,
        trainable=True,
    ),
)
