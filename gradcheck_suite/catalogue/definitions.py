"""The records of the catalogue: the definition of an input, of a layer and of a loss.

A layer or loss is implemented twice, in torch as its users write it and in JAX from the
mathematics. The two implementations share nothing but the values of parameters and data. Adding a
layer or a loss means adding one record to the `KINDS` of one file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.errors import UsageError

Options = Mapping[str, Any]
Form = Literal["vector", "sequence", "image", "tokens"]

SHARES_TIES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether a number and a tensor that bounds it, and equal operands of fmax, have half of the
gradient each.

Since torch 2.14; at a bound that is no tensor a number then has none. Before, the first operand and
the number had all.
"""

ROWS: tuple[Form, ...] = ("vector", "sequence")
"""Signals made of feature rows."""
FLOATS: tuple[Form, ...] = (*ROWS, "image")
"""Signals of floating-point values."""


@dataclass(frozen=True)
class Signal:
    """Type and shape of one item between two layers.

    Attributes:
        form: `"vector"`, `"sequence"`, `"image"` or `"tokens"`.
        size: shape of one item: (D,), (T, D), (C, H, W) or (T,).
        padded: whether the batch has a `mask`, (n, T), True at valid positions and False at
            padding.
        vocabulary: number of distinct token ids, 0 for other forms. Id 0 is the padding token.
    """

    form: Form
    size: tuple[int, ...]
    padded: bool = False
    vocabulary: int = 0

    @property
    def features(self) -> int:
        """Length of the feature axis: D, or C for an image."""
        return self.size[0] if self.form == "image" else self.size[-1]

    @property
    def positions(self) -> tuple[int, ...]:
        """Lengths of the axes that have one feature row each: () for a vector, (T,) for a sequence,
        (H, W).
        """
        return self.size[1:] if self.form == "image" else self.size[:-1]

    def with_features(self, features: int) -> Signal:
        """Return a signal of the same form whose feature axis has another length."""
        if self.form == "image":
            return Signal(self.form, (features, *self.size[1:]), self.padded)
        return Signal(self.form, (*self.size[:-1], features), self.padded)


def feature_axis(signal: Signal) -> int:
    """Return the axis of a batch that holds the features: 1 for images, the last one otherwise."""
    return 1 if signal.form == "image" else -1


def vector(size: int) -> Signal:
    """Return the signal of vectors with `size` features."""
    return Signal("vector", (size,))


def choices_in_order(**choices: Sequence[Any]) -> list[Options]:
    """Return every combination of the choices, ordered by the sum of their positions: simplest
    first.
    """
    combinations = [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]
    return sorted(combinations, key=lambda c: sum(choices[n].index(v) for n, v in c.items()))


@dataclass(frozen=True, eq=False)
class Variants:
    """What a layer or a loss accepts, and what is drawn for it.

    Called with a signal, it returns the options for that.

    Attributes:
        forms: of the signals that it accepts.
        options: the variants, simplest first.
        fits: (signal, options) -> whether this variant is drawn for this signal.
        min_features: the smallest number of features for which anything is drawn.
    """

    forms: tuple[Form, ...]
    options: Sequence[Options]
    fits: Callable[[Signal, Options], bool]
    min_features: int

    def __call__(self, signal: Signal) -> Sequence[Options]:
        if signal.form not in self.forms or signal.features < self.min_features:
            return ()
        return [o for o in self.options if self.fits(signal, o)]


def on(
    *forms: Form,
    options: Sequence[Options] | None = None,
    fits: Callable[[Signal, Options], bool] = lambda signal, options: True,
    min_features: int = 1,
    **choices: Sequence[Any],
) -> Variants:
    """Return the `variants` of a layer or a loss.

    Without options, these are every combination of the choices.
    """
    return Variants(
        forms,
        choices_in_order(**choices) if options is None else options,
        fits,
        min_features,
    )


_FORM_NAMES = {
    ROWS: "a vector or a sequence",
    FLOATS: "floating values",
    ("sequence", "image"): "a sequence or an image",
    ("tokens",): "tokens",
    ("image",): "an image",
}


def expect(condition: bool, expected: str, received: object) -> None:
    """Raise `UsageError` where a layer's options or its input do not fit."""
    if not condition:
        raise UsageError(f"expected {expected}, got {received}")


def expect_form(signal: Signal, *forms: Form) -> None:
    """Raise `UsageError` where a layer's input has none of these forms."""
    expect(signal.form in forms, _FORM_NAMES.get(forms, f"a {forms[0]}"), signal)


