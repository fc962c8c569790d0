"""The gradients are never reset."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Backward and step, over and over."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


BUG = Bug(
    number=17,
    name="no-reset",
    citations=("discuss.pytorch.org: zero_grad forgotten",),
    mechanism="No reset at all: every window's gradient contains all earlier ones.",
    needs="2 windows, or 2 epochs",
    loop=loop,
    wanted=frozenset({"gradient/stale-window"}),
)
