"""Layers with parameters that receive no gradient: unused ones, and those of branches that no item takes.

The torch modules select rows by index, as mixture-of-experts implementations do, so a branch that no row takes is not
in the graph and its gradient is None. Every row, including every position of a sequence, is routed independently.

Routing is discontinuous: at a threshold, torch and JAX could take different branches. Inputs of exactly 0 are common
(after relu or dropout), and so are inputs within rounding of 0 (a normalized constant). The branch's threshold is
therefore not 0, and the mixture's gate has a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Implementation, LayerDefinition
from gradcheck_suite.catalogue.feature_activations import softmax
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, on, rows_to_features

FEATURES = (1, 2)
EXPERTS = (2, 3)
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
        self.size, self.features = size, features

    def send(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return (n, features) for rows (n, size) and the index of each row's linear layer, (n,)."""
        y = rows.new_zeros(len(rows), self.features)
        for way, layer in enumerate(self.ways):
            members = (chosen == way).nonzero()[:, 0]
            if len(members):
                y = y.index_add(0, members, layer(rows[members]))
        return y


class Branch(Routed):
    """One linear layer for rows whose first feature is above the threshold, another for the other rows."""

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
    probability = softmax(logits)
    y = jnp.zeros(())
    for way in range(options["experts"]):
        y = jnp.where(chosen == way, probability[..., way : way + 1] * _way(params, way, x), y)
    return y


def _unused_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Unused(signal.features, options["features"])


def _branch_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Branch(signal.features, options["features"])


def _mixture_module(signal: Signal, options: Options) -> torch.nn.Module:
    return Mixture(signal.features, options["features"], options["experts"])


def _kind(
    name: str, torch_module: Callable[[Signal, Options], torch.nn.Module], jax_apply: Implementation, **choices: Any
) -> LayerDefinition:
    variants, out = on(*ROWS, features=FEATURES, **choices), rows_to_features(name, *choices)
    return LayerDefinition(name, variants, out, torch_module, jax_apply, axes=1, trainable=True)


KINDS = (
    _kind("unused", _unused_module, _unused),
    _kind("branch", _branch_module, _branch),
    _kind("mixture", _mixture_module, _mixture, experts=EXPERTS),
)
