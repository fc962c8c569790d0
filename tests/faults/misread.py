"""Faulty loops that used to get a misleading name: each must get a right name or a general one.

`RIGHT` says which names are right. A general name says that the weights or the steps are wrong, and
shows the numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from gradcheck_suite import TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import train_with_sums, train_with_weights

RIGHT: dict[Any, frozenset[str]] = {}
"""Loop -> the right names, `kind/name`."""


def _right(*names: str):
    def note(loop):
        RIGHT[loop] = frozenset(names)
        return loop

    return note


def _own_share(run: TrainingRun, window: list[Any], batch: Any) -> float:
    return float(run.count(batch) / window_count(run, window))


@_right("gradient/wrong-count")
def share_is_capped(run: TrainingRun) -> None:
    """A micro-batch's share of the window is 0.4 at most."""
    train_with_weights(run, lambda window, batch: min(_own_share(run, window, batch), 0.4))


@_right("gradient/wrong-scale", "gradient/wrong-count")
def coefficients_of_the_first_window(run: TrainingRun) -> None:
    """The shares of the first window's micro-batches are kept for all windows."""
    kept: list[float] = []

    def share(window: list[Any], batch: Any) -> float:
        kept[:] = kept or [_own_share(run, window, each) for each in window]
        return kept[[each is batch for each in window].index(True)]

    train_with_weights(run, share)


@_right("gradient/wrong-scale", "gradient/wrong-count")
def counts_memoised(run: TrainingRun) -> None:
    """A batch's count is looked up under its place in the window, which another window's batch had
    before.
    """
    known: dict[int, float] = {}

    def share(window: list[Any], batch: Any) -> float:
        total = sum(
            known.setdefault(place, float(run.count(each))) for place, each in enumerate(window)
        )
        return run.count(batch) / (total or 1.0)

    train_with_weights(run, share)


def _step(run: TrainingRun, window: list[Any]) -> None:
    backward_window(run, window)
    run.optimizer.step()
    run.optimizer.zero_grad()


@_right("gradient/wrong-windows", "gradient/other-window", "gradient/repeated-micro-batch")
def tail_filled_from_the_start(run: TrainingRun) -> None:
    """A short last window takes further micro-batches from the start of the loader."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches), k):
            _step(run, (batches * (k + 1))[first : first + k])


@_right("gradient/dropped-micro-batch", "gradient/wrong-windows", "step-count/wrong-windows")
def one_micro_batch_too_many_is_taken(run: TrainingRun) -> None:
    """Each window takes one micro-batch more from the loader to see that it ends, and drops it."""
    for _ in range(run.epochs):
        batches, taken = list(run.loader), run.accumulation_steps + 1
        for first in range(0, len(batches), taken):
            _step(run, batches[first : first + taken - 1])


@_right("gradient/low-precision", "gradient/other-parameters")
def float32_copies_from_the_second_on(run: TrainingRun) -> None:
    """From a window's second micro-batch on, the forward runs on copies of the parameters in
    float32.
    """
    for window in windows(run):
        total = window_count(run, window)
        for place, batch in enumerate(window):
            if not place:
                part_of_window(run, batch, total).backward()
                continue
            model = copy.deepcopy(run.model)
            for p in model.parameters():
                p.data, p.grad = p.data.float().to(p.dtype), None
            loss = run.loss(model, batch)
            (loss if run.reduction == "sum" else loss * (run.count(batch) / total)).backward()
            for own, other in zip(run.model.parameters(), model.parameters(), strict=True):
                if other.grad is not None and own.requires_grad:
                    own.grad = other.grad if own.grad is None else own.grad + other.grad
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/low-precision", "non-finite/low-precision")
def float16_late_in_the_window(run: TrainingRun) -> None:
    """The gradients of a window's later micro-batches go through float16."""

    def add(place: int, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient.to_dense()
        return own if total is None else total + own.half().to(own.dtype)

    train_with_sums(run, add)
