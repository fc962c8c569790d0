"""Layers of which some parameters get no gradient: never used, or used by some items only.

The torch modules select rows by index, as implementations of routing do, so that a branch which no row takes is not in
the graph and its gradient is None. Every row, a position of a sequence too, is routed by itself.

Routing is a jump: a value at its edge could go one way in torch and another in JAX. Zeros are common (a relu, a
dropout), values within rounding of them as well (a normalised constant), so no edge may lie there: the branch's
threshold is not 0, and the mixture's gate has a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (1, 2)
EXPERTS = (2, 3)
THRESHOLD = 9 / 64  # exact in every dtype, bfloat16 included


class Unused(torch.nn.Linear):
    """A linear layer beside a parameter that it holds and never uses."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.spare = torch.nn.Parameter(torch.empty(out_features, in_features))


class Routed(torch.nn.Module):
    """Sends each row through one of several linear layers."""

    def __init__(self, size: int, features: int, ways: int) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(torch.nn.Linear(size, features) for _ in range(ways))
        self.size, self.features = size, features

    def send(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return (n, features) for rows (n, size) and the index of the layer that each takes, (n,)."""
        y = rows.new_zeros(len(rows), self.features)
        for way, layer in enumerate(self.ways):
            members = (chosen == way).nonzero()[:, 0]
            if len(members):
                y = y.index_add(0, members, layer(rows[members]))
        return y


class Branch(Routed):
    """One layer for rows whose first feature is above the threshold, another for the rest."""

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
    e = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    y = jnp.zeros(())
    for way in range(options["experts"]):
        y = jnp.where(chosen == way, e[..., way : way + 1] * _way(params, way, x), y)
    return y / e.sum(axis=-1, keepdims=True)


def _unused_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Unused(signal.features, options["features"])


def _branch_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Branch(signal.features, options["features"])


def _mixture_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Mixture(signal.features, options["features"], options["experts"])


def _kind(
    name: str,
    torch_module: Callable[[Signal, Options], torch.nn.Module],
    meaning: Callable[[Options, Arguments, jax.Array, Arguments], jax.Array],
    **choices: Sequence[int],
) -> LayerDefinition:
    def variants(signal: Signal) -> Sequence[Options]:
        return product(features=FEATURES, **choices) if signal.form in ("vector", "sequence") else ()

    def out(signal: Signal, options: Options) -> Signal:
        expect(signal.form in ("vector", "sequence"), name, "a vector or a sequence", signal)
        for option in ("features", *choices):
            expect(options[option] >= 1, name, f"{option} of at least 1", options[option])
        return signal.with_features(options["features"])

    return LayerDefinition(name, variants, out, torch_module, meaning, axes=1, trainable=True)


KINDS = (
    _kind("unused", _unused_module, _unused),
    _kind("branch", _branch_module, _branch),
    _kind("mixture", _mixture_module, _mixture, experts=EXPERTS),
)
