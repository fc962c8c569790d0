"""Recurrent layers: RNN, GRU, LSTM. The output is the hidden state at every step, (n, T, H) or (n, T, 2H)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.activations import relu
from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form

HIDDEN = 2

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


def _kind(
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
    options = [{"features": HIDDEN, **first, **o} for o in (*shapes, *more)]

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


KINDS = (
    _kind("rnn", torch.nn.RNN, _rnn, {"nonlinearity": ("tanh", "relu")}),
    _kind("gru", torch.nn.GRU, _gru, {}),
    _kind("lstm", torch.nn.LSTM, _lstm, {}),
)
