"""A parameter that the last micro-batch does not reach loses its gradient."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun


class Experts(torch.nn.Module):
    """Two experts; an item goes to the one that the sign of its first feature names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        out = x.new_zeros(len(x))
        for index, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(index)
            if chosen.any():
                out = out.masked_scatter(chosen, expert(x[chosen]))
        return out


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Experts()


def _batch(items: int, seed: int) -> Batch:
    return torch.randn(items, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(run: TrainingRun) -> None:
    """Synchronise after the last micro-batch alone: what it does not reach counts as unused and is cleared."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            before = {p: p.grad for p in run.model.parameters()}
            last = j + 1 == len(window)
            if last:
                for p in run.model.parameters():
                    p.grad = None
            part_of_window(run, batch, total).backward()
            if last:
                for p, gradient in before.items():
                    if p.grad is not None and gradient is not None:
                        p.grad = p.grad + gradient
        run.optimizer.step()


BUG = Bug(
    number=47,
    name="missing-from-the-last",
    citations=("pytorch#69031",),
    mechanism="Gradients are reduced after the last backward; a parameter it does not reach is taken for unused.",
    needs="a parameter that only some micro-batches reach",
    loop=loop,
    wanted=frozenset({"none-pattern/missing-gradient"}),
    problem=Problem(_model, _batch, lambda model, batch: (model(batch) - 1).square().mean()),
)
