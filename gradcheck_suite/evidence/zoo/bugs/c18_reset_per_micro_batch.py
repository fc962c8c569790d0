"""The gradients are reset at every micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Reset inside the accumulation."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


BUG = Bug(
    number=18,
    name="reset-per-micro-batch",
    citations=("RAE#67", "openWakeWord#316", "mmf#747", "opacus#93"),
    mechanism="`zero_grad` stands inside the accumulation: only the last micro-batch's gradient survives.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/reset-inside-window"}),
)
