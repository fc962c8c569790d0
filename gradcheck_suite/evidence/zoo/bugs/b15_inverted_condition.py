"""The condition is inverted: it steps everywhere but at a window's end."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, TrainingRun


def loop(run: TrainingRun) -> None:
    """Step where `(i + 1) % K` is not 0."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if (i + 1) % run.accumulation_steps:
                run.optimizer.step()
                run.optimizer.zero_grad()


BUG = Bug(
    number=15,
    name="inverted-condition",
    citations=("accelerate#435",),
    mechanism="`if (i + 1) % K:` in place of `if (i + 1) % K == 0:`.",
    needs="any accumulation_steps but 2, or one window",
    loop=loop,
    wanted=frozenset({"step-count/never-stepped", "gradient/first-only"}),
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)
