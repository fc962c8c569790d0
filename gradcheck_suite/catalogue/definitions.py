"""The records that make up the catalogue: what a kind of input, layer or loss has to say about itself.

A kind states its meaning twice, in torch and in JAX. The JAX meaning is written from the mathematics and shares
nothing with torch but the values of parameters and data. Adding a kind means adding one record to one family file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.errors import UsageError

Options = Mapping[str, Any]
Arrays = dict[str, npt.NDArray[Any]]
Tensors = Mapping[str, torch.Tensor]
Arguments = Mapping[str, jax.Array]
Form = Literal["vector", "sequence", "image", "tokens"]


@dataclass(frozen=True)
class Signal:
    """What flows between two layers, per item.

    Attributes:
        form: `"vector"`, `"sequence"`, `"image"` or `"tokens"`.
        size: per-item shape: (D,), (T, D), (C, H, W) or (T,).
        padded: whether the batch carries `mask`, of shape (n, T), True where a position is no padding.
        vocabulary: for tokens, the number of distinct ids; id 0 is the padding token.
    """

    form: Form
    size: tuple[int, ...]
    padded: bool = False
    vocabulary: int = 0

    @property
    def features(self) -> int:
        """Length of the feature axis: D, or C for an image."""
        return self.size[0] if self.form == "image" else self.size[-1]

    def with_features(self, features: int) -> Signal:
        """Return the signal with its feature axis of another length."""
        size = (features, *self.size[1:]) if self.form == "image" else (*self.size[:-1], features)
        return Signal(self.form, size, self.padded)


def vector(size: int) -> Signal:
    """Return the signal of a vector of `size` features."""
    return Signal("vector", (size,))


def no_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    """Return no data: what most layers need beside their input."""
    return {}


@dataclass(frozen=True)
class InputDefinition:
    """A source of items.

    Attributes:
        name: the kind's name in specs.
        variants: the options to draw from, simplest first.
        signal: what the first layer receives.
        draw: (options, rng, items) -> arrays with leading dimension `items`: `x`, and `mask` for a padded signal.
        drawn: whether the strategies draw it.
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
        variants: the options to draw from for an input signal, simplest first; empty when the kind does not take it.
        out: the signal that comes out; `UsageError` where options or signal do not fit.
        torch_module: (signal, options) -> the module. Its forward takes the layer's input, and by keyword what
            `extras` and `uses_mask` promise. A class of the catalogue keeps its constructor's arguments as
            attributes of the same names, as torch's own do: scripts of counterexamples write the call from them.
        jax_apply: (options, parameters and buffers by name, input of shape (n, *size), extras) -> output. Pure.
        axes: trailing axes that the layer mixes: 0 for pointwise, 1 for one that acts on each feature row, None for
            all of an item's. The JAX reference folds the other axes together, which keeps compilations few.
        extras: per-item data beside the input (a dropout mask), drawn with the items.
        uses_mask: whether the layer reads the padding mask; it is then given for padded signals, as `mask`.
        trainable: whether every variant holds a parameter that items reach.
        wraps: for kinds that wrap other layers: `"residual"` adds the input to what comes out of them, `"shared"`
            sends the input through them twice. Such a kind has no meaning of its own.
    """

    name: str
    variants: Callable[[Signal], Sequence[Options]]
    out: Callable[[Signal, Options], Signal]
    torch_module: Callable[[Signal, Options], torch.nn.Module] | None = None
    jax_apply: Callable[[Options, Arguments, jax.Array, Arguments], jax.Array] | None = None
    axes: int | None = None
    extras: Callable[[Signal, Options, np.random.Generator, int], Arrays] = no_extras
    uses_mask: bool = False
    trainable: bool = False
    wraps: Literal["residual", "shared"] | None = None


@dataclass(frozen=True)
class LossDefinition:
    """A loss. Its mean over a batch is (sum of item losses) / (sum of item counts).

    Attributes:
        name: the kind's name in specs.
        variants: the options to draw from for a signal, simplest first, without `reduction`; empty when the kind does
            not take it.
        targets: (signal, options, rng, ignored) -> the arrays a batch carries for this loss, such as `target` and
            `weight`. `ignored` is True where a target does not count; its shape is (items, T) for a sequence and
            (items,) otherwise. A loss that cannot ignore targets takes its length only.
        torch_loss: (options, output of the model, batch, reduction) -> the scalar loss, written as its users write it.
        count: (options, batch) -> scalar tensor: what the mean divides by.
        jax_items: (options, output of shape (n, *size), batch) -> (n,), each item's summed loss.
        jax_counts: (options, batch) -> (n,), each item's part of the count.
        maskable: options -> whether a micro-batch that counts nothing has a zero gradient rather than 0/0.
        uniform: (signal, options) -> whether every item has the same count.
        drawn: whether the strategies draw it.
    """

    name: str
    variants: Callable[[Signal], Sequence[Options]]
    targets: Callable[[Signal, Options, np.random.Generator, npt.NDArray[np.bool_]], Arrays]
    torch_loss: Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor]
    count: Callable[[Options, Tensors], torch.Tensor]
    jax_items: Callable[[Options, jax.Array, Arguments], jax.Array]
    jax_counts: Callable[[Options, Arguments], jax.Array]
    maskable: Callable[[Options], bool] = field(default=lambda options: False)
    uniform: Callable[[Signal, Options], bool] = field(default=lambda signal, options: True)
    drawn: bool = True


def product(**choices: Sequence[Any]) -> list[Options]:
    """Return every combination of the choices, the first of each first: simplest first when they are."""
    combinations: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        combinations = [{**c, name: v} for c in combinations for v in values]
    return sorted(combinations, key=lambda c: sum(choices[n].index(v) for n, v in c.items()))


def expect(condition: bool, kind: str, expected: str, received: object) -> None:
    """Raise the `UsageError` of a kind whose options or input do not fit."""
    if not condition:
        raise UsageError(f"layer {kind!r}: expected {expected}, got {received}")


def same(signal: Signal, options: Options) -> Signal:
    """Return the signal itself: what comes out of a layer that keeps its input's shape."""
    return signal
