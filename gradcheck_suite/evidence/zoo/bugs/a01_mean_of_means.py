"""Each micro-batch's mean weighs the same, whatever its count."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Divide each mean by the number of micro-batches in the window."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss / len(window) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


BUG = Bug(
    number=1,
    name="mean-of-means",
    citations=("transformers#24725", "transformers#34191", "torchtune#1875", "nanochat#59", "mlx-lm#1413"),
    mechanism="Each micro-batch's loss is a mean over its own targets, and the means are averaged.",
    needs="unequal counts in one window",
    loop=loop,
    wanted=frozenset({"gradient/mean-of-means"}),
)
