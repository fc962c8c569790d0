"""The second use of a tied weight overwrites the first one's gradient."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun


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


def _batch(items: int, seed: int) -> Batch:
    return torch.randn(items, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(run: TrainingRun) -> None:
    """Accumulate what the fused backward left in main_grad; without one, the gradient itself."""
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                found = getattr(p, "main_grad", p.grad)
                if found is not None:
                    sums[p] = sums[p] + found if p in sums else found
        for p, gradient in sums.items():
            p.grad = gradient
        run.optimizer.step()


BUG = Bug(
    number=30,
    name="tied-weights-overwritten",
    citations=("TransformerEngine#3437", "TransformerEngine#545"),
    mechanism="A fused backward writes the weight's gradient itself; a tied weight's second use overwrites the first.",
    needs="a weight that is used twice",
    loop=loop,
    wanted=frozenset({"gradient/not-linear"}),
    problem=Problem(lambda seed: Tied(), _batch, lambda model, batch: model(batch).square().mean()),
)
