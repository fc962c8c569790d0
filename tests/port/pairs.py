"""Small pairs of a torch module and a JAX port, each sound and with faults that are planted by name."""

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
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A decoder of one block, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 3, WIDTH)
        self.norm, self.attention, self.last = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.zeros_(self.down.weight)  # as many do: a comparison of initial outputs sees nothing behind it

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
        weights = jax.nn.softmax(scores if fault == "missing-mask" else jnp.where(seen, scores, -1e30))
        weights = jax.lax.stop_gradient(weights) if fault == "stop-gradient" else weights
        return dense(p, "attention.out", jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def apply(p: Any, ids: Any) -> Any:
        start = 1 if fault == "index-offset" else 0
        x = p["words.weight"][ids] + p["places.weight"][start : start + ids.shape[1]]
        x = (0 if fault == "missing-term" else x) + attend(p, norm(p, "norm", x))
        hidden = jax.nn.gelu(dense(p, "up", norm(p, "last", x)), approximate=fault == "gelu-approximation")
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
