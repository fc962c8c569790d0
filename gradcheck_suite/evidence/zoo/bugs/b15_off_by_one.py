"""`i % K == 0` fires at i = 0: the first step sees one micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, TrainingRun


def loop(run: TrainingRun) -> None:
    """Step where the index is divisible."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if i % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


BUG = Bug(
    number=15,
    name="off-by-one",
    citations=("LLMs-from-scratch#299", "torchtune#1275"),
    mechanism="`i % K == 0` in place of `(i + 1) % K == 0`: steps fall one micro-batch into each window.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/first-only"}),
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)
