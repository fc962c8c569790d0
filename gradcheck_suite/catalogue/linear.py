"""Linear layers: y = x W^T + b over the feature axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.activations import softmax
from gradcheck_suite.catalogue.convolution import first_maximum
from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Arrays,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_form,
    keeps_signal,
    on,
    product,
    rows_to_features,
    same,
    vector,
)

LINEAR_FEATURES = (1, 2, 3, 4)


def _linear_variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ROWS:
        return ()
    return product(features=LINEAR_FEATURES[:2] if signal.form == "sequence" else LINEAR_FEATURES, bias=(False, True))


def _linear_torch(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Linear(signal.features, options["features"], bias=options["bias"])


def _linear_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    y = x @ params["weight"].T
    return y + params["bias"] if options["bias"] else y


LINEAR_KINDS = (
    LayerDefinition(
        "linear", _linear_variants, rows_to_features("linear"), _linear_torch, _linear_jax, axes=1, trainable=True
    ),
)


# Linear layers with frozen parameters: weight, bias or both have `requires_grad=False`.


FROZEN_LINEAR_FEATURES = (1, 2)
_PARTS = ("weight", "bias")


def _frozen_parts(options: Options) -> tuple[str, ...]:
    return (options["frozen"],) if "frozen" in options else _PARTS


def _module(signal: Signal, options: Options) -> torch.nn.Module:
    linear = torch.nn.Linear(signal.features, options["features"])
    for part in _frozen_parts(options):
        linear.get_parameter(part).requires_grad_(False)
    return linear


def _frozen_linear_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    frozen = _frozen_parts(options)
    weight, bias = (jax.lax.stop_gradient(params[p]) if p in frozen else params[p] for p in _PARTS)
    return x @ weight.T + bias


def _partly_frozen_out(signal: Signal, options: Options) -> Signal:
    expect(options["frozen"] in _PARTS, "part_frozen_linear", f"frozen among {_PARTS}", options["frozen"])
    return rows_to_features("part_frozen_linear")(signal, options)


FROZEN_LINEAR_KINDS = (
    LayerDefinition(
        "part_frozen_linear",
        on(*ROWS, features=FROZEN_LINEAR_FEATURES, frozen=_PARTS),
        _partly_frozen_out,
        _module,
        _frozen_linear_jax,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "frozen_linear",
        on(*ROWS, features=FROZEN_LINEAR_FEATURES),
        rows_to_features("frozen_linear"),
        _module,
        _frozen_linear_jax,
        axes=1,
    ),
)


# Layers that use one weight twice: its gradient is the sum over both uses.


TIED_WEIGHTS_FEATURES = (1, 2)


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


TIED_WEIGHTS_KINDS = (
    LayerDefinition(
        "tied_linear",
        on(*ROWS, features=TIED_WEIGHTS_FEATURES),
        _linear_out,
        _linear_module,
        _linear,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "tied_embedding",
        # sparse: autograd adds the sparse gradient of one use to the dense gradient of the other
        on("tokens", features=TIED_WEIGHTS_FEATURES, sparse=(False, True)),
        _embedding_out,
        _embedding_module,
        _embedding,
        trainable=True,
    ),
)


# Layers that scale: by a parameter without dimensions, and by a factor that depends on the mode.


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


SCALING_KINDS = (
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


# Linear layers with weight normalization: the weight is g v / |v|, and g and v are the parameters.


WEIGHT_NORM_FEATURES = (2, 3)


def _weight_norm_variants(signal: Signal) -> Sequence[Options]:
    if signal.form not in ROWS:
        return ()
    return product(
        features=WEIGHT_NORM_FEATURES[:1] if signal.form == "sequence" else WEIGHT_NORM_FEATURES, whole=(False, True)
    )


def _weight_norm_torch(signal: Signal, options: Options) -> torch.nn.Module:
    linear = torch.nn.Linear(signal.features, options["features"])
    # dim=-1 takes one norm over the whole weight
    return torch.nn.utils.parametrizations.weight_norm(linear, dim=-1 if options["whole"] else 0)


def _weight_norm_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    magnitude, direction = (params[f"parametrizations.weight.original{i}"] for i in range(2))
    square = direction**2
    norm = jnp.sqrt(square.sum() if options["whole"] else square.sum(1, keepdims=True))
    return x @ (magnitude * direction / norm).T + params["bias"]


WEIGHT_NORM_KINDS = (
    LayerDefinition(
        "weight_norm",
        _weight_norm_variants,
        rows_to_features("weight_norm"),
        _weight_norm_torch,
        _weight_norm_jax,
        axes=1,
        trainable=True,
    ),
)


# Embeddings of token ids.


EMBEDDINGS_FEATURES = (2, 4)
PADDING = 0


def _embeddings_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "embedding", "tokens")
    expect(options["features"] >= 1, "embedding", "features of at least 1", options["features"])
    return Signal("sequence", (*signal.size, options["features"]), signal.padded)


def _embeddings_torch(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Embedding(
        signal.vocabulary,
        options["features"],
        padding_idx=PADDING if options["padding_idx"] else None,
        sparse=options["sparse"],
    )


def _embeddings_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    table = params["weight"]
    if options["padding_idx"]:
        # the padding row gets no gradient
        table = jnp.where((jnp.arange(len(table)) == PADDING)[:, None], jax.lax.stop_gradient(table), table)
    return table[x]


EMBEDDINGS_KINDS = (
    LayerDefinition(
        "embedding",
        on("tokens", features=EMBEDDINGS_FEATURES, sparse=(False, True), padding_idx=(False, True)),
        _embeddings_out,
        _embeddings_torch,
        _embeddings_jax,
        trainable=True,
    ),
)


# Embedding bags: the sum, mean or maximum of an item's token vectors, one bag per item.


EMBEDDING_BAG_FEATURES = 2
MODES = ("sum", "mean", "max")


def _options(mode: str, *, sparse: bool = False, padding_idx: bool = False, weighted: bool = False) -> Options:
    return {
        "features": EMBEDDING_BAG_FEATURES,
        "mode": mode,
        "sparse": sparse,
        "padding_idx": padding_idx,
        "weighted": weighted,
    }


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


def _embedding_bag_variants(signal: Signal) -> Sequence[Options]:
    return _VARIANTS if signal.form == "tokens" else ()


def _embedding_bag_out(signal: Signal, options: Options) -> Signal:
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


def _embedding_bag_torch(signal: Signal, options: Options) -> torch.nn.Module:
    return Bag(
        signal.vocabulary,
        options["features"],
        mode=options["mode"],
        sparse=options["sparse"],
        padding_idx=PADDING if options["padding_idx"] else None,
    )


def _embedding_bag_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"weights": rng.standard_normal((items, *signal.size))} if options["weighted"] else {}


def _embedding_bag_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
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


EMBEDDING_BAG_KINDS = (
    LayerDefinition(
        "embedding_bag",
        _embedding_bag_variants,
        _embedding_bag_out,
        _embedding_bag_torch,
        _embedding_bag_jax,
        extras=_embedding_bag_extras,
        trainable=True,
    ),
)


# A layer with an input of its own: each item has a second vector beside the one that the first layer receives.


WIDTH = 3


class SecondInput(torch.nn.Module):
    """x + other W^T, for a second input `other` of the item."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.features, self.width = features, width
        self.weight = torch.nn.Parameter(torch.empty(features, width))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(other, self.weight)


