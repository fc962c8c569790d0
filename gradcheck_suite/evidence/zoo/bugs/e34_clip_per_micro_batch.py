"""The gradient's norm is clipped at every micro-batch."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Clip inside the accumulation."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            part_of_window(run, batch, total).backward()
            if j + 1 < len(window):
                dense = [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]
                torch.nn.utils.clip_grad_norm_(dense, 1.0)
        run.optimizer.step()


BUG = Bug(
    number=34,
    name="clip-per-micro-batch",
    citations=("transformers#1563", "lingua#59", "diffusers#721"),
    mechanism="The norm is clipped after each backward, not once before the step.",
    needs="a norm above the threshold before the window's end",
    loop=loop,
    wanted=frozenset({"gradient/not-linear"}),
)
