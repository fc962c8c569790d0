"""Missing gradients: a parameter that contributed has none, or lacks some micro-batches."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import normal_rows, seeded
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Problem, TrainingRun


def autocast_cache(run: TrainingRun) -> None:
    """Simulate autocast's weight cache filled under no_grad: the first forward's matrices have no graph."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            before = {p: None if p.grad is None else p.grad.clone() for p in run.model.parameters()}
            part_of_window(run, batch, total).backward()
            if j == 0:
                for p, gradient in before.items():
                    p.grad = gradient if p.ndim > 1 else p.grad
        run.optimizer.step()
    torch.clear_autocast_cache()


AUTOCAST_CACHE = Bug(
    number=45,
    name="autocast-cache",
    citations=("pytorch#112583",),
    mechanism="autocast caches a weight's cast; one made under no_grad has no graph, and its weight no gradient.",
    needs="any case",
    loop=autocast_cache,
    wanted=frozenset(
        {
            "none-pattern/missing-gradient",
            "gradient/dropped-micro-batch",
            "gradient/reset-inside-window",
            "gradient/no-gradient",
        }
    ),
)


class Experts(torch.nn.Module):
    """Two experts; the sign of an item's first feature chooses one."""

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


def missing_from_the_last(run: TrainingRun) -> None:
    """Synchronise after the last micro-batch alone: a parameter that it does not reach is cleared as unused."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window[:-1]:
            part_of_window(run, batch, total).backward()
        before = {p: p.grad for p in run.model.parameters()}
        for p in run.model.parameters():
            p.grad = None
        part_of_window(run, window[-1], total).backward()
        for p, gradient in before.items():
            if p.grad is not None and gradient is not None:
                p.grad = p.grad + gradient
        run.optimizer.step()


MISSING_FROM_THE_LAST = Bug(
    number=47,
    name="missing-from-the-last",
    citations=("pytorch#69031",),
    mechanism="Gradients are reduced after the last backward; a parameter that it does not reach is taken for unused.",
    needs="a parameter that only some micro-batches reach",
    loop=missing_from_the_last,
    wanted=frozenset({"none-pattern/missing-gradient"}),
    problem=Problem(seeded(Experts), normal_rows(2), lambda model, batch: (model(batch) - 1).square().mean()),
)
