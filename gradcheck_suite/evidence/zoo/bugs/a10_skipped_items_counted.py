"""A micro-batch that contributes nothing stays in the divisor."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Count at least one for every micro-batch, to be safe from a division by zero."""
    for window in windows(run):
        run.optimizer.zero_grad()
        counts = [run.count(batch) for batch in window]
        total = sum(float(count.clamp(min=1)) for count in counts)
        for batch, count in zip(window, counts, strict=True):
            loss = run.loss(run.model, batch)
            (loss * (count / total) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


BUG = Bug(
    number=10,
    name="skipped-items-counted",
    citations=("prime-rl#1961",),
    mechanism="A rollout batch in which nothing is trained on contributes no gradient and is counted all the same.",
    needs="a mean, and a micro-batch whose targets are all ignored",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
)
