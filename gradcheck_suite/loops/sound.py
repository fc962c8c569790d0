"""Correct loops in the forms that people write; some state assumptions. `verify` must find that each holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import (
    EQUAL_MICRO_BATCHES,
    SUM_REDUCTION,
    WHOLE_WINDOWS,
    Batch,
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


def closure(run: TrainingRun) -> None:
    """Pass each step a closure that resets, accumulates the window and returns its loss, as L-BFGS needs."""
    for window in windows(run):
        total = window_count(run, window)

        def loss_of_window(window: list[Batch], total: torch.Tensor) -> float:
            run.optimizer.zero_grad()
            parts = [part_of_window(run, batch, total) for batch in window]
            for part in parts:
                part.backward()
            return sum(float(part.detach()) for part in parts)

        run.optimizer.step(partial(loss_of_window, window, total))


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
    "closure": closure,
    "summed": summed,
    "divide_by_steps": divide_by_steps,
}
