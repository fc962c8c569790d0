"""Layers of feature rows and of sequences.

Linear layers and embeddings, activations, attention and recurrence, and linear layers whose
parameters are tied, frozen or unreached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_counts,
    on,
    rows_to_features,
    same,
)

# Linear layers and embeddings


PADDING = 0
"""Id of the padding token."""


def linear(params: Arguments, x: jax.Array, prefix: str = "") -> jax.Array:
    """Return x W^T + b over the feature axis.

    `prefix` is that of the names `weight` and `bias` in `params`.
    """
    return x @ params[f"{prefix}weight"].T + params[f"{prefix}bias"]


def _linear(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return linear(params, x) if options["bias"] else x @ params["weight"].T


def few_in_sequences(signal: Signal, options: Options) -> bool:
    """Return False for more than two output features of a sequence: every new shape is one more
    compilation.
    """
    return signal.form != "sequence" or options["features"] <= 2


def embedding_arguments(signal: Signal, options: Options) -> dict[str, Any]:
    """Return the arguments of torch's `Embedding` and `EmbeddingBag`."""
    return {
        "num_embeddings": signal.vocabulary,
        "embedding_dim": options["features"],
        "padding_idx": PADDING if options["padding_idx"] else None,
        "sparse": options["sparse"],
    }


def _embedded(signal: Signal, options: Options) -> Signal:
    expect_counts(options, "features")
    return Signal("sequence", (*signal.size, options["features"]), signal.padded)


def _embedding(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    table = params["weight"]
    if options["padding_idx"]:
        # the padding row gets no gradient
        table = jnp.where(
            (jnp.arange(len(table)) == PADDING)[:, None], jax.lax.stop_gradient(table), table
        )
    return table[x]


# Pointwise activations.
#
# At a kink an activation has several subgradients, of which torch returns one. Inputs at a kink are
# common: a dropped or clamped value is exactly 0, 1 or 6. Each definition therefore states with `>`
# or `>=` on which side a kink lies. JAX's own functions stand where their derivative at a kink is
# torch's: not that of leaky_relu, which is 1 at 0.


def _between(x: jax.Array, low: float, high: float, inside: jax.Array) -> jax.Array:
    """Return `inside` strictly between the bounds, and the nearer bound elsewhere."""
    return jnp.where((x > low) & (x < high), inside, jnp.where(x >= high, high, low))


def _shrink(x: jax.Array, lambd: float, by: float) -> jax.Array:
    return jnp.where(x > lambd, x - by, jnp.where(x < -lambd, x + by, 0.0))


def _pointwise(
    name: str,
    module: Callable[..., torch.nn.Module],
    function: Callable[..., jax.Array],
    *options: Options,
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*FLOATS, options=options or ({},)),
        same,
        lambda signal, o: module(**o),
        lambda o, params, x, extras: function(x, **o),
        axes=0,
    )


# Activations of whole feature rows (softmax, GLU) or with a parameter (PReLU)


def _over_features(
    name: str, module: Callable[..., torch.nn.Module], function: Callable[[jax.Array], jax.Array]
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*ROWS),
        same,
        lambda signal, o: module(dim=-1),
        lambda o, params, x, extras: function(x),
        axes=1,
    )


