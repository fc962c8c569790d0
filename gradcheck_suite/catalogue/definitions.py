"""The records of the catalogue: the definition of an input, of a layer and of a loss.

A layer or loss is implemented twice, in torch as its users write it and in JAX from the mathematics. The two
implementations share nothing but the values of parameters and data. Adding a layer or a loss means adding one record to
one family's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.signals import Options, Signal, Variants

Arrays = dict[str, npt.NDArray[Any]]
Tensors = Mapping[str, torch.Tensor]
Arguments = Mapping[str, jax.Array]
Implementation = Callable[[Options, Arguments, jax.Array, Arguments], jax.Array]


def no_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    """Return no arrays: the `extras` of a layer that takes nothing beside its input."""
    return {}


@dataclass(frozen=True)
class InputDefinition:
    """A source of items.

    Attributes:
        name: the kind's name in specs.
        variants: options to draw from, simplest first.
        signal: options -> the signal that the first layer receives.
        draw: (options, rng, items) -> arrays with leading dimension `items`: `x`, and `mask` for a padded signal.
        drawn: whether the strategies draw this kind.
    """

    name: str
    variants: Sequence[Options]
    signal: Callable[[Options], Signal]
    draw: Callable[[Options, np.random.Generator, int], Arrays]
    drawn: bool = True


@dataclass(frozen=True)
class LayerDefinition:
    """A layer.

    Attributes:
        name: the kind's name in specs.
        variants: input signal -> options to draw from, simplest first; empty where the layer does not accept it.
        out: (input signal, options) -> the output signal; raises `UsageError` where they do not fit.
        torch_module: (input signal, options) -> the module. Its forward takes the input, and by keyword the arrays of
            `extras` and, with `uses_mask`, `mask`. A module class of the catalogue stores its constructor's arguments
            in attributes of the same names, as torch's modules do: scripts of counterexamples print constructor calls
            from them.
        jax_apply: (options, parameters and buffers by name, input of shape (n, *size), extras) -> output. Pure.
        axes: number of trailing axes that the layer mixes: 0 for pointwise layers, 1 for layers of feature rows, None
            for all axes of an item. The JAX reference merges the other axes, so that fewer shapes are compiled.
        extras: (input signal, options, rng, items) -> further arrays per item, such as a dropout mask.
        uses_mask: whether the layer takes the padding mask of a padded signal, as `mask`.
        trainable: whether every variant has a parameter that receives a gradient from every item.
        wraps: for layers made of other layers: `"residual"` adds the input to their output, `"shared"` applies them
            twice; `"sum"` and `"concat"` hand their input to each of them and join the outputs, by addition or along
            the features. Such a definition has no implementation of its own.
    """

    name: str
    variants: Variants
    out: Callable[[Signal, Options], Signal]
    torch_module: Callable[[Signal, Options], torch.nn.Module] | None = None
    jax_apply: Implementation | None = None
    axes: int | None = None
    extras: Callable[[Signal, Options, np.random.Generator, int], Arrays] = no_extras
    uses_mask: bool = False
    trainable: bool = False
    wraps: Literal["residual", "shared", "sum", "concat"] | None = None

    @property
    def parallel(self) -> bool:
        """Whether its inner layers are branches with the same input, rather than a chain."""
        return self.wraps in ("sum", "concat")


@dataclass(frozen=True)
class LossDefinition:
    """A loss. Its mean over a batch is (sum of item losses) / (sum of item counts).

    Attributes:
        name: the kind's name in specs.
        variants: signal -> options to draw from without `reduction`, simplest first; empty where the loss does not
            accept it.
        targets: (signal, options, rng, ignored) -> arrays of a batch for this loss, such as `target` and `weight`.
            `ignored` is (items, T) for a sequence and (items,) otherwise, True where a target is ignored. A loss that
            cannot ignore targets reads only its length.
        torch_loss: (options, model output, batch, reduction) -> the scalar loss, written as users write it.
        count: (options, batch) -> scalar tensor: the divisor of the mean.
        jax_items: (options, model output of shape (n, *size), batch) -> (n,): each item's summed loss.
        jax_counts: (options, batch) -> (n,): each item's part of the divisor.
        maskable: options -> whether a micro-batch without valid targets has a zero gradient rather than 0/0.
        uniform: (signal, options) -> whether every item has the same count.
        drawn: whether the strategies draw this kind.
    """

    name: str
    variants: Variants
    targets: Callable[[Signal, Options, np.random.Generator, npt.NDArray[np.bool_]], Arrays]
    torch_loss: Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor]
    count: Callable[[Options, Tensors], torch.Tensor]
    jax_items: Callable[[Options, jax.Array, Arguments], jax.Array]
    jax_counts: Callable[[Options, Arguments], jax.Array]
    maskable: Callable[[Options], bool] = field(default=lambda options: False)
    uniform: Callable[[Signal, Options], bool] = field(default=lambda signal, options: True)
    drawn: bool = True
