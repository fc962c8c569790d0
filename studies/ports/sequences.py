"""Ports of recurrent cells, scans, graphs, bags of embeddings and conditioned blocks."""

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
    conv,
    dense,
    group_norm,
    integers,
    layer_norm,
    normal,
    pair_of,
    rms_norm,
)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


@architecture(logits=True)
def bilstm(variant: str) -> Pair:
    def cell(p, end, carry, x):
        h, c = carry
        gates = (
            x @ p[f"weight_ih_l0{end}"].T + p[f"bias_ih_l0{end}"] + h @ p[f"weight_hh_l0{end}"].T
        )
        i, f, g, o = jnp.split(gates + p[f"bias_hh_l0{end}"], 4, -1)
        if variant == "gate_order":
            i, f, g, o = i, g, f, o
        c = jax.nn.sigmoid(f + (variant == "forget_bias")) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * (c if variant == "no_output_tanh" and end else jnp.tanh(c))
        return (h, c), h

    def run(p, end, x):
        start = (jnp.zeros((x.shape[0], 5), x.dtype),) * 2
        steps = jnp.swapaxes(x, 0, 1)
        if variant == "loop":
            outs, carry = [], start
            for step in steps:
                carry, out = cell(p, end, carry, step)
                outs.append(out)
            return jnp.stack(outs, 1)
        return jnp.swapaxes(jax.lax.scan(lambda c, s: cell(p, end, c, s), start, steps)[1], 0, 1)

    def apply(p, ids):
        x = p["embed"]["weight"][ids]
        ahead = run(p["lstm"], "", x)
        back = run(p["lstm"], "" if variant == "shared" else "_reverse", x[:, ::-1])
        back = back if variant == "backward_order" else back[:, ::-1]
        parts = [back, ahead] if variant == "directions" else [ahead, back]
        return dense(p["head"], jnp.concatenate(parts, -1))

    return pair_of(Tagger(), apply, integers(11, 2, 6))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        _, last = self.gru(x)
        return self.head(self.norm(last[-1]))


@architecture(logits=True)
def gru_stack(variant: str) -> Pair:
    def cell(p, k, h, x):
        ax = x @ p[f"weight_ih_l{k}"].T + p[f"bias_ih_l{k}"]
        w, b = p[f"weight_hh_l{k}"], p[f"bias_hh_l{k}"]
        ah = h @ w.T + b
        r, z = (jax.nn.sigmoid(ax[:, s] + ah[:, s]) for s in (slice(0, 6), slice(6, 12)))
        new = r * ah[:, 12:]
        if k == 1 and variant == "reset_before":
            new = (r * h) @ w[12:].T + b[12:]
        if k == 1 and variant == "bias_outside":
            new = r * (h @ w[12:].T) + b[12:]
        if k == 1 and variant == "no_hidden_bias":
            new = r * (h @ w[12:].T)
        n = jnp.tanh(ax[:, 12:] + new)
        if variant == "update_exchanged":
            return z * n + (1 - z) * h
        return n + z * (h - n) if variant == "fused" else (1 - z) * n + z * h

    def apply(p, x):
        g, steps, lasts = p["gru"], jnp.swapaxes(x, 0, 1), []
        for k in (0, 1):
            h, outs = jnp.zeros((x.shape[0], 6), x.dtype), []
            if variant == "unrolled":
                for step in steps:
                    h = cell(g, k, h, step)
                    outs.append(h)
                steps = jnp.stack(outs)
            else:
                h, steps = jax.lax.scan(lambda h, s: (cell(g, k, h, s),) * 2, h, steps)  # noqa: B023
            lasts.append(h)
        last = (
            lasts[0]
            if variant == "first_layer"
            else steps.mean(0)
            if variant == "mean_state"
            else lasts[1]
        )
        return dense(p["head"], layer_norm(p["norm"], last))

    return pair_of(Reader(), apply, normal(2, 5, 4))


class StateSpace(nn.Module):
    def __init__(self, width: int = 4, states: int = 3) -> None:
        super().__init__()
        self.width, self.states = width, states
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.project, self.step = nn.Linear(width, 2 * states, bias=False), nn.Linear(width, width)
        self.log_rates = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.through, self.norm = nn.Parameter(torch.ones(width)), nn.RMSNorm(width, eps=1e-6)

    def forward(self, x):
        length = x.shape[1]
        u = F.silu(self.conv(x.mT)[..., :length].mT)
        b, c = self.project(u).chunk(2, -1)
        dt, rates = F.softplus(self.step(u)), -torch.exp(self.log_rates)
        h, outs = x.new_zeros(x.shape[0], self.width, self.states), []
        for t in range(length):
            h = (
                torch.exp(dt[:, t, :, None] * rates) * h
                + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            )
            outs.append((h * c[:, t, None]).sum(-1))
        return x + self.norm(torch.stack(outs, 1) + self.through * u)


