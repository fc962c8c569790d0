"""The loss is divided by the window's count and once more by the accumulation steps."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Normalise by the window's count, as a trainer does, and again, as a library below it does."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (part_of_window(run, batch, total) / run.accumulation_steps).backward()
        run.optimizer.step()


BUG = Bug(
    number=3,
    name="double-divide",
    citations=("accelerate#3533", "ms-swift#10116", "unsloth#3597"),
    mechanism="Two layers of the software both divide by the accumulation steps: 1/K of the right size.",
    needs="accumulation_steps of 2 or more",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
)
