"""A backward hands out a buffer that it uses again."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.contract import Batch, Problem


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
        """Return a view of the buffer: with .grad None, autograd takes it and keeps it."""
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
        buffer = self.buffer.to(self.weight.device, self.weight.dtype)
        self.buffer = buffer
        out: torch.Tensor = Reusing.apply(x, self.weight, buffer)
        return out


def _batch(items: int, seed: int) -> Batch:
    return torch.randn(items, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BUG = Bug(
    number=29,
    name="stolen-buffer",
    citations=("pytorch#181723", "pytorch#96693", "TransformerEngine#2937", "torchtitan#4584"),
    mechanism="With .grad None autograd takes the tensor that backward returns; a buffer that the next backward writes "
    "is overwritten together with the sum. The reset mode changes the gradient.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"gradient/stolen-buffer"}),
    problem=Problem(lambda seed: Static(), _batch, lambda model, batch: model(batch).square().mean()),
)
