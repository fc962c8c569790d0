"""Small pairs of a torch module and a JAX port, each sound and with faults that are planted by
name.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

WIDTH, HEADS, LENGTH, WORDS = 8, 2, 5, 9


class Attention(nn.Module):
    """Causal attention with one projection of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Decoder(nn.Module):
    """A decoder of one block, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 3, WIDTH)
        self.norm, self.attention, self.last = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        # as many do: a comparison of initial outputs sees nothing behind it
        nn.init.zeros_(self.down.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.gelu(self.up(self.last(x))))
        return x @ self.words.weight.T


def load_decoder(state: dict[str, Any], fault: str = "") -> dict[str, Any]:
    p = {name: jnp.asarray(value) for name, value in state.items()}
    if fault == "weight-transposed":
        p["attention.out.weight"] = p["attention.out.weight"].T
    if fault == "not-loaded":
        p["last.bias"] = jnp.zeros(WIDTH)
    return p


def decoder(fault: str = "") -> Any:
    def norm(p: Any, name: str, x: Any) -> Any:
        eps = 1e-6 if fault == "eps" and name == "norm" else 1e-5
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def dense(p: Any, name: str, x: Any) -> Any:
        return jnp.einsum("...i,oi->...o", x, p[f"{name}.weight"]) + p[f"{name}.bias"]

    def attend(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(dense(p, "attention.qkv", x), 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
        scale = math.sqrt(WIDTH) if fault == "scale" else math.sqrt(WIDTH // HEADS)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / scale
        n = x.shape[1]
        seen = jnp.tril(jnp.ones((n, n), bool), 1 if fault == "mask-diagonal" else 0)
        weights = jax.nn.softmax(
            scores if fault == "missing-mask" else jnp.where(seen, scores, -1e30)
        )
        weights = jax.lax.stop_gradient(weights) if fault == "stop-gradient" else weights
        return dense(p, "attention.out", jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def apply(p: Any, ids: Any) -> Any:
        start = 1 if fault == "index-offset" else 0
        x = p["words.weight"][ids] + p["places.weight"][start : start + ids.shape[1]]
        x = (0 if fault == "missing-term" else x) + attend(p, norm(p, "norm", x))
        hidden = jax.nn.gelu(
            dense(p, "up", norm(p, "last", x)), approximate=fault == "gelu-approximation"
        )
        return (x + dense(p, "down", hidden)) @ p["words.weight"].T

    return apply


def decoder_pair(fault: str = "", **more: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    module, rng = Decoder(), np.random.default_rng(1)
    state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return {
        "module": module,
        "apply": decoder(fault),
        "params": load_decoder(state, fault),
        "load": lambda s: load_decoder(s, fault),
        "inputs": (rng.integers(0, WORDS, (2, LENGTH)),),
        "targets": (rng.integers(0, WORDS, (2, LENGTH)),),
        "torch_loss": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        "jax_loss": lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y).mean(),
        **more,
    }


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Load a state as it is."""
    return {name: jnp.asarray(value) for name, value in state.items()}


def pair_of(
    module: nn.Module, apply: Any, inputs: tuple[Any, ...], load: Any = arrays, **more: Any
) -> dict[str, Any]:
    """Return a pair whose parameters are loaded by a function."""
    state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return {
        "module": module,
        "apply": apply,
        "params": load(state),
        "load": load,
        "inputs": inputs,
        **more,
    }


def drawn(*shape: int) -> Any:
    """Return normal numbers in float32."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


class Images(nn.Module):
    """Convolution, batch norm, pooling, transposed convolution and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.pool, self.up, self.group = (
            nn.AvgPool2d(3, 1, 1),
            nn.ConvTranspose2d(4, 6, 3, 2),
            nn.GroupNorm(2, 6),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group(self.up(self.pool(F.relu(self.batch(self.conv(x))))))


def images(fault: str = "", **more: Any) -> dict[str, Any]:
    """Return a port of `Images` with channels last."""
    torch.manual_seed(2)

    def convolve(x: Any, kernel: Any, **how: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **how
        )

    def apply(p: Any, x: Any) -> Any:
        padding = "SAME" if fault == "padding" else [(1, 1), (1, 1)]
        x = convolve(
            x.transpose(0, 2, 3, 1),
            p["conv.weight"].transpose(2, 3, 1, 0),
            window_strides=(2, 2),
            padding=padding,
        )
        eps = 1e-3 if fault == "eps" else 1e-5
        mean, variance = p["batch.running_mean"], p["batch.running_var"]
        if fault == "batch-statistics":
            mean, variance = (x + p["conv.bias"]).mean((0, 1, 2)), x.var((0, 1, 2))
        x = (x + p["conv.bias"] - mean) / jnp.sqrt(variance + eps) * p["batch.weight"] + p[
            "batch.bias"
        ]
        pads = [(0, 0), (1, 1), (1, 1), (0, 0)]

        def summed(y: Any) -> Any:
            return jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), pads)

        x = jax.nn.relu(x)
        x = summed(x) / (summed(jnp.ones_like(x)) if fault == "average-window" else 9)
        kernel = p["up.weight"].transpose(2, 3, 0, 1)
        kernel = kernel if fault == "kernel-flipped" else kernel[::-1, ::-1]
        x = (
            convolve(x, kernel, window_strides=(1, 1), padding=[(2, 2)] * 2, lhs_dilation=(2, 2))
            + p["up.bias"]
        )
        groups = (
            x.reshape(*x.shape[:3], 3, 2)
            if fault == "group-order"
            else x.reshape(*x.shape[:3], 2, 3)
        )
        axes = (1, 2, 3) if fault == "group-order" else (1, 2, 4)
        groups = (groups - groups.mean(axes, keepdims=True)) / jnp.sqrt(
            groups.var(axes, keepdims=True) + 1e-5
        )
        return (groups.reshape(x.shape) * p["group.weight"] + p["group.bias"]).transpose(0, 3, 1, 2)

    return pair_of(Images(), apply, (drawn(2, 3, 6, 6),), **more)


