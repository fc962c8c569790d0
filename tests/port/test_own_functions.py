"""A `torch.autograd.Function` has the author's backward, and so must its port."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.port.compare import judge_function
from tests.port.pairs import drawn, pair_of


def dense(p: Any, x: Any, name: str) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


class Reversal(torch.autograd.Function):
    """Turns the gradient round, as domain-adversarial networks do."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -0.5 * g


class Rounding(torch.autograd.Function):
    """Rounds, with the gradient of a clamp."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 0.5)


class Gated(torch.autograd.Function):
    """Two results and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, slope: float) -> Any:
        gate = torch.sigmoid(slope * x)
        ctx.save_for_backward(x, gate)
        ctx.slope = slope
        return x * gate, gate

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        x, gate = ctx.saved_tensors
        slope = ctx.slope * gate * (1 - gate)
        return g * (gate + x * slope) + h * slope, None


kept_before = Rounding.apply  # as most authors keep it


class Model(nn.Module):
    """A function between two layers."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
        self._between = between

    def forward(self, x: Any) -> Any:
        return self.b(self._between(self.a(x)))


def custom(forward: Any, backward: Any) -> Any:
    made = jax.custom_vjp(forward)
    made.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return made


def gated(slope: float) -> Any:
    def between(x: Any) -> Any:
        gate = jax.nn.sigmoid(slope * x)
        return x * gate + gate

    return between


def reversal(x: Any) -> Any:
    return Reversal.apply(x)


def rounded(x: Any) -> Any:
    return kept_before(x)


def two(x: Any) -> Any:
    return sum(Gated.apply(x, 1.7))


def again(x: Any) -> Any:
    return checkpoint(torch.tanh, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        (reversal, custom(lambda x: x, lambda x, g: -0.5 * g), []),
        (reversal, lambda x: x, [("gradient", "missing-custom-gradient")]),
        (rounded, custom(lambda x: jnp.round(x), lambda x, g: g * (jnp.abs(x) < 0.5)), []),
        (rounded, jnp.round, [("gradient", "missing-custom-gradient")]),
        (two, gated(1.7), []),
        (two, gated(1.0), [("forward", "missing-scale")]),
        (again, jnp.tanh, []),
    ],
)
def test_the_gradient_of_a_function_is_that_of_its_backward(mine, theirs, found):
    torch.manual_seed(0)

    def apply(p: Any, x: Any) -> Any:
        return dense(p, theirs(dense(p, x, "a")), "b")

    result = judge_function(lambda: pair_of(Model(mine), apply, (drawn(3, 4),)), "pair")
    assert [(f.kind, f.cause) for f in result.differences] == found, str(result)


def test_torch_is_left_as_it_was():
    judge_function(
        lambda: pair_of(
            Model(reversal), lambda p, x: dense(p, dense(p, x, "a"), "b"), (drawn(3, 4),)
        ),
        "pair",
    )
    assert "apply" not in vars(_SingleLevelFunction)
