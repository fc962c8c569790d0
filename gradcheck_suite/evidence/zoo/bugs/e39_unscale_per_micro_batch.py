"""Gradients are unscaled at every micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

SCALE = 2.0**8


def loop(run: TrainingRun) -> None:
    """Divide the accumulated gradient by the loss scale after each backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (SCALE * part_of_window(run, batch, total)).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(SCALE)
        run.optimizer.step()


BUG = Bug(
    number=39,
    name="unscale-per-micro-batch",
    citations=("pytorch#36601",),
    mechanism="The running sum is unscaled at every micro-batch, so earlier ones are divided again and again.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)
