"""The count is that of another number of micro-batches than are accumulated."""

from __future__ import annotations

from itertools import islice

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, TrainingRun


def loop(run: TrainingRun) -> None:
    """Count the targets of a generation batch, which is one micro-batch longer than a window."""
    batches: list[Batch] = list(run.loader)
    seen = 0
    for window in windows(run):
        run.optimizer.zero_grad()
        first = seen % len(batches)
        counted = list(islice(batches, first, first + len(window) + 1))
        seen += len(window)
        for batch in window:
            part_of_window(run, batch, window_count(run, counted)).backward()
        run.optimizer.step()


BUG = Bug(
    number=5,
    name="wrong-window-count",
    citations=("trl#6024",),
    mechanism="The token count covers another number of batches than are accumulated before the step.",
    needs="a mean, and 2 windows",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
)