def expect_counts(options: Options, *names: str) -> None:
    """Raise `UsageError` where one of these options is below 1."""
    for name in names:
        expect(options[name] >= 1, f"{name} of at least 1", options[name])


def rows_to_features(*counts: str) -> Callable[[Signal, Options], Signal]:
    """Return `out` of a layer that maps feature rows to rows of `features` features.

    Args:
        counts: further options that must be at least 1.
    """

    def out(signal: Signal, options: Options) -> Signal:
        expect_counts(options, "features", *counts)
        return signal.with_features(options["features"])

    return out


def same(signal: Signal, options: Options) -> Signal:
    """Return the input signal: `out` of a layer that accepts every signal and keeps its shape."""
    return signal


Arrays = dict[str, npt.NDArray[Any]]
Tensors = Mapping[str, torch.Tensor]
Arguments = Mapping[str, jax.Array]
Implementation = Callable[[Options, Arguments, jax.Array, Arguments], jax.Array]
Bools = npt.NDArray[np.bool_]
Targets = Callable[[Signal, Options, np.random.Generator, Bools], Arrays]
TorchLoss = Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor]
JaxLoss = Callable[[Options, jax.Array, Arguments], jax.Array]


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
        draw: (options, rng, items) -> arrays with leading dimension `items`: `x`, and `mask` for a
            padded signal.
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
        variants: input signal -> options to draw from, simplest first; empty where the layer does
            not accept it.
        out: (input signal, options) -> the output signal; raises `UsageError` where they do not
            fit.
        torch_module: (input signal, options) -> the module. Its forward takes the input, and by
            keyword the arrays of `extras` and, with `uses_mask`, `mask`. A module class of the
            catalogue stores its constructor's arguments in attributes of the same names, as torch's
            modules do: scripts of counterexamples print constructor calls from them.
        jax_apply: (options, parameters and buffers by name, input of shape (n, *size), extras) ->
            output. Pure.
        axes: number of trailing axes that the layer mixes: 0 for pointwise layers, 1 for layers of
            feature rows, None for all axes of an item. The JAX reference merges the other axes, so
            that fewer shapes are compiled.
        extras: (input signal, options, rng, items) -> further arrays per item, such as a dropout
            mask.
        uses_mask: whether the layer takes the padding mask of a padded signal, as `mask`.
        trainable: whether every variant has a parameter that receives a gradient from every item.
        wraps: for layers made of other layers: `"residual"` adds the input to their output,
            `"shared"` applies them twice; `"sum"` and `"concat"` hand their input to each of them
            and join the outputs, by addition or along the features. Such a definition has no
            implementation of its own.
        separable: whether the layer is separable over samples. One that is not needs no
            `jax_apply`.
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
    separable: bool = True

    @property
    def parallel(self) -> bool:
        """Whether its inner layers are branches with the same input, rather than a chain."""
        return self.wraps in ("sum", "concat")


