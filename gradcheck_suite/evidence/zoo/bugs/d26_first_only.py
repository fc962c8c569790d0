"""Only the window's first micro-batch is sent through backward."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Take the gradient of a window from its first micro-batch, as with a flag that is never set again."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total, first = window_count(run, window), True
        for batch in window:
            part = part_of_window(run, batch, total)
            if first:
                part.backward()
            first = False
        run.optimizer.step()


BUG = Bug(
    number=26,
    name="first-only",
    citations=("Megatron-LM#7186", "Primus#1046"),
    mechanism="A flag that marks a window's first micro-batch keeps the later ones out of the main gradient.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/first-only"}),
)
