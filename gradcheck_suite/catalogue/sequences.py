"""Multi-head self-attention, optionally causal, with padding masked (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.activations import gelu, relu, softmax, standardised
from gradcheck_suite.catalogue.convolution import first_maximum
from gradcheck_suite.catalogue.definitions import (
    Arguments,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_form,
    product,
    vector,
)

HEADS = (1, 2)


class SelfAttention(torch.nn.Module):
    """`torch.nn.MultiheadAttention` with the sequence as query, key and value."""

    def __init__(self, features: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(features, heads, batch_first=True)
        self.features, self.heads, self.causal = features, heads, causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
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


def attend(params: Arguments, prefix: str, x: jax.Array, heads: int, visible: jax.Array) -> jax.Array:
    """Return multi-head self-attention.

    Args:
        params: `in_proj_weight` (3D, D) and `in_proj_bias` (3D,), the stacked projections to queries, keys and values;
            `out_proj.weight` (D, D) and `out_proj.bias` (D,), the projection of the concatenated heads.
        prefix: prefix of those names in `params`.
        x: (n, T, D).
        heads: H, which divides D.
        visible: broadcasts to (n, H, T, T); True where a query (third axis) attends to a key (fourth axis). Every
            query attends to at least one key.

    Returns:
        (n, T, D).
    """
    n, length, features = x.shape
    projected = x @ params[prefix + "in_proj_weight"].T + params[prefix + "in_proj_bias"]
    q, k, v = (part.reshape(n, length, heads, -1) for part in jnp.split(projected, 3, axis=-1))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(features / heads)
    scores = jnp.where(visible, scores, -jnp.inf)
    y = jnp.einsum("nhqk,nkhd->nqhd", softmax(scores), v).reshape(n, length, features)
    return y @ params[prefix + "out_proj.weight"].T + params[prefix + "out_proj.bias"]


def visible_keys(x: jax.Array, extras: Arguments, causal: bool) -> jax.Array:
    """Return the attention mask, (n or 1, 1, T, T): True at keys that are valid and, if `causal`, not in the future."""
    length = x.shape[1]
    visible = jnp.ones((1, 1, length, length), dtype=bool)
    if causal:
        visible = jnp.tril(visible)
    return visible & extras["mask"][:, None, None, :] if "mask" in extras else visible


def _attention_variants(signal: Signal) -> Sequence[Options]:
    if signal.form != "sequence":
        return ()
    return product(heads=[h for h in HEADS if signal.features % h == 0], causal=(False, True))


def _attention_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "attention", "sequence")
    heads = options["heads"]
    expect(heads >= 1 and signal.features % heads == 0, "attention", "heads that divide the features", (heads, signal))
    return signal


def _attention_torch(signal: Signal, options: Options) -> torch.nn.Module:
    return SelfAttention(signal.features, options["heads"], options["causal"])


def _attention_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return attend(params, "attention.", x, options["heads"], visible_keys(x, extras, options["causal"]))


ATTENTION_KINDS = (
    LayerDefinition(
        "attention",
        _attention_variants,
        _attention_out,
        _attention_torch,
        _attention_jax,
        uses_mask=True,
        trainable=True,
    ),
)


# Transformer encoder layers: self-attention and a two-layer network, each with a residual and a layer norm.


TRANSFORMER_HIDDEN = 3
_EPS = 1e-5
_ACTIVATIONS = ("relu", "gelu")


class Block(torch.nn.Module):
    """`torch.nn.TransformerEncoderLayer` without dropout, whose random numbers differ between torch and JAX."""

    def __init__(self, features: int, heads: int, activation: str, norm_first: bool) -> None:
        super().__init__()
        self.features, self.heads, self.activation, self.norm_first = features, heads, activation, norm_first
        self.block = torch.nn.TransformerEncoderLayer(
            features,
            heads,
            dim_feedforward=TRANSFORMER_HIDDEN,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=_EPS,
            batch_first=True,
            norm_first=norm_first,
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.block(x, src_key_padding_mask=None if mask is None else ~mask)
        return y


def _norm(params: Arguments, name: str, x: jax.Array) -> jax.Array:
    return standardised(x, (-1,), _EPS) * params[f"block.{name}.weight"] + params[f"block.{name}.bias"]


def _network(params: Arguments, activation: str, x: jax.Array) -> jax.Array:
    h = x @ params["block.linear1.weight"].T + params["block.linear1.bias"]
    h = relu(h) if activation == "relu" else gelu(h)
    return h @ params["block.linear2.weight"].T + params["block.linear2.bias"]


def _transformer_variants(signal: Signal) -> Sequence[Options]:
    # the layer norm of one feature is constant: such a block would not depend on its input
    if signal.form != "sequence" or signal.features < 2:
        return ()
    rows = ((1, "relu", False), (1, "gelu", True), (2, "gelu", False))
    return [
        {"heads": heads, "activation": activation, "norm_first": norm_first}
        for heads, activation, norm_first in rows
        if signal.features % heads == 0
    ]


def _transformer_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "transformer", "sequence")
    heads, activation = options["heads"], options["activation"]
    expect(heads >= 1 and signal.features % heads == 0, "transformer", "heads that divide the features", heads)
    expect(activation in _ACTIVATIONS, "transformer", f"an activation among {_ACTIVATIONS}", activation)
    return signal


def _transformer_torch(signal: Signal, options: Options) -> torch.nn.Module:
    return Block(signal.features, options["heads"], options["activation"], options["norm_first"])


def _transformer_jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    visible = visible_keys(x, extras, causal=False)

    def attention(x: jax.Array) -> jax.Array:
        return attend(params, "block.self_attn.", x, options["heads"], visible)

    def network(x: jax.Array) -> jax.Array:
        return _network(params, options["activation"], x)

    if options["norm_first"]:
        x = x + attention(_norm(params, "norm1", x))
        return x + network(_norm(params, "norm2", x))
    x = _norm(params, "norm1", x + attention(x))
    return _norm(params, "norm2", x + network(x))


TRANSFORMER_KINDS = (
    LayerDefinition(
        "transformer",
        _transformer_variants,
        _transformer_out,
        _transformer_torch,
        _transformer_jax,
        uses_mask=True,
        trainable=True,
    ),
)


# Recurrent layers: RNN, GRU, LSTM. The output is the hidden state at every step, (n, T, H) or (n, T, 2H).


RECURRENT_HIDDEN = 2

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


def _rnn(o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = xs + hs
    return (relu(s) if o["nonlinearity"] == "relu" else jnp.tanh(s)), memory


def _gru(o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    reset_x, update_x, new_x = jnp.split(xs, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(hs, 3, axis=-1)
    reset, update = jax.nn.sigmoid(reset_x + reset_h), jax.nn.sigmoid(update_x + update_h)
    # torch, like cuDNN, applies the reset gate after the projection and its bias; Cho et al. 2014 apply it before
    new = jnp.tanh(new_x + reset * new_h)
    return (1 - update) * new + update * h, memory


def _lstm(o: Options, xs: jax.Array, hs: jax.Array, h: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    write, forget, candidate, read = jnp.split(xs + hs, 4, axis=-1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(write) * jnp.tanh(candidate)
    return jax.nn.sigmoid(read) * jnp.tanh(memory), memory


def _run(cell: Cell, options: Options, params: Arguments, suffix: str, x: jax.Array) -> jax.Array:
    """Return (n, T, H), the hidden states of one layer in one direction."""
    w_x, w_h, b_x, b_h = (params[f"cell.{name}_{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    from_input = jnp.swapaxes(x @ w_x.T + b_x, 0, 1)
    start = jnp.zeros((len(x), w_h.shape[1]), x.dtype)

    def step(state: tuple[jax.Array, jax.Array], xs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state = cell(options, xs, state[0] @ w_h.T + b_h, *state)
        return state, state[0]

    _, steps = jax.lax.scan(step, (start, start), from_input, reverse=suffix.endswith("reverse"))
    return jnp.swapaxes(steps, 0, 1)


def _recurrent_kind(
    name: str, module: Callable[..., torch.nn.Module], cell: Cell, choices: dict[str, Sequence[Any]]
) -> LayerDefinition:
    shapes: Sequence[Options] = (
        {"depth": 1, "bidirectional": False},
        {"depth": 1, "bidirectional": True},
        {"depth": 2, "bidirectional": False},
    )
    # further options are drawn with one layer in one direction only: the other shapes share their code
    more = [{**shapes[0], option: value} for option, values in choices.items() for value in values[1:]]
    first = {option: values[0] for option, values in choices.items()}
    options = [{"features": RECURRENT_HIDDEN, **first, **o} for o in (*shapes, *more)]

    def variants(signal: Signal) -> Sequence[Options]:
        return options if signal.form == "sequence" else ()

    def out(signal: Signal, o: Options) -> Signal:
        expect_form(signal, name, "sequence")
        for option, values in choices.items():
            expect(o[option] in values, name, f"{option} among {tuple(values)}", o[option])
        expect(o["features"] >= 1 and o["depth"] >= 1, name, "features and depth of at least 1", dict(o))
        return signal.with_features(o["features"] * (2 if o["bidirectional"] else 1))

    def build(signal: Signal, o: Options) -> torch.nn.Module:
        further = {option: o[option] for option in choices}
        size, depth, both = o["features"], o["depth"], o["bidirectional"]
        return AllSteps(
            module(signal.features, size, num_layers=depth, bidirectional=both, batch_first=True, **further)
        )

    def jax_apply(o: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
        for i in range(o["depth"]):
            directions = [f"l{i}", f"l{i}_reverse"] if o["bidirectional"] else [f"l{i}"]
            x = jnp.concatenate([_run(cell, o, params, suffix, x) for suffix in directions], axis=-1)
        return x

    return LayerDefinition(name, variants, out, build, jax_apply, trainable=True)


RECURRENT_KINDS = (
    _recurrent_kind("rnn", torch.nn.RNN, _rnn, {"nonlinearity": ("tanh", "relu")}),
    _recurrent_kind("gru", torch.nn.GRU, _gru, {}),
    _recurrent_kind("lstm", torch.nn.LSTM, _lstm, {}),
)


# Pooling of a sequence to one vector: the mean, maximum or last of its valid positions.


class MeanOverTime(torch.nn.Module):
    """Mean of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x.mean(1)
        kept = mask.unsqueeze(-1)
        return x.masked_fill(~kept, 0).sum(1) / kept.sum(1)


