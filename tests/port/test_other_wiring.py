"""Faults of what is done in which order, at which index, and at every step; optimizers
of another kind.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite.port.compare import judge_function
from tests.port.pairs import drawn, head, pair_of

SOURCE, TARGET = np.array([0, 1, 2, 3, 3, 0, 4, 1, 2, 4]), np.array([1, 2, 0, 2, 4, 3, 3, 0, 1, 0])


def found(made: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f.place, f.cause) for f in judge_function(lambda: made, "pair").findings]


def dense(p: Any, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def norm(p: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["norm.weight"] + p["norm.bias"]


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (torch.optim.Adam, optax.nadam),
        (torch.optim.NAdam, optax.adam),
        (torch.optim.NAdam, optax.nadam),
        (torch.optim.Adam, optax.amsgrad),
        (torch.optim.RMSprop, optax.adadelta),
    ],
)
def test_an_optimizer_of_another_kind(mine, theirs):
    made = head() | {"torch_optimizer": lambda p: mine(p, 1e-2), "jax_optimizer": theirs(1e-2)}
    assert found(made) == [("optimizer", "optimizer-kind")]


class Pooled(nn.Module):
    """A convolution whose channels are averaged, normalized and mapped, or normalized and averaged."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if self.first == "norm":
            return self.last(self.norm(x.movedim(1, -1)).mean((1, 2)))
        return self.last(
            self.norm(x.mean((2, 3)))
            if self.first == "mean"
            else F.gelu(F.avg_pool2d(x, 2)).mean((2, 3))
        )


@pytest.mark.parametrize("first", ["norm", "mean", "pool"])
def test_a_pooling_on_the_other_side_of_a_norm_or_an_activation(first):
    def apply(p: Any, x: Any) -> Any:
        x = (
            jax.lax.conv_general_dilated(x, p["conv.weight"], (1, 1), "VALID")
            + p["conv.bias"][:, None, None]
        )
        if first == "pool":
            parts = jax.nn.gelu(x, approximate=False).reshape(*x.shape[:2], 2, 2, 2, 2)
            return dense(p, "last", parts.mean((3, 5)).mean((2, 3)))
        pooled = (
            norm(p, x.mean((2, 3)))
            if first == "norm"
            else norm(p, jnp.moveaxis(x, 1, -1)).mean((1, 2))
        )
        return dense(p, "last", pooled)

    place = "norm" if first == "norm" else ""
    assert found(pair_of(Pooled(first), apply, (drawn(2, 2, 6, 6),))) == [(place, "order")]


class Edges(nn.Module):
    """Values of edges, divided by their sum at each target, and summed there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        weight = torch.exp(h[source].sum(-1))
        total = torch.zeros(len(x)).index_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        return self.last(torch.zeros_like(h).index_add(0, target, weight[:, None] * h[source]))


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [(None, ""), ("at source", "other-input"), ("read", "other-input"), ("maximum", "reduction")],
)
def test_a_graph_that_is_reduced_otherwise(fault, cause):
    def apply(p: Any, x: Any, source: Any, target: Any) -> Any:
        h = jnp.tanh(dense(p, "first", x))
        weight = jnp.exp(h[source].sum(-1))
        by = source if fault == "at source" else target
        total = jax.ops.segment_sum(weight, by, len(x))[source if fault == "read" else by]
        weight = (weight / (total + 1e-9))[:, None]
        gathered = jax.ops.segment_max if fault == "maximum" else jax.ops.segment_sum
        return dense(p, "last", gathered(weight * h[source], target, len(x)))

    inputs = (drawn(5, 3), SOURCE, TARGET)
    assert found(pair_of(Edges(), apply, inputs)) == ([("", cause)] if fault else [])


class Decayed(nn.Module):
    """A sum that decays, at each step with its correction."""

    def __init__(self, corrected: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.corrected = corrected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, state, states = self.first(x), torch.zeros(len(x), 4), []
        for i in range(x.shape[1]):
            state = 0.9 * state + 0.1 * x[:, i]
            states.append(state / (1 - 0.9 ** (i + 1)) if self.corrected else state)
        return self.last(torch.stack(states, 1))


@pytest.mark.parametrize(
    ("mine", "theirs", "decay", "cause"),
    [
        (False, False, 0.9, ""),
        (True, True, 0.9, ""),
        (False, False, 0.73, "scale"),
        (False, True, 0.9, "scale"),
        (True, False, 0.9, "missing-scale"),
    ],
)
def test_a_state_that_decays_or_is_corrected_otherwise(mine, theirs, decay, cause):
    def apply(p: Any, x: Any) -> Any:
        x = jnp.moveaxis(dense(p, "first", x), 1, 0)
        _, states = jax.lax.scan(
            lambda old, now: ((decay * old + 0.1 * now),) * 2, jnp.zeros_like(x[0]), x
        )
        states = (
            states / (1 - 0.9 ** jnp.arange(1, len(x) + 1))[:, None, None] if theirs else states
        )
        return dense(p, "last", jnp.moveaxis(states, 0, 1))

    assert found(pair_of(Decayed(mine), apply, (drawn(2, 5, 3),))) == (
        [("", cause)] if cause else []
    )


def test_the_maximum_of_two_in_place_of_the_minimum():
    """The clipped objective of PPO."""

    def loss(ratio: Any, gain: Any, of: Any, clip: Any) -> Any:
        return -of(ratio[:, 0] * gain, clip(ratio[:, 0], 0.8, 1.2) * gain).mean()

    made = head() | {
        "targets": (drawn(6),),
        "torch_loss": lambda out, gain: loss(out.exp(), gain, torch.minimum, torch.clamp),
        "jax_loss": lambda out, gain: loss(jnp.exp(out), gain, jnp.maximum, jnp.clip),
    }
    assert found(made) == [("loss", "reduction")]
