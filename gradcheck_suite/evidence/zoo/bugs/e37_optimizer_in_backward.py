"""The optimizer steps in the backward of every micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Step when a backward ends, to free the gradients at once."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


BUG = Bug(
    number=37,
    name="optimizer-in-backward",
    citations=("pytorch#124523",),
    mechanism="An optimizer that lives in backward hooks steps at every micro-batch: nothing is accumulated.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"step-count/step-per-micro-batch"}),
)