def _second_input_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"other": rng.standard_normal((items, WIDTH))}


def _second_input_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x + extras["other"] @ params["weight"].T


SECOND_INPUT_KINDS = (
    LayerDefinition(
        "second_input",
        on("vector"),
        keeps_signal("second_input", "vector"),
        lambda signal, o: SecondInput(signal.features, WIDTH),
        _second_input_jax,
        extras=_second_input_extras,
        trainable=True,
    ),
)


# Layers made of other layers: a residual connection, a chain that is applied twice, branches that join.


MAX_JOINED = 2
"""Number of features up to which branches are concatenated, so that few new shapes occur."""


def _concat_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form in FLOATS and signal.features <= MAX_JOINED else ()


COMPOSITES_KINDS = (
    LayerDefinition("residual", on(*FLOATS), same, wraps="residual"),
    LayerDefinition("shared", on(*FLOATS), same, wraps="shared"),
    LayerDefinition("sum", on(*FLOATS), same, wraps="sum"),
    LayerDefinition("concat", _concat_variants, same, wraps="concat"),
)


# Layers with parameters that receive no gradient: unused ones, and those of branches that no item takes.
#
# The torch modules select rows by index, as mixture-of-experts implementations do, so a branch that no row takes is
# not in the graph and its gradient is None. Every row, including every position of a sequence, is routed
# independently.
#
# Routing is discontinuous: at a threshold, torch and JAX could take different branches. Inputs of exactly 0 are
# common (after relu or dropout), and so are inputs within rounding of 0 (a normalized constant). The branch's
# threshold is therefore not 0, and the mixture's gate has a bias.


