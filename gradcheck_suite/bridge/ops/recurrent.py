"""Recurrent layers: a scan of one cell over time. Gates are in torch's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.errors import RandomnessError
from gradcheck_suite.bridge.op_table import register_op

State = tuple[Array, ...]
Cell = Callable[[State, Array, tuple[Array, ...]], tuple[State, Array]]


def _affine(x: Array, weight: Array, bias: Array | None) -> Array:
    out = jnp.matmul(x, weight.T, precision=lax.Precision.HIGHEST)
    return out if bias is None else out + bias


def _split(weights: tuple[Array, ...]) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return w_ih, w_hh, b_ih, b_hh, w_hr; absent ones are None."""
    w_ih, w_hh, *rest = weights
    biases = [w for w in rest if w.ndim == 1]
    projection = [w for w in rest if w.ndim == 2]
    b_ih, b_hh = biases or (None, None)
    return w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None


def lstm_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return the next (h, c) and h; the gates are input, forget, cell and output."""
    (h, c), (w_ih, w_hh, b_ih, b_hh, w_hr) = state, _split(weights)
    i, f, g, o = jnp.split(_affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    h = h if w_hr is None else _affine(h, w_hr, None)
    return (h, c), h


def gru_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return the next (h,) and h; the gates are reset, update and new."""
    (h,), (w_ih, w_hh, b_ih, b_hh, _) = state, _split(weights)
    r_x, z_x, n_x = jnp.split(_affine(x, w_ih, b_ih), 3, axis=-1)
    r_h, z_h, n_h = jnp.split(_affine(h, w_hh, b_hh), 3, axis=-1)
    r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + r * n_h)
    h = n + z * (h - n)
    return (h,), h


def _plain(state: State, x: Array, weights: tuple[Array, ...]) -> Array:
    (h,), (w_ih, w_hh, b_ih, b_hh, _) = state, _split(weights)
    return _affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh)


def tanh_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return h = tanh(W x + U h), as the state and as the output."""
    h = jnp.tanh(_plain(state, x, weights))
    return (h,), h


def relu_step(state: State, x: Array, weights: tuple[Array, ...]) -> tuple[State, Array]:
    """Return h = max(0, W x + U h), as the state and as the output; the gradient at 0 is 0."""
    h = _plain(state, x, weights)
    h = jnp.where(h <= 0, 0, h)
    return (h,), h


def _through_time(
    cell: Cell, state: State, xs: Array, weights: tuple[Array, ...], reverse: bool
) -> tuple[State, Array]:
    return lax.scan(lambda s, x: cell(s, x, weights), state, xs, reverse=reverse)


def _layers(
    cell: Cell,
    x: Array,
    states: Sequence[Array],
    params: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, list[Array]]:
    """Return the outputs, and the final states, each (layers * directions, batch, width)."""
    if train and dropout > 0 and num_layers > 1:
        raise RandomnessError(f"dropout between recurrent layers is active (p = {dropout:g})")
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    assert per_cell in ((4, 5) if has_biases else (2, 3))
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    finals: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = tuple(params[place * per_cell : (place + 1) * per_cell])
            state = tuple(s[place] for s in states)
            final, out = _through_time(cell, state, x, weights, direction == 1)
            finals.append(final)
            outputs.append(out)
        x = jnp.concatenate(outputs, axis=-1)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    return x, [jnp.stack(parts) for parts in zip(*finals, strict=True)]


@register_op("aten.lstm.input")
def lstm(input: Array, hx: Sequence[Array], params: Sequence[Array], *arguments: Any) -> tuple[Array, ...]:
    """Return the outputs of all steps and the last h and c."""
    out, states = _layers(lstm_step, input, hx, params, *arguments)
    return out, *states


def _one_state(name: str, cell: Cell) -> None:
    def layers(input: Array, hx: Array, params: Sequence[Array], *arguments: Any) -> tuple[Array, ...]:
        """Return the outputs of all steps and the last h."""
        out, states = _layers(cell, input, [hx], params, *arguments)
        return out, *states

    register_op(name)(layers)


_one_state("aten.gru.input", gru_step)
_one_state("aten.rnn_tanh.input", tanh_step)
_one_state("aten.rnn_relu.input", relu_step)


def _cell_weights(w_ih: Array, w_hh: Array, b_ih: Array | None, b_hh: Array | None) -> tuple[Array, ...]:
    return tuple(w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None)


@register_op("aten.lstm_cell")
def lstm_cell(
    input: Array, hx: Sequence[Array], w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None
) -> tuple[Array, ...]:
    """Return h and c after one step."""
    return lstm_step(tuple(hx), input, _cell_weights(w_ih, w_hh, b_ih, b_hh))[0]


def _register_cell(name: str, cell: Cell) -> None:
    def one(
        input: Array, hx: Array, w_ih: Array, w_hh: Array, b_ih: Array | None = None, b_hh: Array | None = None
    ) -> Array:
        """Return h after one step."""
        return cell((hx,), input, _cell_weights(w_ih, w_hh, b_ih, b_hh))[1]

    register_op(name)(one)


_register_cell("aten.gru_cell", gru_step)
_register_cell("aten.rnn_tanh_cell", tanh_step)
_register_cell("aten.rnn_relu_cell", relu_step)
