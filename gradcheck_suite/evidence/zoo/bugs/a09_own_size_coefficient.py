"""A window-level loss is scaled by each micro-batch's own size."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Weight each micro-batch's sum, which counts its items already, by its count once more."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            share = run.count(batch) / total
            loss = run.loss(run.model, batch)
            (loss * share * share if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


BUG = Bug(
    number=9,
    name="own-size-coefficient",
    citations=("open_clip#1211",),
    mechanism="A loss that is scaled for the whole window is multiplied by the micro-batch's own share of it.",
    needs="a mean, unequal counts",
    loop=loop,
    wanted=frozenset({"gradient/unrecognised-weights"}),
)
