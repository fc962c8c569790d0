"""Further layers: with arrays of their own beside the input, that scale, made of other layers, and the weight probe's.

They come after `rows` and `positions` because the strategies draw kinds by their place in the table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Arrays,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_counts,
    expect_form,
    keeps_signal,
    on,
    rows_to_features,
    same,
    vector,
)
from gradcheck_suite.catalogue.positions import first_maximum
from gradcheck_suite.catalogue.rows import PADDING, embedding_arguments, few_in_sequences

# Dropout whose mask is part of the batch, so that every split of the items drops the same elements


class MaskedDropout(torch.nn.Module):
    """x * keep / (1 - p) for a mask `keep` of the input's shape."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x * keep / (1 - self.p)


def _dropout_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, *FLOATS)
    expect(0 <= options["p"] < 1, "p of at least 0 and below 1", options["p"])
    return signal


# Linear layers with weight normalization: the weight is g v / |v|, and g and v are the parameters


def _weight_norm_module(signal: Signal, options: Options) -> torch.nn.Module:
    module = torch.nn.Linear(signal.features, options["features"])
    # dim=-1 takes one norm over the whole weight
    return torch.nn.utils.parametrizations.weight_norm(module, dim=-1 if options["whole"] else 0)


def _weight_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    magnitude, direction = (params[f"parametrizations.weight.original{i}"] for i in range(2))
    square = direction**2
    norm = jnp.sqrt(square.sum() if options["whole"] else square.sum(1, keepdims=True))
    return x @ (magnitude * direction / norm).T + params["bias"]


# Embedding bags: the sum, mean or maximum of an item's token vectors, one bag per item


_MODES = ("sum", "mean", "max")
# torch supports per-sample weights for mode 'sum' only, and no sparse gradient for mode 'max'
_BAGS = [
    {"features": 2, "mode": mode, **{flag: flag in flags for flag in ("sparse", "padding_idx", "weighted")}}
    for mode, *flags in (
        *((mode,) for mode in _MODES),
        ("sum", "sparse"),
        ("mean", "padding_idx"),
        ("max", "padding_idx"),
        ("sum", "weighted"),
        ("mean", "sparse", "padding_idx"),
    )
]


def _bag_out(signal: Signal, options: Options) -> Signal:
    mode = options["mode"]
    expect_form(signal, "tokens")
    expect_counts(options, "features")
    expect(mode in _MODES, f"mode to be one of {', '.join(_MODES)}", mode)
    expect(mode != "max" or not options["sparse"], "a dense gradient for mode 'max'", "sparse=True")
    expect(mode == "sum" or not options["weighted"], "weights for mode 'sum' only", f"mode {mode!r}")
    return vector(options["features"])


class Bag(torch.nn.EmbeddingBag):
    """`EmbeddingBag` of (n, T) ids, one bag per row, with optional weights of the same shape."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, per_sample_weights=weights)


def _bag_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"weights": rng.standard_normal((items, *signal.size))} if options["weighted"] else {}


def _bag(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
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


# Layers that scale: by a parameter without dimensions, and by a factor that depends on the mode


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


# A layer with an input of its own: each item has a second vector beside the one that the first layer receives


WIDTH = 3


class SecondInput(torch.nn.Module):
    """x + other W^T, for a second input `other` of the item."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.features, self.width = features, width
        self.weight = torch.nn.Parameter(torch.empty(features, width))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(other, self.weight)


# The layer of the weight probe: one parameter entry per item. The gradient that a loop accumulates for this parameter
# is the vector of the weights that the loop gives to the items


class Readout(torch.nn.Module):
    """A parameter vector; an item's index selects one entry."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items = items
        self.weight = torch.nn.Parameter(torch.zeros(items))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x]


def _is_index(signal: Signal) -> bool:
    return signal.form == "tokens" and signal.size == (1,)


def _read_out(signal: Signal, options: Options) -> Signal:
    expect(_is_index(signal), "the index of an item", signal)
    return vector(1)


KINDS = (
    LayerDefinition(
        "dropout",
        on(*FLOATS, fits=lambda signal, o: signal.form == "vector" or o["p"] == 0.5, p=(0.5, 0.1)),
        _dropout_out,
        lambda signal, o: MaskedDropout(o["p"]),
        lambda o, params, x, extras: jnp.where(extras["keep"], x / (1 - o["p"]), 0.0),
        extras=lambda signal, o, rng, items: {"keep": rng.random((items, *signal.size)) >= o["p"]},
    ),
    LayerDefinition(
        "weight_norm",
        on(*ROWS, fits=few_in_sequences, features=(2, 3), whole=(False, True)),
        rows_to_features(),
        _weight_norm_module,
        _weight_norm,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "embedding_bag",
        on("tokens", options=_BAGS),
        _bag_out,
        lambda signal, o: Bag(**embedding_arguments(signal, o), mode=o["mode"]),
        _bag,
        extras=_bag_extras,
        trainable=True,
    ),
    LayerDefinition(
        "scale",
        on(*FLOATS),
        keeps_signal(*FLOATS),
        lambda signal, o: Scale(),
        lambda o, params, x, extras: x * params["weight"],
        axes=0,
        trainable=True,
    ),
    LayerDefinition(
        "train_scale",
        on(*FLOATS, factor=(2.0,)),
        keeps_signal(*FLOATS),
        lambda signal, o: TrainScale(o["factor"]),
        lambda o, params, x, extras: x * o["factor"],
        axes=0,
    ),
    LayerDefinition(
        "second_input",
        on("vector"),
        keeps_signal("vector"),
        lambda signal, o: SecondInput(signal.features, WIDTH),
        lambda o, params, x, extras: x + extras["other"] @ params["weight"].T,
        extras=lambda signal, o, rng, items: {"other": rng.standard_normal((items, WIDTH))},
        trainable=True,
    ),
    LayerDefinition("residual", on(*FLOATS), same, wraps="residual"),
    LayerDefinition("shared", on(*FLOATS), same, wraps="shared"),
    LayerDefinition("sum", on(*FLOATS), same, wraps="sum"),
    # few features, so that few new shapes occur
    LayerDefinition("concat", on(*FLOATS, fits=lambda signal, o: signal.features <= 2), same, wraps="concat"),
    LayerDefinition(
        "readout",
        on("tokens", fits=lambda signal, o: _is_index(signal)),
        _read_out,
        lambda signal, o: Readout(signal.vocabulary),
        lambda o, params, x, extras: params["weight"][x],
        trainable=True,
    ),
)
