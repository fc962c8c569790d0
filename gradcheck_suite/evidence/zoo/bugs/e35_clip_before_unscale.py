"""Gradients are clipped before the loss scale is taken out of them."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

SCALE = 2.0**16
THRESHOLD = 100.0


def loop(run: TrainingRun) -> None:
    """Clip the scaled gradient at a threshold that is meant for the unscaled one, and which that never reaches."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (SCALE * part_of_window(run, batch, total)).backward()
        dense = [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        torch.nn.utils.clip_grad_norm_(dense, THRESHOLD)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(SCALE)
        run.optimizer.step()


BUG = Bug(
    number=35,
    name="clip-before-unscale",
    citations=("Lightning#9330",),
    mechanism="The scaled gradient is clipped: the threshold is off by the loss scale.",
    needs="a dense gradient above threshold / scale",
    loop=loop,
    wanted=frozenset({"gradient/not-linear"}),
)
