"""A short last window is divided by the accumulation steps all the same."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, TrainingRun


def loop(run: TrainingRun) -> None:
    """Divide by accumulation_steps; step at a window's end and at the epoch's."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                run.optimizer.step()
                run.optimizer.zero_grad()


BUG = Bug(
    number=12,
    name="tail-divided-by-steps",
    citations=("transformers#39659", "ms-swift#10084", "Lightning#19987"),
    mechanism="The last window of an epoch has r < K micro-batches and is divided by K: scaled r/K.",
    needs="a short last window",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)