def _glu_out(signal: Signal, options: Options) -> Signal:
    expect(signal.features % 2 == 0, "an even number of features", signal)
    return signal.with_features(signal.features // 2)


def _takes_slopes(signal: Signal, options: Options) -> bool:
    # torch's channels are the second axis: the features of a vector, the positions of a sequence
    return signal.form == "vector" or not options["per_feature"]


def _prelu_out(signal: Signal, options: Options) -> Signal:
    expect(_takes_slopes(signal, options), "a vector for per_feature=True", signal)
    return signal


# Multi-head self-attention, optionally causal, with padding masked (Vaswani et al. 2017, section
# 3.2), and transformer encoder layers: self-attention and a two-layer network, each with a residual
# and a layer norm


class SelfAttention(torch.nn.Module):
    """`torch.nn.MultiheadAttention` with the sequence as query, key and value."""

    def __init__(self, features: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(features, heads, batch_first=True)
        self.features = features
        self.heads = heads
        self.causal = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = x.shape[1]
        future = (
            torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            if self.causal
            else None
        )
        y, _ = self.attention(
            x,
            x,
            x,
            # torch's masks are True at ignored positions
            key_padding_mask=None if mask is None else ~mask,
            attn_mask=future,
            is_causal=self.causal,
            need_weights=False,
        )
        return y


def attend(
    params: Arguments, prefix: str, x: jax.Array, heads: int, visible: jax.Array
) -> jax.Array:
    """Return multi-head self-attention.

    Args:
        params: `in_proj_weight` (3D, D) and `in_proj_bias` (3D,), the stacked projections to
            queries, keys and values; `out_proj.weight` (D, D) and `out_proj.bias` (D,), the
            projection of the concatenated heads.
        prefix: prefix of those names in `params`.
        x: (n, T, D).
        heads: H, which divides D.
        visible: broadcasts to (n, H, T, T); True where a query (third axis) attends to a key
            (fourth axis). Every query attends to at least one key.

    Returns:
        (n, T, D).
    """
    n, length, features = x.shape
    projected = linear(params, x, prefix + "in_proj_")
    q, k, v = (part.reshape(n, length, heads, -1) for part in jnp.split(projected, 3, axis=-1))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(features / heads)
    scores = jnp.where(visible, scores, -jnp.inf)
    y = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(n, length, features)
    return linear(params, y, prefix + "out_proj.")


def visible_keys(x: jax.Array, extras: Arguments, causal: bool) -> jax.Array:
    """Return the attention mask, (n or 1, 1, T, T): True at keys that are valid and, if `causal`,
    not in the future.
    """
    length = x.shape[1]
    visible = jnp.ones((1, 1, length, length), dtype=bool)
    if causal:
        visible = jnp.tril(visible)
    return visible & extras["mask"][:, None, None, :] if "mask" in extras else visible


def _heads_divide(signal: Signal, options: Options) -> bool:
    heads: int = options["heads"]
    return heads >= 1 and signal.features % heads == 0


def _attended(signal: Signal, options: Options) -> Signal:
    expect(
        _heads_divide(signal, options), "heads that divide the features", (options["heads"], signal)
    )
    return signal


def _attention(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return attend(
        params, "attention.", x, options["heads"], visible_keys(x, extras, options["causal"])
    )


TRANSFORMER_HIDDEN = 3
_TRANSFORMER_EPS = 1e-5
_TRANSFORMER_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
}


class EncoderBlock(torch.nn.Module):
    """`torch.nn.TransformerEncoderLayer` without dropout, whose random numbers differ between torch
    and JAX.
    """

    def __init__(self, features: int, heads: int, activation: str, norm_first: bool) -> None:
        super().__init__()
        self.features = features
        self.heads = heads
        self.activation = activation
        self.norm_first = norm_first
        self.block = torch.nn.TransformerEncoderLayer(
            features,
            heads,
            dim_feedforward=TRANSFORMER_HIDDEN,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=_TRANSFORMER_EPS,
            batch_first=True,
            norm_first=norm_first,
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.block(x, src_key_padding_mask=None if mask is None else ~mask)
        return y


def _transformer_out(signal: Signal, options: Options) -> Signal:
    out = _attended(signal, options)
    activations = tuple(_TRANSFORMER_ACTIVATIONS)
    expect(
        options["activation"] in activations,
        f"an activation among {activations}",
        options["activation"],
    )
    return out


def standardised(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    """Return x with mean 0 and variance 1 over some axes, `eps` added to the variance."""
    centred = x - x.mean(axes, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axes, keepdims=True) + eps)


def _transformer(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    visible = visible_keys(x, extras, causal=False)

    def attention(x: jax.Array) -> jax.Array:
        return attend(
            params,
            "block.self_attn.",
            x,
            options["heads"],
            visible,
        )

    def network(x: jax.Array) -> jax.Array:
        hidden = _TRANSFORMER_ACTIVATIONS[options["activation"]](
            linear(params, x, "block.linear1.")
        )
        return linear(params, hidden, "block.linear2.")

    def norm(name: str, x: jax.Array) -> jax.Array:
        x = standardised(x, (-1,), _TRANSFORMER_EPS)
        return x * params[f"block.{name}.weight"] + params[f"block.{name}.bias"]

    if options["norm_first"]:
        x = x + attention(norm("norm1", x))
        return x + network(norm("norm2", x))
    x = norm("norm1", x + attention(x))
    return norm("norm2", x + network(x))


# Recurrent layers: RNN, GRU, LSTM. The output is the hidden state at every step, (n, T, H) or (n,
# T, 2H).


# (options, W x + b, U h + b', hidden state, memory) -> the next hidden state and memory.
# The second and third argument concatenate the gates, in torch's order.
Cell = Callable[[Options, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class AllSteps(torch.nn.Module):
    """A recurrent module that returns the outputs of all steps and drops the final state."""

    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.cell(x)[0]
        return y


def _rnn(
    o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    s = xs + hs
    return (jax.nn.relu(s) if o["nonlinearity"] == "relu" else jnp.tanh(s)), memory


def _gru(
    o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    reset_x, update_x, new_x = jnp.split(xs, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(hs, 3, axis=-1)
    reset = jax.nn.sigmoid(reset_x + reset_h)
    update = jax.nn.sigmoid(update_x + update_h)
    # torch, like cuDNN, applies the reset gate after the projection and its bias; Cho et al. 2014
    # apply it before
    new = jnp.tanh(new_x + reset * new_h)
    return (1 - update) * new + update * h, memory


def _lstm(
    o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    write, forget, candidate, read = jnp.split(xs + hs, 4, axis=-1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(write) * jnp.tanh(candidate)
    return jax.nn.sigmoid(read) * jnp.tanh(memory), memory


def _run(cell: Cell, options: Options, params: Arguments, suffix: str, x: jax.Array) -> jax.Array:
    """Return (n, T, H), the hidden states of one layer in one direction."""
    w_x, w_h, b_x, b_h = (
        params[f"cell.{name}_{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    from_input = jnp.swapaxes(x @ w_x.T + b_x, 0, 1)
    start = jnp.zeros((len(x), w_h.shape[1]), x.dtype)

    def step(
        state: tuple[jax.Array, jax.Array], xs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state = cell(options, xs, state[0] @ w_h.T + b_h, *state)
        return state, state[0]

    _, steps = jax.lax.scan(
        step,
        (start, start),
        from_input,
        reverse=suffix.endswith("reverse"),
    )
    return jnp.swapaxes(steps, 0, 1)


def _recurrent(
    name: str, module: Callable[..., torch.nn.Module], cell: Cell, **choices: Sequence[Any]
) -> LayerDefinition:
    shapes: Sequence[Options] = (
        {"depth": 1, "bidirectional": False},
        {"depth": 1, "bidirectional": True},
        {"depth": 2, "bidirectional": False},
    )
    # further options are drawn with one layer in one direction only: the other shapes share their
    # code
    more: list[Options] = []
    for option, values in choices.items():
        more += [{**shapes[0], option: value} for value in values[1:]]
    first = {option: values[0] for option, values in choices.items()}
    options = [{"features": 2, **first, **o} for o in (*shapes, *more)]

    def out(signal: Signal, o: Options) -> Signal:
        for option, values in choices.items():
            expect(o[option] in values, f"{option} among {tuple(values)}", o[option])
        expect(o["features"] >= 1 and o["depth"] >= 1, "features and depth of at least 1", dict(o))
        return signal.with_features(o["features"] * (2 if o["bidirectional"] else 1))

    def build(signal: Signal, o: Options) -> torch.nn.Module:
        further = {option: o[option] for option in choices}
        size = o["features"]
        depth = o["depth"]
        both = o["bidirectional"]
        return AllSteps(
            module(
                signal.features,
                size,
                num_layers=depth,
                bidirectional=both,
                batch_first=True,
                **further,
            )
        )

    def jax_apply(o: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
        for i in range(o["depth"]):
            directions = [f"l{i}", f"l{i}_reverse"] if o["bidirectional"] else [f"l{i}"]
            x = jnp.concatenate(
                [_run(cell, o, params, suffix, x) for suffix in directions], axis=-1
            )
        return x

    return LayerDefinition(
        name, on("sequence", options=options), out, build, jax_apply, trainable=True
    )


# Layers that use one weight twice: its gradient is the sum over both uses.


class TiedLinear(torch.nn.Module):
    """tanh(x W^T) W: an autoencoder whose decoder is its encoder's transpose."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.size = size
        self.hidden = hidden
        self.weight = torch.nn.Parameter(torch.empty(hidden, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, self.weight)) @ self.weight


class TiedEmbedding(torch.nn.Module):
    """tanh(E[token]) E^T: a language model whose output layer is its input embedding."""

    def __init__(self, vocabulary: int, features: int, sparse: bool) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.features = features
        self.sparse = sparse
        self.weight = torch.nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.nn.functional.embedding(x, self.weight, sparse=self.sparse)
        return torch.nn.functional.linear(torch.tanh(read), self.weight)


def _tied_linear(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.tanh(x @ params["weight"].T) @ params["weight"]


def _tied_embedding(
    options: Options, params: Arguments, x: jax.Array, extras: Arguments
) -> jax.Array:
    return jnp.tanh(params["weight"][x]) @ params["weight"].T


# Linear layers with frozen parameters: weight, bias or both have `requires_grad=False`


_PARTS = ("weight", "bias")


def _frozen_parts(options: Options) -> tuple[str, ...]:
    return (options["frozen"],) if "frozen" in options else _PARTS


def _frozen_out(signal: Signal, options: Options) -> Signal:
    parts = _frozen_parts(options)
    expect(set(parts) <= set(_PARTS), f"frozen among {_PARTS}", parts[0])
    return rows_to_features()(signal, options)


def _frozen_module(signal: Signal, options: Options) -> torch.nn.Module:
    module = torch.nn.Linear(signal.features, options["features"])
    for part in _frozen_parts(options):
        module.get_parameter(part).requires_grad_(False)
    return module


def _frozen_linear(
    options: Options, params: Arguments, x: jax.Array, extras: Arguments
) -> jax.Array:
    frozen = _frozen_parts(options)
    return linear(
        {p: jax.lax.stop_gradient(params[p]) if p in frozen else params[p] for p in _PARTS}, x
    )


def _frozen(name: str, *, trainable: bool, **choices: Any) -> LayerDefinition:
    variants = on(*ROWS, features=(1, 2), **choices)
    return LayerDefinition(
        name, variants, _frozen_out, _frozen_module, _frozen_linear, axes=1, trainable=trainable
    )


# Layers with parameters that receive no gradient: unused ones, and those of branches that no item
# takes.
#
# The torch modules select rows by index, as mixture-of-experts implementations do, so a branch that
# no row takes is not in the graph and its gradient is None. Every row, including every position of
# a sequence, is routed independently.
#
# Routing is discontinuous: at a threshold, torch and JAX could take different branches. Inputs of
# exactly 0 are common (after relu or dropout), and so are inputs within rounding of 0 (a normalized
# constant). The branch's threshold is therefore not 0, and the mixture's gate has a bias.


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
        self.size = size
        self.features = features

    def send(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return (n, features) for rows (n, size) and the index of each row's linear layer, (n,)."""
        y = rows.new_zeros(len(rows), self.features)
        for way, layer in enumerate(self.ways):
            members = (chosen == way).nonzero()[:, 0]
            if len(members):
                y = y.index_add(0, members, layer(rows[members]))
        return y


class TwoWayLinear(Routed):
    """One linear layer for rows whose first feature is above the threshold, another for the other
    rows.
    """

    def __init__(self, size: int, features: int) -> None:
        super().__init__(size, features, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.send(rows, (rows[:, 0] > THRESHOLD).long()).reshape(*x.shape[:-1], -1)


class Mixture(Routed):
    """A top-1 mixture of experts: the likeliest expert's output times its probability (Fedus et al.
    2022, eq. 2).
    """

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


def _way(params: Arguments, way: int, x: jax.Array) -> jax.Array:
    return linear(params, x, f"ways.{way}.")


def _branch(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.where(x[..., :1] > THRESHOLD, _way(params, 1, x), _way(params, 0, x))


def _mixture(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    logits = linear(params, x, "gate.")
    chosen = jnp.argmax(logits, axis=-1)[..., None]
    probability = jax.nn.softmax(logits)
    y = jnp.zeros((), x.dtype)
    for way in range(options["experts"]):
        y = jnp.where(chosen == way, probability[..., way : way + 1] * _way(params, way, x), y)
    return y


def _routed(
    name: str, module: Callable[..., torch.nn.Module], jax_apply: Implementation, **choices: Any
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*ROWS, features=(1, 2), **choices),
        rows_to_features(*choices),
        lambda signal, o: module(
            signal.features, *(o[option] for option in ("features", *choices))
        ),
        jax_apply,
        axes=1,
        trainable=True,
    )


KINDS = (
    LayerDefinition(
        "linear",
        on(*ROWS, fits=few_in_sequences, features=(1, 2, 3, 4), bias=(False, True)),
        rows_to_features(),
        lambda signal, o: torch.nn.Linear(signal.features, o["features"], bias=o["bias"]),
        _linear,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "embedding",
        on("tokens", features=(2, 4), sparse=(False, True), padding_idx=(False, True)),
        _embedded,
        lambda signal, o: torch.nn.Embedding(**embedding_arguments(signal, o)),
        _embedding,
        trainable=True,
    ),
    _pointwise("relu", torch.nn.ReLU, jax.nn.relu),
    _pointwise("tanh", torch.nn.Tanh, jnp.tanh),
    _pointwise("sigmoid", torch.nn.Sigmoid, jax.nn.sigmoid),
    _pointwise("gelu", torch.nn.GELU, partial(jax.nn.gelu, approximate=False)),
    _pointwise("gelu_tanh", lambda: torch.nn.GELU(approximate="tanh"), jax.nn.gelu),
    _pointwise("silu", torch.nn.SiLU, jax.nn.silu),
    _pointwise("mish", torch.nn.Mish, lambda x: x * jnp.tanh(jnp.logaddexp(x, 0.0))),
    _pointwise(
        "softplus",
        torch.nn.Softplus,
        # torch is linear above the threshold; the second variant has one that drawn numbers exceed
        lambda x, beta, threshold: jnp.where(
            beta * x > threshold, x, jnp.logaddexp(beta * x, 0.0) / beta
        ),
        {"beta": 1.0, "threshold": 20.0},
        {"beta": 2.0, "threshold": 1.0},
    ),
    _pointwise("log_sigmoid", torch.nn.LogSigmoid, lambda x: -jnp.logaddexp(-x, 0.0)),
    _pointwise(
        "leaky_relu",
        torch.nn.LeakyReLU,
        lambda x, negative_slope: jnp.where(x > 0, x, negative_slope * x),
        {"negative_slope": 0.01},
        {"negative_slope": 0.5},
    ),
    _pointwise("elu", torch.nn.ELU, jax.nn.elu, {"alpha": 1.0}, {"alpha": 0.5}),
    _pointwise("celu", torch.nn.CELU, jax.nn.celu, {"alpha": 2.0}),
    _pointwise("selu", torch.nn.SELU, jax.nn.selu),
    _pointwise("hardtanh", torch.nn.Hardtanh, lambda x: _between(x, -1.0, 1.0, x)),
    _pointwise("relu6", torch.nn.ReLU6, lambda x: _between(x, 0.0, 6.0, x)),
    _pointwise(
        "hardswish",
        torch.nn.Hardswish,
        lambda x: jnp.where(x >= 3, x, jnp.where(x > -3, x * (x + 3) / 6, 0.0)),
    ),
    _pointwise("softshrink", torch.nn.Softshrink, lambda x: _shrink(x, 0.5, 0.5)),
    _pointwise("hardshrink", torch.nn.Hardshrink, lambda x: _shrink(x, 0.5, 0.0)),
    _pointwise("softsign", torch.nn.Softsign, lambda x: x / (1 + jnp.where(x > 0, x, -x))),
    _pointwise("tanhshrink", torch.nn.Tanhshrink, lambda x: x - jnp.tanh(x)),
    _over_features("softmax", torch.nn.Softmax, jax.nn.softmax),
    _over_features("log_softmax", torch.nn.LogSoftmax, jax.nn.log_softmax),
    LayerDefinition(
        "glu",
        on(*ROWS, fits=lambda signal, o: signal.features % 2 == 0),
        _glu_out,
        lambda signal, o: torch.nn.GLU(dim=-1),
        lambda o, params, x, extras: jax.nn.glu(x),
        axes=1,
    ),
    LayerDefinition(
        "prelu",
        on(*FLOATS, fits=_takes_slopes, per_feature=(False, True)),
        _prelu_out,
        lambda signal, o: torch.nn.PReLU(signal.features if o["per_feature"] else 1),
        # not trainable: an item above 0 gives the slope a zero gradient
        lambda o, params, x, extras: jnp.where(x > 0, x, params["weight"] * x),
        axes=1,
    ),
    LayerDefinition(
        "attention",
        on("sequence", fits=_heads_divide, heads=(1, 2), causal=(False, True)),
        _attended,
        lambda signal, o: SelfAttention(signal.features, **o),
        _attention,
        uses_mask=True,
        trainable=True,
    ),
    LayerDefinition(
        "transformer",
        on(
            "sequence",
            options=(
                {"heads": 1, "activation": "relu", "norm_first": False},
                {"heads": 1, "activation": "gelu", "norm_first": True},
                {"heads": 2, "activation": "gelu", "norm_first": False},
            ),
            fits=_heads_divide,
            # the layer norm of one feature is constant: such a block would not depend on its input
            min_features=2,
        ),
        _transformer_out,
        lambda signal, o: EncoderBlock(signal.features, **o),
        _transformer,
        uses_mask=True,
        trainable=True,
    ),
    _recurrent("rnn", torch.nn.RNN, _rnn, nonlinearity=("tanh", "relu")),
    _recurrent("gru", torch.nn.GRU, _gru),
    _recurrent("lstm", torch.nn.LSTM, _lstm),
    LayerDefinition(
        "tied_linear",
        on(*ROWS, features=(1, 2)),
        lambda signal, o: rows_to_features()(signal, o).with_features(signal.features),
        lambda signal, o: TiedLinear(signal.features, o["features"]),
        _tied_linear,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "tied_embedding",
        # sparse: autograd adds the sparse gradient of one use to the dense gradient of the other
        on("tokens", features=(1, 2), sparse=(False, True)),
        lambda signal, o: _embedded(signal, o).with_features(signal.vocabulary),
        lambda signal, o: TiedEmbedding(signal.vocabulary, **o),
        _tied_embedding,
        trainable=True,
    ),
    _frozen("part_frozen_linear", frozen=_PARTS, trainable=True),
    _frozen("frozen_linear", trainable=False),
    _routed("unused", Unused, lambda o, params, x, extras: linear(params, x)),
    _routed("branch", TwoWayLinear, _branch),
    _routed("mixture", Mixture, _mixture, experts=(2, 3)),
)
