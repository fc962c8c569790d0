"""Means over tokens are weighted by sentences."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Weight each micro-batch's mean over targets by its number of items."""
    for window in windows(run):
        run.optimizer.zero_grad()
        items = [len(batch["x"]) for batch in window]
        for batch, n in zip(window, items, strict=True):
            loss = run.loss(run.model, batch)
            (loss * n / sum(items) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


BUG = Bug(
    number=11,
    name="sentences-for-tokens",
    citations=("OpenNMT-py#526",),
    mechanism="The loss is a mean over tokens, and the micro-batches are weighted by sentences: the wrong unit.",
    needs="a mean whose count is not the number of items",
    loop=loop,
    wanted=frozenset({"gradient/wrong-count"}),
)