class Recurrent(nn.Module):
    """A GRU over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(WORDS, 4, padding_idx=0), nn.GRU(4, 3, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gru(self.words(ids))[0]
        return out


def recurrent(fault: str = "", *, merged: bool = False, **more: Any) -> dict[str, Any]:
    """Return a port of `Recurrent`; `merged` adds up the biases of the two gates."""
    torch.manual_seed(3)

    def load(s: dict[str, Any]) -> dict[str, Any]:
        inner, outer = s["gru.bias_hh_l0"], s["gru.bias_ih_l0"]
        if merged:
            inner, outer = (
                np.where(np.arange(9) < 6, 0, inner),
                outer + np.where(np.arange(9) < 6, inner, 0),
            )
        p = {
            "words": s["words.weight"],
            "in": s["gru.weight_ih_l0"].T,
            "out": s["gru.weight_hh_l0"].T,
        }
        return arrays({**p, "outer": outer, "inner": inner[6:] if merged else inner})

    def apply(p: Any, ids: Any) -> Any:
        rows = p["words"][ids]
        rows = (
            rows
            if fault == "padding-gradient"
            else jnp.where(ids[..., None] == 0, jax.lax.stop_gradient(rows), rows)
        )
        inner = jnp.concatenate([jnp.zeros(6), p["inner"]]) if merged else p["inner"]

        def step(h: Any, x: Any) -> tuple[Any, Any]:
            a, b = x @ p["in"] + p["outer"], h @ p["out"] + inner
            r, z = jnp.split(jax.nn.sigmoid(a[:, :6] + b[:, :6]), 2, -1)
            new = a[:, 6:] + r * b[:, 6:]
            if fault == "gru-reset-gate":
                new = a[:, 6:] + (r * h) @ p["out"][:, 6:] + inner[6:]
            h = jnp.tanh(new) * (1 - z) + z * h
            return h, h

        start = jnp.zeros((ids.shape[0], 3))
        return jax.lax.scan(step, start, rows.swapaxes(0, 1))[1].swapaxes(0, 1)

    return pair_of(
        Recurrent(), apply, (np.random.default_rng(3).integers(0, WORDS, (2, 4)),), load, **more
    )


class Head(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


def head(**more: Any) -> dict[str, Any]:
    """Return a sound port of `Head`."""
    torch.manual_seed(4)

    def apply(p: Any, x: Any) -> Any:
        x = jnp.tanh(x @ p["first.weight"].T + p["first.bias"])
        return x @ p["last.weight"].T + p["last.bias"]

    return pair_of(Head(), apply, (drawn(6, 4),), **more)


def table(base: float = 1e4) -> Any:
    """Return sines and cosines of positions, (12, 4)."""
    angles = np.arange(12)[:, None] * base ** -np.array([0.0, 0.5])
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


ROUNDED = table().astype(np.float32)


class Rotary(nn.Module):
    """Attention over rotated positions, whose table is rounded to float32 and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.from_numpy(ROUNDED.copy()), persistent=False)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        sin, cos = (part[: x.shape[1]].repeat_interleave(2, -1) for part in self.table.split(2, -1))

        def turned(y: torch.Tensor) -> torch.Tensor:
            return y * cos + torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2) * sin

        scores = turned(self.q(x)) @ turned(self.k(x)).mT
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -1e30) + torch.where(seen, 0.0, -1e30)[:, None]
        return self.out(scores.softmax(-1) @ x)


def rotary(fault: str = "", *, seen: Any = None, **more: Any) -> dict[str, Any]:
    """Return a port of `Rotary` whose table is rounded to float32 in another way, and kept in
    float64.
    """
    torch.manual_seed(5)
    up = np.nextafter(ROUNDED, np.float32(2)) * (np.abs(ROUNDED) > 0) * (np.abs(ROUNDED) < 1)
    mine = np.where(up == 0, ROUNDED, up).astype(np.float64)
    mine = table(5e5) if fault == "base" else mine

    def apply(p: Any, x: Any, seen: Any) -> Any:
        n = x.shape[1]
        sin, cos = (jnp.asarray(part)[:n, None] for part in np.split(mine, 2, 1))

        def turned(y: Any) -> Any:
            a, b = jnp.split(y.reshape(*y.shape[:2], 2, 2), 2, -1)
            sines, cosines = (jnp.swapaxes(t, 1, 2) for t in (sin, cos))
            return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], -1).reshape(
                y.shape
            )

        q, k = (turned(x @ p[f"{name}.weight"].T + p[f"{name}.bias"]) for name in ("q", "k"))
        k = jax.lax.stop_gradient(k) if fault == "stop-gradient" else k
        scores = q @ k.swapaxes(1, 2)
        earlier, padding = jnp.tril(jnp.ones((n, n), bool)), jnp.where(seen, 0.0, -1e30)[:, None]
        # a row that sees nothing sees all keys alike, and with torch's two masks some
        if fault == "mask-value":
            scores = jnp.where(earlier & seen[:, None], scores, -1e30)
        else:
            scores = jnp.where(earlier, scores, -1e30) + padding
        return jax.nn.softmax(scores) @ x @ p["out.weight"].T + p["out.bias"]

    seen = np.ones((2, 9), bool) if seen is None else seen
    return pair_of(Rotary(), apply, (drawn(2, 9, 4), seen), **more)
