"""The layer and the loss of the weight probe: one parameter entry per item, whose loss is that entry.

The gradient that a loop accumulates for this parameter is the vector of the weights that the loop gives to the items.
With the option `slopes` the item losses are multiples of the entries, so that gradients are large, small or not finite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LayerDefinition, LossDefinition, Tensors
from gradcheck_suite.catalogue.signals import Options, Signal, expect, vector
from gradcheck_suite.schema.weight_probe import read_slopes


class Readout(torch.nn.Module):
    """A parameter vector; an item's index selects one entry."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items = items
        self.weight = torch.nn.Parameter(torch.zeros(items))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x]


def _one_feature(signal: Signal) -> tuple[Options, ...]:
    return ({}, {"slopes": "1 2**10"}) if signal == vector(1) else ()


def _index(signal: Signal) -> tuple[Options, ...]:
    return ({},) if signal.form == "tokens" and signal.size == (1,) else ()


def _out(signal: Signal, options: Options) -> Signal:
    expect(signal.form == "tokens" and signal.size == (1,), "readout", "the index of an item", signal)
    return vector(1)


def _entry(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return params["weight"][x]


def _targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: npt.NDArray[np.bool_]) -> Arrays:
    arrays = {"target": np.ones(len(ignored))}
    if "slopes" in options:
        arrays["weight"] = np.array(read_slopes(options["slopes"], len(ignored)))
    return arrays


def _identity(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    if "slopes" in options:
        out = out[:, 0] * batch["weight"]
    return out.mean() if reduction == "mean" else out.sum()


def _count(options: Options, batch: Tensors) -> torch.Tensor:
    return batch["target"].sum()


def _items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return out[:, 0] * batch["weight"] if "slopes" in options else out[:, 0]


def _counts(options: Options, batch: Arguments) -> jax.Array:
    return jnp.ones_like(batch["target"])


LAYERS = (
    LayerDefinition("readout", _index, _out, lambda signal, o: Readout(signal.vocabulary), _entry, trainable=True),
)
LOSSES = (LossDefinition("identity", _one_feature, _targets, _identity, _count, _items, _counts, drawn=False),)
