"""Correct loops in the forms that people write; some state assumptions. `verify` must find that each holds."""

from __future__ import annotations

from typing import Any

from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import (
    EQUAL_MICRO_BATCHES,
    SUM_REDUCTION,
    WHOLE_WINDOWS,
    Loop,
    TrainingRun,
    training_loop,
)


def plain(run: TrainingRun) -> None:
    """Keep the window, reset, accumulate each micro-batch's share of the window's mean, step."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = sum(run.count(batch) for batch in window)
        for batch in window:
            loss = run.loss(run.model, batch)
            if run.reduction == "mean":
                loss = loss * run.count(batch) / total
            loss.backward()
        run.optimizer.step()


def rescale_at_the_end(run: TrainingRun) -> None:
    """Accumulate summed losses, then divide the gradients by the window's count."""
    for window in windows(run):
        total: Any = 0
        for batch in window:
            count = run.count(batch)
            loss = run.loss(run.model, batch)
            (loss * count if run.reduction == "mean" else loss).backward()
            total = total + count
        if run.reduction == "mean":
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(total)
        run.optimizer.step()
        run.optimizer.zero_grad()


@training_loop(assumes=(SUM_REDUCTION,))
def summed(run: TrainingRun) -> None:
    """Add up summed losses with no division at all. Assumes a sum over items."""
    for window in windows(run):
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@training_loop(assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS))
def divide_by_steps(run: TrainingRun) -> None:
    """Divide each mean by the accumulation steps. Assumes equal counts and whole windows."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if (i + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


SOUND: dict[str, Loop] = {
    "plain": plain,
    "rescale_at_the_end": rescale_at_the_end,
    "summed": summed,
    "divide_by_steps": divide_by_steps,
}
