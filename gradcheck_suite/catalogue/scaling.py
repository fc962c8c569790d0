"""Layers that scale: by a parameter without dimensions, and by a factor that depends on the mode."""

from __future__ import annotations

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import FLOATS, Options, keeps_signal, on


class Scale(torch.nn.Module):
    """x * weight, for a weight of shape (), as the logit scale of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class TrainScale(torch.nn.Module):
    """x * factor in train mode and x in eval mode: a difference between the modes without random numbers."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if self.training else x


def _scale(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x * params["weight"]


def _train_scale(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x * options["factor"]


KINDS = (
    LayerDefinition(
        "scale",
        on(*FLOATS),
        keeps_signal("scale", *FLOATS),
        lambda signal, o: Scale(),
        _scale,
        axes=0,
        trainable=True,
    ),
    LayerDefinition(
        "train_scale",
        on(*FLOATS, factor=(2.0,)),
        keeps_signal("train_scale", *FLOATS),
        lambda signal, o: TrainScale(o["factor"]),
        _train_scale,
        axes=0,
    ),
)
