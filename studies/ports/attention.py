"""Ports of attention in its variants, and of the blocks around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from studies.ports.planted import (
    Pair,
    architecture,
    dense,
    integers,
    layer_norm,
    normal,
    pair_of,
    rms_norm,
)


class GroupedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (32, 16, 16))
        self.q_norm, self.k_norm = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)
        self.o = nn.Linear(32, 16, bias=False)

    def turn(self, x):
        at = torch.arange(x.shape[2]).double()[:, None] * 10000.0 ** (-torch.arange(2).double() / 2)
        cos, sin = at.cos().to(x.dtype), at.sin().to(x.dtype)
        a, b, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turn(self.q_norm(q)), self.turn(self.k_norm(k))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.mT) * 8**-0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, -1))


@architecture()
def grouped_queries(variant: str) -> Pair:
    def turn(x, key=False):
        t = x.shape[2]
        # positions count relative to each other: an offset shows on one side alone
        start = 1 if variant == "from_one" and key else 0
        at = (start + jnp.arange(t))[:, None] * (1e3 if variant == "base" else 1e4) ** (
            -jnp.arange(2) / 2
        )
        cos, sin = jnp.cos(at), jnp.sin(at)
        a, b, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        if variant == "interleaved":
            a, b = x[..., 0:4:2], x[..., 1:4:2]
            both = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*a.shape[:-1], 4)
            return jnp.concatenate([both, rest], -1)
        if variant == "complex":
            z = (a + 1j * b) * jnp.exp(1j * at)
            return jnp.concatenate([z.real, z.imag, rest], -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def apply(p, x):
        n, t, _ = x.shape
        q, k, v = (dense(p[name], x).reshape(n, t, -1, 8).swapaxes(1, 2) for name in "qkv")
        q_norm = lambda x: rms_norm(p["q_norm"], x, 1e-5 if variant == "query_epsilon" else 1e-6)  # noqa: E731
        one = {"weight": 1.0} if variant == "key_scale" else p["k_norm"]
        k_norm = lambda x: rms_norm(one, x)  # noqa: E731
        if variant == "turned_before_norm":
            q, k = q_norm(turn(q)), k_norm(turn(k, key=True))
        else:
            q, k = turn(q_norm(q)), turn(k_norm(k), key=True)
        scale = 32**-0.5 if variant == "width_scale" else 8**-0.5
        seen = jnp.tril(jnp.ones((t, t), bool))
        if variant == "grouped":
            scores = jnp.einsum("nghtd,ngsd->nghts", scale * q.reshape(n, 2, 2, t, 8), k)
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
            h = jnp.einsum("nghts,ngsd->ntghd", weights, v).reshape(n, t, -1)
        else:
            k = jnp.tile(k, (1, 2, 1, 1)) if variant == "tiled" else jnp.repeat(k, 2, 1)
            v = (
                jnp.tile(v, (1, 2, 1, 1))
                if variant in ("tiled", "values_tiled")
                else jnp.repeat(v, 2, 1)
            )
            scores = jnp.where(seen, q @ k.mT * scale, -jnp.inf)
            h = (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(n, t, -1)
        return dense(p["o"], h)

    return pair_of(GroupedQueries(), apply, normal(2, 5, 16))


class CrossDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(12, 3, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x, memory, padding):
        h, _ = self.attn(x, memory, memory, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + h)
        return self.norm2(x + self.down(F.relu(self.up(x))))


@architecture()
def cross_attention(variant: str) -> Pair:
    def attend(p, x, memory, padding):
        order = (0, 2, 1) if variant == "fused_order" else (0, 1, 2)
        weights, biases = jnp.split(p["in_proj_weight"], 3), jnp.split(p["in_proj_bias"], 3)
        sides = (x, memory, x if variant == "values_from_query" else memory)
        q, k, v = (s @ weights[o].T + biases[o] for s, o in zip(sides, order, strict=True))
        if variant == "heads_inner":
            q, k, v = (a.reshape(*a.shape[:2], 4, 3).swapaxes(2, 3) for a in (q, k, v))
        else:
            q, k, v = (a.reshape(*a.shape[:2], 3, 4) for a in (q, k, v))
        scores = jnp.einsum("nthd,nshd->nhts", q, k) / 2.0
        hidden = padding[:, None, None, :]
        hidden = ~hidden if variant == "polarity" else hidden
        if variant != "no_mask":
            scores = jnp.where(hidden, -1.0 if variant == "finite" else -jnp.inf, scores)
        if variant == "stable_softmax":
            e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
            attended = e / e.sum(-1, keepdims=True)
        else:
            attended = jax.nn.softmax(scores, -1)
        h = jnp.einsum("nhts,nshd->nthd", attended, v)
        if variant == "einsum":
            return (
                jnp.einsum("nthd,ohd->nto", h, p["out_proj"]["weight"].reshape(12, 3, 4))
                + p["out_proj"]["bias"]
            )
        h = h.reshape(*x.shape)
        return (
            h @ p["out_proj"]["weight"].T if variant == "no_out_bias" else dense(p["out_proj"], h)
        )

    def apply(p, x, memory, padding):
        mixed = layer_norm(p["norm1"], x + attend(p["attn"], x, memory, padding))
        h = dense(p["down"], jax.nn.relu(dense(p["up"], mixed)))
        return layer_norm(p["norm2"], (x if variant == "residual" else mixed) + h)

    padding = np.array([[False, False, False, True], [False, False, False, False]])
    if variant == "values_from_query":
        return pair_of(CrossDecoder(), apply, normal(2, 4, 12), normal(2, 4, 12, seed=1), padding)
    return pair_of(CrossDecoder(), apply, normal(2, 3, 12), normal(2, 4, 12, seed=1), padding)


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.o = nn.Embedding(17, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids):
        x = self.embed(ids) * 4.0
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
        at = torch.arange(t)
        slopes = 2.0 ** (-2.0 * torch.arange(1, 5))
        bias = slopes[:, None, None] * (at[None, :] - at[:, None])
        scores = 0.5 * (q @ k.mT) + bias.to(q.dtype)
        scores = scores.masked_fill(at[None, :] > at[:, None], torch.finfo(scores.dtype).min)
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, 16))
        return x @ self.embed.weight.T


@architecture(logits=True)
def alibi(variant: str) -> Pair:
    def apply(p, ids):
        table = p["embed"]["weight"]
        x = table[ids] * (2.0 if variant == "embedding_scale" else 4.0)
        n, t, _ = x.shape
        both = dense(p["qkv"], layer_norm(p["norm"], x))
        if variant == "head_major":
            q, k, v = (both.reshape(n, t, 4, 3, 4)[:, :, :, i].swapaxes(1, 2) for i in range(3))
        else:
            q, k, v = (part.reshape(n, t, 4, 4).swapaxes(1, 2) for part in jnp.split(both, 3, -1))
        at = jnp.arange(t)
        slopes = 2.0 ** (
            -2.0 * jnp.arange(0 if variant == "slopes" else 1, 4 if variant == "slopes" else 5)
        )
        distance = at[None, :] - at[:, None]
        if variant == "absolute_distance":
            distance = -jnp.abs(distance)
        bias = (-1 if variant == "sign" else 1) * slopes[:, None, None] * distance
        scores = 0.5 * (q @ k.mT + bias) if variant == "bias_scaled" else 0.5 * (q @ k.mT) + bias
        seen = at[None, :] < at[:, None] + (0 if variant == "diagonal" else 1)
        if variant == "diagonal":
            seen = seen.at[0, 0].set(True)
        if variant == "kernel_form":
            e = jnp.where(seen, jnp.exp(scores), 0.0)
            h = (e @ v) / e.sum(-1, keepdims=True)
        else:
            h = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ v
        x = x + dense(p["o"], h.swapaxes(1, 2).reshape(n, t, 16))
        return x @ (jax.lax.stop_gradient(table) if variant == "head_stopped" else table).T

    return pair_of(Alibi(), apply, integers(17, 2, 6))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(10, eps=1e-5),
            nn.Linear(10, 20, bias=False),
            nn.Linear(10, 20, bias=False),
            nn.Linear(20, 10, bias=False),
        )
        self.last = nn.LayerNorm(10)

    def forward(self, x):
        h = self.norm(x)
        return self.last(x + self.down(F.silu(self.gate(h)) * self.up(h)))


@architecture()
def swiglu(variant: str) -> Pair:
    def apply(p, x):
        scale = {"weight": 1 + p["norm"]["weight"]} if variant == "unit_offset" else p["norm"]
        h = rms_norm(scale, x, 1e-6 if variant == "epsilon" else 1e-5)
        if variant == "layer_norm":
            h = layer_norm({**scale, "bias": 0.0}, x)
        if variant == "fused_gate":
            both = h @ jnp.concatenate([p["gate"]["weight"], p["up"]["weight"]]).T
            gate, up = both[..., :20], both[..., 20:]
        else:
            gate, up = dense(p["gate"], h), dense(p["up"], h)
        if variant == "logistic":
            return layer_norm(p["last"], x + dense(p["down"], up * gate / (1 + jnp.exp(-gate))))
        if variant == "exchanged":
            gate, up = up, gate
        gate = jax.nn.gelu(gate, approximate=False) if variant == "gelu" else jax.nn.silu(gate)
        h = gate + up if variant == "added" else gate * up
        x = x + dense(p["down"], h)
        if variant == "last_rms":
            return rms_norm(p["last"], x, 1e-5) + p["last"]["bias"]
        return layer_norm({**p["last"], "bias": 0.0} if variant == "last_bias" else p["last"], x)

    return pair_of(Gated(), apply, normal(2, 3, 10))
