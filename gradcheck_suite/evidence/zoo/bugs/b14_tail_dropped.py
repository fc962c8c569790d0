"""An epoch's short last window never trains anything."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Leave windows out that are not whole."""
    for window in windows(run):
        if len(window) < run.accumulation_steps:
            continue
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


BUG = Bug(
    number=14,
    name="tail-dropped",
    citations=("transformers#22098",),
    mechanism="A data set shorter than the accumulation steps never updates anything; the end of a longer one is lost.",
    needs="a short last window",
    loop=loop,
    wanted=frozenset({"step-count/tail-dropped"}),
)
