"""Buffers of a backward: a custom `autograd.Function` overwrites a gradient that it has handed out before."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import normal_rows, train_with_sums
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun


def _mean_square(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.square().mean()


class Reusing(torch.autograd.Function):
    """x @ weight, with one buffer for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return a view of the buffer: where `.grad` is None, autograd keeps that very tensor."""
        (x,) = ctx.saved_tensors
        ctx.buffer.copy_(x.T @ grad)
        return None, ctx.buffer.detach(), None


class Static(torch.nn.Module):
    """One weight vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.buffer = torch.zeros(2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        self.buffer = self.buffer.to(self.weight.device, self.weight.dtype)
        out: torch.Tensor = Reusing.apply(x, self.weight, self.buffer)
        return out


STOLEN_BUFFER = Bug(
    number=29,
    name="stolen-buffer",
    citations=("pytorch#181723", "pytorch#96693", "TransformerEngine#2937", "torchtitan#4584"),
    mechanism="Where .grad is None, autograd keeps the tensor that backward returns; if it is a buffer that the next "
    "backward writes, the sum is overwritten. The reset mode changes the gradient.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"gradient/stolen-buffer"}),
    problem=Problem(lambda seed: Static(), normal_rows(2), _mean_square),
)


class FusedLinear(torch.autograd.Function):
    """x @ weight, whose backward writes the weight's gradient into `weight.main_grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return (n, features)."""
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Assign where it should add: right as long as a weight is used once."""
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad = x.T @ grad
        return grad @ weight.T, x.T @ grad


class Tied(torch.nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        once = FusedLinear.apply(x, self.weight)
        out: torch.Tensor = FusedLinear.apply(torch.tanh(once), self.weight)
        return out


def tied_weights_overwritten(run: TrainingRun) -> None:
    """Accumulate the gradient that the fused backward left in `main_grad`; without one, the ordinary gradient."""
    train_with_sums(run, lambda j, total, gradient: gradient if total is None else total + gradient, "main_grad")


TIED_WEIGHTS_OVERWRITTEN = Bug(
    number=30,
    name="tied-weights-overwritten",
    citations=("TransformerEngine#3437", "TransformerEngine#545"),
    mechanism="A fused backward writes the weight's gradient itself; a tied weight's second use overwrites the first.",
    needs="a weight that is used twice",
    loop=tied_weights_overwritten,
    wanted=frozenset({"gradient/not-linear"}),
    problem=Problem(lambda seed: Tied(), normal_rows(2), _mean_square),
)