def count_elements(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of elements of the target, a scalar."""
    target = batch["target"]
    return torch.tensor(target.numel(), device=target.device)


def elements_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the number of elements of each item's target, (n,)."""
    target = batch["target"]
    return jnp.full(target.shape[0], float(np.prod(target.shape[1:], dtype=int)))


@dataclass(frozen=True)
class LossDefinition:
    """A loss. Its mean over a batch is (sum of item losses) / (sum of item counts).

    Attributes:
        name: the kind's name in specs.
        variants: signal -> options to draw from without `reduction`, simplest first; empty where
            the loss does not accept it.
        targets: (signal, options, rng, ignored) -> arrays of a batch for this loss, such as
            `target` and `weight`. `ignored` is (items, T) for a sequence and (items,) otherwise,
            True where a target is ignored. A loss that cannot ignore targets reads only its length.
        torch_loss: (options, model output, batch, reduction) -> the scalar loss, written as users
            write it.
        jax_items: (options, model output of shape (n, *size), batch) -> (n,): each item's summed
            loss.
        count: (options, batch) -> scalar tensor: the divisor of the mean; by default the target's
            elements.
        jax_counts: (options, batch) -> (n,): each item's part of the divisor.
        axes: number of trailing axes that the loss mixes: 0 for one that is a sum over elements, 1
            for a sum over positions, where features or classes count as the last axis; None for all
            axes of an item. The JAX reference makes each element or position an item, so that fewer
            shapes are compiled.
        maskable: options -> whether a micro-batch without valid targets has a zero gradient rather
            than 0/0.
        uniform: (signal, options) -> whether every item has the same count.
        drawn: whether the strategies draw this kind.
        separable: whether the loss is separable over samples. The item losses of one that is not
            are never asked for.
    """

    name: str
    variants: Callable[[Signal], Sequence[Options]]
    targets: Targets
    torch_loss: TorchLoss
    jax_items: JaxLoss
    count: Callable[[Options, Tensors], torch.Tensor] = count_elements
    jax_counts: Callable[[Options, Arguments], jax.Array] = elements_per_item
    axes: int | None = None
    maskable: Callable[[Options], bool] = lambda options: False
    uniform: Callable[[Signal, Options], bool] = lambda signal, options: True
    drawn: bool = True
    separable: bool = True


# Sources of items: vectors, sequences, token sequences with padding, images, item indices.


Floats = npt.NDArray[np.float64]
LARGE = 30.0
VALUES: dict[str, Callable[[Floats], Floats]] = {"tied": np.round, "large": lambda x: LARGE * x}
"""What the option `values` makes of normal numbers: many that are equal or 0, or large ones. Layers are differentiated
on torch's side of a kink, so that torch and JAX agree at ties and zeros."""


def _normal(options: Options, rng: np.random.Generator, items: int, *size: int) -> Arrays:
    x = rng.standard_normal((items, *size))
    values = options.get("values")
    if values is not None and values not in VALUES:
        raise UsageError(f"input: values must be one of {', '.join(VALUES)}; got {values!r}")
    return {"x": x if values is None else VALUES[values](x)}


def _prefix_mask(rng: np.random.Generator, items: int, length: int) -> Bools:
    """Return (items, length), True on a prefix of at least one position of each row."""
    valid: Bools = np.arange(length) < rng.integers(1, length + 1, (items, 1))
    return valid


def _sequence(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    arrays = _normal(
        options,
        rng,
        items,
        options["length"],
        options["size"],
    )
    if options["padded"]:
        arrays["mask"] = _prefix_mask(rng, items, options["length"])
    return arrays


def _tokens(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    # id 0 is the padding token, whose embedding has no gradient
    x = rng.integers(1, options["vocabulary"], (items, options["length"]))
    if not options["padded"]:
        return {"x": x}
    mask = _prefix_mask(rng, items, options["length"])
    return {"x": np.where(mask, x, 0), "mask": mask}


KINDS = (
    InputDefinition(
        "vector",
        (*choices_in_order(size=(1, 2, 3, 4)), *choices_in_order(size=(2,), values=tuple(VALUES))),
        lambda o: Signal("vector", (o["size"],)),
        lambda o, rng, items: _normal(o, rng, items, o["size"]),
    ),
    InputDefinition(
        "sequence",
        (
            *choices_in_order(length=(3,), size=(2, 4), padded=(False, True)),
            *choices_in_order(length=(5,), size=(2,), padded=(False, True)),
            *choices_in_order(length=(3,), size=(2,), padded=(False, True), values=tuple(VALUES)),
        ),
        lambda o: Signal("sequence", (o["length"], o["size"]), padded=o["padded"]),
        _sequence,
    ),
    InputDefinition(
        "tokens",
        (
            *choices_in_order(length=(3,), vocabulary=(5,), padded=(False, True)),
            *choices_in_order(length=(5,), vocabulary=(5,), padded=(False, True)),
            *choices_in_order(length=(3,), vocabulary=(9,), padded=(False, True)),
        ),
        lambda o: Signal("tokens", (o["length"],), padded=o["padded"], vocabulary=o["vocabulary"]),
        _tokens,
    ),
    InputDefinition(
        "index",
        ({"items": 1},),
        lambda o: Signal("tokens", (1,), vocabulary=o["items"]),
        lambda o, rng, items: {"x": np.arange(items)[:, None] % o["items"]},
        drawn=False,
    ),
    InputDefinition(
        "image",
        (
            *choices_in_order(channels=(2, 4), height=(4,), width=(5,)),
            *({"channels": 2, "height": size, "width": size} for size in (2, 5)),
            *choices_in_order(channels=(2,), height=(4,), width=(5,), values=tuple(VALUES)),
        ),
        lambda o: Signal("image", (o["channels"], o["height"], o["width"])),
        lambda o, rng, items: _normal(o, rng, items, o["channels"], o["height"], o["width"]),
    ),
)
