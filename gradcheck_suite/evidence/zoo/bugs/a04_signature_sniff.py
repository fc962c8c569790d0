"""The division is left to a model whose signature seems to take a count, and which ignores it."""

from __future__ import annotations

import inspect

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, TrainingRun


def _loss(run: TrainingRun, batch: object, **kwargs: object) -> object:
    """Take any keyword, and ignore the count among them."""
    return run.loss(run.model, batch)


def loop(run: TrainingRun) -> None:
    """Skip the division where the loss accepts keywords: it is trusted to normalise by the count it is handed."""
    takes_count = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(_loss).parameters.values())
    for window in windows(run):
        run.optimizer.zero_grad()
        items = sum(float(run.count(batch)) for batch in window)
        for batch in window:
            loss = _loss(run, batch, num_items_in_batch=items)
            if run.reduction == "mean" and not takes_count:
                loss = loss / len(window)  # type: ignore[operator]
            loss.backward()  # type: ignore[attr-defined]
        run.optimizer.step()


BUG = Bug(
    number=4,
    name="signature-sniff",
    citations=("transformers#47688",),
    mechanism="A trainer skips its division because the model's head accepts **kwargs; the head ignores the count.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)
