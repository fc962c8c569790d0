"""A closure that is called several times does not reset."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

CALLS = 3


def loop(run: TrainingRun) -> None:
    """Evaluate the closure several times before the step, as a line search does, with one reset before them all."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for _ in range(CALLS):
            _closure(run, window, total)
        run.optimizer.step()


def _closure(run: TrainingRun, window: list[object], total: torch.Tensor) -> None:
    for batch in window:
        part_of_window(run, batch, total).backward()


BUG = Bug(
    number=21,
    name="closure-without-reset",
    citations=("Lightning#6147",),
    mechanism="LBFGS calls its closure up to 20 times a step; the reset stands outside of it.",
    needs="nothing special",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
)