ROUTING_FEATURES = (1, 2)
EXPERTS = (2, 3)
THRESHOLD = 9 / 64  # exact in every dtype, bfloat16 included


class Unused(torch.nn.Linear):
    """A linear layer with a parameter that its forward never uses."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.spare = torch.nn.Parameter(torch.empty(out_features, in_features))


class Routed(torch.nn.Module):
    """Base of modules that apply one of several linear layers to each row."""

    def __init__(self, size: int, features: int, ways: int) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(torch.nn.Linear(size, features) for _ in range(ways))
        self.size, self.features = size, features

    def send(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return (n, features) for rows (n, size) and the index of each row's linear layer, (n,)."""
        y = rows.new_zeros(len(rows), self.features)
        for way, layer in enumerate(self.ways):
            members = (chosen == way).nonzero()[:, 0]
            if len(members):
                y = y.index_add(0, members, layer(rows[members]))
        return y


class Branch(Routed):
    """One linear layer for rows whose first feature is above the threshold, another for the other rows."""

    def __init__(self, size: int, features: int) -> None:
        super().__init__(size, features, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.send(rows, (rows[:, 0] > THRESHOLD).long()).reshape(*x.shape[:-1], -1)


class Mixture(Routed):
    """A top-1 mixture of experts: the likeliest expert's output times its probability (Fedus et al. 2022, eq. 2)."""

    def __init__(self, size: int, features: int, experts: int) -> None:
        super().__init__(size, features, experts)
        self.experts = experts
        self.gate = torch.nn.Linear(size, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        chosen = logits.argmax(dim=-1)
        probability = logits.softmax(dim=-1).gather(1, chosen[:, None])
        return (self.send(rows, chosen) * probability).reshape(*x.shape[:-1], -1)


def _unused(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x @ params["weight"].T + params["bias"]


def _way(params: Arguments, way: int, x: jax.Array) -> jax.Array:
    return x @ params[f"ways.{way}.weight"].T + params[f"ways.{way}.bias"]


def _branch(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.where(x[..., :1] > THRESHOLD, _way(params, 1, x), _way(params, 0, x))


def _mixture(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    logits = x @ params["gate.weight"].T + params["gate.bias"]
    chosen = jnp.argmax(logits, axis=-1)[..., None]
    probability = softmax(logits)
    y = jnp.zeros(())
    for way in range(options["experts"]):
        y = jnp.where(chosen == way, probability[..., way : way + 1] * _way(params, way, x), y)
    return y


def _unused_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Unused(signal.features, options["features"])


def _branch_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Branch(signal.features, options["features"])


def _mixture_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Mixture(signal.features, options["features"], options["experts"])


def _kind(
    name: str, torch_module: Callable[[Signal, Options], torch.nn.Module], jax_apply: Implementation, **choices: Any
) -> LayerDefinition:
    variants, out = on(*ROWS, features=ROUTING_FEATURES, **choices), rows_to_features(name, *choices)
    return LayerDefinition(name, variants, out, torch_module, jax_apply, axes=1, trainable=True)


ROUTING_KINDS = (
    _kind("unused", _unused_module, _unused),
    _kind("branch", _branch_module, _branch),
    _kind("mixture", _mixture_module, _mixture, experts=EXPERTS),
)
