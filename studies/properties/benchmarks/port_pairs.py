"""Two sound ports whose judgement is timed: a small convolutional network, and GPT-2 with 12 layers of width 64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from studies.ports.planted import conv, dense, integers, layer_norm, normal, pair_of


def small() -> dict[str, Any]:
    """Return a pair of 100,000 parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16, 76), nn.GELU(), nn.Linear(76, 10),
    )  # fmt: skip

    def apply(p: Any, x: Any) -> Any:
        x = jax.nn.relu(conv(p["0"], x, 1))
        x = jax.nn.relu(conv(p["2"], x, 1, stride=2)).reshape(len(x), -1)
        return dense(p["7"], jax.nn.gelu(dense(p["5"], x), approximate=False))

    return pair_of(module, apply, normal(4, 3, 8, 8))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output of the same shape."""
        q, k, v = (a.unflatten(-1, (4, -1)).transpose(1, 2) for a in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """GPT-2 with 12 layers of width 64 and a small vocabulary."""

    def __init__(self, width: int = 64, words: int = 200, length: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h, self.ln_f = nn.Sequential(*(Block(width) for _ in range(12))), nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, length, words)."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return self.ln_f(self.h(x)) @ self.wte.weight.T


def decoder() -> dict[str, Any]:
    """Return the pair of GPT-2."""
    torch.manual_seed(0)

    def block(p: Any, x: Any) -> Any:
        n, t, width = x.shape
        parts = jnp.split(dense(p["qkv"], layer_norm(p["ln_1"], x)), 3, -1)
        q, k, v = (a.reshape(n, t, 4, -1).swapaxes(1, 2) for a in parts)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), q @ k.mT / jnp.sqrt(width // 4), -jnp.inf)
        x = x + dense(p["out"], (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(n, t, width))
        return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["ln_2"], x))))

    def apply(p: Any, ids: Any) -> Any:
        x = p["wte"]["weight"][ids] + p["wpe"]["weight"][: ids.shape[1]]
        for i in range(12):
            x = block(p["h"][str(i)], x)
        return layer_norm(p["ln_f"], x) @ p["wte"]["weight"].T

    return pair_of(Decoder(), apply, integers(200, 2, 12))
