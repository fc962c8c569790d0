"""Weight decay is added at every micro-batch."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

DECAY = 0.01


def loop(run: TrainingRun) -> None:
    """Add the decay to the gradient where each backward ends; the optimizer has its own as well."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            with torch.no_grad():
                for p in run.model.parameters():
                    if p.grad is not None and not p.grad.is_sparse:
                        p.grad.add_(p, alpha=DECAY)
        run.optimizer.step()


BUG = Bug(
    number=36,
    name="decay-per-micro-batch",
    citations=("keras#19990",),
    mechanism="What belongs to a step, weight decay here, is done per micro-batch, into the gradient.",
    needs="nothing special",
    loop=loop,
    wanted=frozenset({"gradient/not-linear"}),
)
