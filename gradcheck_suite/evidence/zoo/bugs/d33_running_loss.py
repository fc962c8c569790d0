"""The running sum of the losses goes through backward each time."""

from __future__ import annotations

from typing import Any

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Add losses up and send the sum through backward at every micro-batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        running: Any = 0.0
        for batch in window:
            running = running + part_of_window(run, batch, total)
            running.backward(retain_graph=True)
        run.optimizer.step()


BUG = Bug(
    number=33,
    name="running-loss",
    citations=("discuss.pytorch.org: backward of the total loss",),
    mechanism="`total += loss; total.backward(retain_graph=True)`: the first micro-batch counts K times.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/running-loss", "gradient/repeated-micro-batch"}),
)
