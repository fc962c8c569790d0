"""Weights cached under no_grad carry no graph into the next forward."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
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


BUG = Bug(
    number=45,
    name="autocast-cache",
    citations=("pytorch#112583",),
    mechanism="autocast caches a weight's cast; one made under no_grad has no graph, and its weight no gradient.",
    needs="nothing special",
    loop=loop,
    wanted=frozenset(
        {
            "none-pattern/missing-gradient",
            "gradient/dropped-micro-batch",
            "gradient/reset-inside-window",
            "gradient/no-gradient",
        }
    ),
)
