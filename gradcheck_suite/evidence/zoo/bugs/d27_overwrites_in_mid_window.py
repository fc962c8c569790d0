"""A partition's gradient is overwritten in the middle of a window."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Keep sums in a buffer whose second entry is written, not added."""
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for j, batch in enumerate(window):
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    sums[p] = p.grad if j == 1 or p not in sums else sums[p] + p.grad
        for p, gradient in sums.items():
            p.grad = gradient
        run.optimizer.step()


BUG = Bug(
    number=27,
    name="overwrites-in-mid-window",
    citations=("DeepSpeed#6550",),
    mechanism="In mid-window the averaged gradient is copied over the running one: what came before is lost.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
)