@architecture()
def state_space(variant: str) -> Pair:
    def apply(p, x):
        pads = [(1, 1)] if variant == "centred_conv" else [(2, 0)]
        u = jax.nn.silu(conv(p["conv"], x.mT, pads, groups=4).mT)
        b, c = jnp.split(dense(p["project"], u), 2, -1)
        if variant == "read_and_write":
            b, c = c, b
        dt = (jax.nn.relu if variant == "step_not_positive" else jax.nn.softplus)(
            dense(p["step"], u)
        )
        rates = -p["log_rates"] if variant == "rates_not_exponential" else -jnp.exp(p["log_rates"])
        decay = jnp.exp(dt[..., None] * rates)
        drive = (
            b[:, :, None] * u[..., None] * (1.0 if variant == "input_not_scaled" else dt[..., None])
        )
        if variant == "associative":
            merge = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])  # noqa: E731
            states = jax.lax.associative_scan(merge, (decay, drive), axis=1)[1]
            y = jnp.einsum("ntws,nts->ntw", states, c)
        else:

            def one(h, now):
                h = now[0] * h + now[1]
                return h, (h * now[2][:, None]).sum(-1)

            each = tuple(jnp.moveaxis(part, 1, 0) for part in (decay, drive, c))
            y = jnp.moveaxis(jax.lax.scan(one, jnp.zeros_like(drive[:, 0]), each)[1], 0, 1)
        y = y if variant == "no_through" else y + p["through"] * u
        return x + rms_norm(p["norm"], y, 1e-5 if variant == "epsilon" else 1e-6)

    return pair_of(StateSpace(), apply, normal(2, 6, 4))


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 4)
        self.score = nn.Linear(12, 1, bias=False)

    def forward(self, x, source, target):
        n = x.shape[0]
        h = self.first(x)
        logit = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1))[:, 0], 0.2)
        weight = torch.exp(logit)
        total = h.new_zeros(n).index_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        h = F.elu(h + torch.zeros_like(h).index_add(0, target, weight[:, None] * h[source]))
        degree = h.new_zeros(n).index_add(0, target, torch.ones_like(weight)).clamp(min=1)
        return self.second(torch.zeros_like(h).index_add(0, target, h[source]) / degree[:, None])


@architecture()
def graph_attention(variant: str) -> Pair:
    def add(target, values, n):
        if variant == "matrices":
            return (target[None] == jnp.arange(n)[:, None]).astype(values.dtype) @ values
        if variant == "segments":
            return jax.ops.segment_sum(values, target, n)
        return jnp.zeros((n, *values.shape[1:]), values.dtype).at[target].add(values)

    def apply(p, x, source, target):
        n, h = x.shape[0], dense(p["first"], x)
        parts = [h[source], h[target]]
        parts = parts[::-1] if variant == "score_order" else parts
        slope = 0.01 if variant == "slope" else 0.2
        weight = jnp.exp(
            jax.nn.leaky_relu(dense(p["score"], jnp.concatenate(parts, -1))[:, 0], slope)
        )
        by = source if variant == "normalized_at_source" else target
        weight = weight / (add(by, weight, n)[by] + 1e-9)
        gathered = add(target, weight[:, None] * h[source], n)
        h = jax.nn.elu(gathered if variant == "no_self" else h + gathered)
        counted = source if variant == "degree_of_source" else target
        degree = jnp.maximum(add(counted, jnp.ones_like(weight), n), 1)
        read, write = (target, source) if variant == "ends" else (source, target)
        h = add(write, h[read], n)
        return dense(p["second"], h if variant == "summed" else h / degree[:, None])

    source, target = np.array([0, 1, 2, 3, 3, 0, 4, 1]), np.array([1, 2, 0, 2, 4, 3, 3, 0])
    return pair_of(GraphAttention(), apply, normal(5, 3), source, target)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.norm1, self.conv1 = nn.GroupNorm(2, 4), nn.Conv2d(4, 8, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, 8, eps=1e-6), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, t):
        phases = t[:, None] * torch.exp(-np.log(10000.0) * torch.arange(4, dtype=t.dtype) / 4)
        emb = self.time(torch.cat([phases.cos(), phases.sin()], -1))
        scale, shift = emb[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))


@architecture()
def diffusion(variant: str) -> Pair:
    def norm(p, x, groups, eps):
        if variant != "groups_as_vmap":
            return group_norm(p, x, groups, eps)
        parts = x.reshape(x.shape[0], groups, -1)
        alone = lambda v: (v - v.mean()) / jnp.sqrt(jnp.mean(v * v) - jnp.mean(v) ** 2 + eps)  # noqa: E731
        whole = jax.vmap(jax.vmap(alone))(parts).reshape(x.shape)
        return whole * p["weight"][:, None, None] + p["bias"][:, None, None]

    def apply(p, x, t):
        rates = jnp.exp(-np.log(10000.0) * jnp.arange(4) / (3 if variant == "rates" else 4))
        if variant == "powers":
            rates = 1 / 10000.0 ** (jnp.arange(0, 8, 2) / 8)
        phases = t[:, None] * rates.astype(t.dtype)
        parts = [jnp.cos(phases), jnp.sin(phases)]
        h = dense(
            p["time"]["0"], jnp.concatenate(parts[::-1] if variant == "sine_first" else parts, -1)
        )
        emb = dense(p["time"]["2"], h if variant == "no_silu" else jax.nn.silu(h))[..., None, None]
        scale, shift = emb[:, :8], emb[:, 8:]
        if variant == "scale_and_shift":
            scale, shift = shift, scale
        factor = scale if variant == "scale_alone" else 1 + scale
        h = conv(p["conv1"], jax.nn.silu(norm(p["norm1"], x, 2, 1e-5)), 1)
        h = norm(p["norm2"], h, 4, 1e-5 if variant == "epsilon" else 1e-6)
        h = (h + shift) * factor if variant == "shift_before" else h * factor + shift
        return x + conv(p["conv2"], jax.nn.silu(h), 1)

    return pair_of(Denoiser(), apply, normal(2, 4, 4, 4), np.array([3.0, 250.0], np.float32))
