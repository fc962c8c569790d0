"""A summation that is right up to four summands."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

UNROLLED = 4


def loop(run: TrainingRun) -> None:
    """Add up to four gradients in one call; from the fifth on write in place of adding."""
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for j, batch in enumerate(window):
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums and j < UNROLLED else p.grad
        for p, gradient in sums.items():
            p.grad = gradient
        run.optimizer.step()


BUG = Bug(
    number=31,
    name="ignores-add-mode",
    citations=("mxnet#18499", "mxnet#17989", "mxnet#16708"),
    mechanism="An operation's sum ignores the request to add from the fifth summand on.",
    needs="5 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
    least_micro_batches=UNROLLED + 1,
)
