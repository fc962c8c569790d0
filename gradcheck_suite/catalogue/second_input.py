"""A layer with an input of its own: each item has a second vector beside the one that the first layer receives."""

from __future__ import annotations

import jax
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, keeps_signal, on

WIDTH = 3


class SecondInput(torch.nn.Module):
    """x + other W^T, for a second input `other` of the item."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.features, self.width = features, width
        self.weight = torch.nn.Parameter(torch.empty(features, width))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(other, self.weight)


def _extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"other": rng.standard_normal((items, WIDTH))}


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x + extras["other"] @ params["weight"].T


KINDS = (
    LayerDefinition(
        "second_input",
        on("vector"),
        keeps_signal("second_input", "vector"),
        lambda signal, o: SecondInput(signal.features, WIDTH),
        _jax,
        extras=_extras,
        trainable=True,
    ),
)
