"""The loops that the three sources print, as training loops of this suite, and what each relies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Loop, TrainingRun


def plain_reset_last(run: TrainingRun) -> None:
    """1a: one reset before training; then forward, backward, step, reset."""
    run.optimizer.zero_grad()
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def accumulate_over_steps(run: TrainingRun) -> None:
    """1b: loss over accumulation_steps; step and reset after that many micro-batches of the epoch."""
    run.optimizer.zero_grad()
    for _ in range(run.epochs):
        for step_idx, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch) / run.accumulation_steps
            loss.backward()
            if (step_idx + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


def three_iterations(run: TrainingRun) -> None:
    """2a: three iterations without a reset."""
    for batch in islice(run.loader, 3):
        run.loss(run.model, batch).backward()
        run.optimizer.step()


def reset_first(run: TrainingRun) -> None:
    """2b: optimizer.zero_grad() first in each iteration."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.optimizer.zero_grad()
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def zero_by_hand(run: TrainingRun) -> None:
    """2c: p.grad.zero_() for each parameter whose gradient is not None."""
    for _ in range(run.epochs):
        for batch in run.loader:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def reset_forward_backward_step(run: TrainingRun) -> None:
    """3a: zero_grad, forward, backward, step."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.optimizer.zero_grad()
            loss = run.loss(run.model, batch)
            loss.backward()
            run.optimizer.step()


def never_reset(run: TrainingRun) -> None:
    """3b: forward, backward, step, and no zero_grad."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def accumulate_and_divide(run: TrainingRun) -> None:
    """3c: loss over the number of steps; step and reset when (i + 1) % steps == 0."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            loss = loss / run.accumulation_steps
            loss.backward()
            if (i + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


@dataclass(frozen=True)
class PrintedLoop:
    """A loop as a source prints it.

    Attributes:
        number: the loop's number, such as `"1b"`.
        loop: the loop; `run.accumulation_steps` replaces the 4 that the source prints.
        assumes: assumptions under which `verify` finds that it holds.
        plan: further limits of the drawn plans, as arguments of `plans`.
        needs: the assumptions and limits in words; None where the loop holds without any.
    """

    number: str
    loop: Loop
    assumes: tuple[str, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


_NO_ACCUMULATION = {"max_accumulation_steps": 1}
_EVERY_STEP = "accumulation_steps = 1: it steps at every micro-batch"
_EQUAL = "a mean over equal micro-batches, whole windows"

PRINTED = (
    PrintedLoop("1a", plain_reset_last, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("1b", accumulate_over_steps, (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), needs=_EQUAL),
    PrintedLoop(
        "2a",
        three_iterations,
        plan={"max_accumulation_steps": 1, "max_windows": 1, "max_epochs": 1},
        needs="a single step: from the second on, earlier gradients are still there",
    ),
    PrintedLoop("2b", reset_first, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("2c", zero_by_hand, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("3a", reset_forward_backward_step, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop(
        "3b",
        never_reset,
        plan={"max_accumulation_steps": 1, "max_windows": 1, "max_epochs": 1},
        needs="a single step: from the second on, earlier gradients are still there",
    ),
    PrintedLoop("3c", accumulate_and_divide, (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), needs=_EQUAL),
)