class MaxOverTime(torch.nn.Module):
    """Maximum of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D).

    Args:
        shared: whether equal maxima share the gradient (`amax`) or the first one gets it (`max`).
    """

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return x.amax(1) if self.shared else x.max(1).values


class LastStep(torch.nn.Module):
    """Last position where the mask is True: (n, T, D) and a mask (n, T), True on a prefix, to (n, D)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x[:, -1]
        return x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]


def _mean(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    kept = extras["mask"].astype(x.dtype) if "mask" in extras else jnp.ones(x.shape[:2], x.dtype)
    return jnp.einsum("ntd,nt->nd", x, kept) / kept.sum(1)[:, None]


def _max(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" in extras:
        x = jnp.where(extras["mask"][:, :, None], x, -jnp.inf)
    return x.max(1) if options["shared"] else first_maximum(jnp.swapaxes(x, 1, 2))


def _last(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" not in extras:
        return x[:, -1]
    position = jnp.arange(x.shape[1])
    last = jnp.where(extras["mask"], position, -1).max(1)
    return jnp.where((position == last[:, None])[:, :, None], x, 0.0).sum(1)


def _sequence_pooling_kind(
    name: str,
    module: Callable[[Options], torch.nn.Module],
    jax_apply: Implementation,
    options: Sequence[Options] = ({},),
) -> LayerDefinition:
    def variants(signal: Signal) -> Sequence[Options]:
        return options if signal.form == "sequence" else ()

    def out(signal: Signal, options: Options) -> Signal:
        expect_form(signal, name, "sequence")
        return vector(signal.features)

    return LayerDefinition(name, variants, out, lambda signal, options: module(options), jax_apply, uses_mask=True)


SEQUENCE_POOLING_KINDS = (
    _sequence_pooling_kind("mean_over_time", lambda options: MeanOverTime(), _mean),
    _sequence_pooling_kind(
        "max_over_time", lambda options: MaxOverTime(options["shared"]), _max, product(shared=(False, True))
    ),
    _sequence_pooling_kind("last_step", lambda options: LastStep(), _last),
)
