"""Faults beside those of the zoo, each as an ordinary training loop somebody could have written.

Apart from its one fault every loop is sound: the others would hide it. `WANTED` says what verifying each must find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradcheck_suite import TrainingRun

WANTED: dict[Any, frozenset[str]] = {}
"""Loop -> what it may be found as, `kind/diagnosis`: several where a small window shows two faults alike."""


def _shows(*findings: str):
    def note(loop):
        WANTED[loop] = frozenset(findings)
        return loop

    return note


def _windows(run: TrainingRun) -> Iterator[list[Any]]:
    for _ in range(run.epochs):
        window = []
        for batch in run.loader:
            window.append(batch)
            if len(window) == run.accumulation_steps:
                yield window
                window = []
        if window:
            yield window


def _total(run: TrainingRun, window: list[Any]) -> Any:
    return sum(run.count(batch) for batch in window)


def _share(run: TrainingRun, batch: Any, total: Any) -> torch.Tensor:
    loss = run.loss(run.model, batch)
    return loss * run.count(batch) / total if run.reduction == "mean" else loss


# Resets


@_shows("gradient/stale-window")
def no_reset(run: TrainingRun) -> None:
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        run.optimizer.step()


@_shows("none-pattern/missing-gradient")
def reset_between_backward_and_step(run: TrainingRun) -> None:
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        run.optimizer.zero_grad()
        run.optimizer.step()


@_shows("gradient/no-gradient")
def zeroed_between_backward_and_step(run: TrainingRun) -> None:
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        run.optimizer.zero_grad(set_to_none=False)
        run.optimizer.step()


@_shows("gradient/stale-window")
def reset_once_per_epoch(run: TrainingRun) -> None:
    batches_per_epoch = len(run.loader)
    seen = 0
    for window in _windows(run):
        if seen % batches_per_epoch == 0:
            run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
            seen += 1
        run.optimizer.step()


# Denominators


@_shows("gradient/mean-of-means")
def mean_of_means(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss / len(window) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


@_shows("gradient/mean-of-means", "gradient/wrong-scale")
def mean_divided_by_steps(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def no_divide(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def sum_divided_by_count(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss * run.count(batch) / total if run.reduction == "mean" else loss / total).backward()
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def count_of_the_window_before(run: TrainingRun) -> None:
    before = None
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total if before is None else before).backward()
        before = total
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def count_of_the_epoch(run: TrainingRun) -> None:
    total = sum(run.count(batch) for batch in run.loader)
    for window in _windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            _share(run, batch, total).backward()
        run.optimizer.step()


@_shows("gradient/rounded-weights")
def weights_in_float32(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            loss = run.loss(run.model, batch)
            if run.reduction == "mean":
                loss = loss * (run.count(batch) / total).float()
            loss.backward()
        run.optimizer.step()


# Window boundaries


@_shows("step-count/tail-dropped")
def tail_dropped(run: TrainingRun) -> None:
    for window in _windows(run):
        if len(window) < run.accumulation_steps:
            continue
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        run.optimizer.step()


@_shows("step-count/windows-across-epochs")
def counter_runs_over_epochs(run: TrainingRun) -> None:
    seen = 0
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
            seen += 1
            if seen % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


@_shows("step-count/step-per-micro-batch")
def step_per_micro_batch(run: TrainingRun) -> None:
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
            run.optimizer.step()
        run.optimizer.zero_grad()


@_shows("step-count/never-stepped")
def optimizer_of_its_own(run: TrainingRun) -> None:
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for window in _windows(run):
        optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        optimizer.step()


@_shows("parameters/parameter-drift")
def updates_by_hand_as_well(run: TrainingRun) -> None:
    gradients = []
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        gradients.append([p.grad for p in run.model.parameters()])
        run.optimizer.step()
    with torch.no_grad():
        for p, gradient in zip(run.model.parameters(), gradients[-1], strict=True):
            if gradient is not None:
                p.sub_(0.1 * gradient.to_dense())


# The accumulator


@_shows("gradient/dropped-micro-batch")
def middle_dropped(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for j, batch in enumerate(window):
            if j != 1 or len(window) < 3:
                _share(run, batch, total).backward()
        run.optimizer.step()


@_shows("gradient/repeated-micro-batch")
def last_repeated(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        repeated = [*window, window[-1]] if len(window) > 1 else window
        for batch in repeated:
            _share(run, batch, total).backward()
        run.optimizer.step()


# What is not linear


@_shows("gradient/not-linear")
def clip_per_micro_batch(run: TrainingRun) -> None:
    for window in _windows(run):
        run.optimizer.zero_grad()
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.1)
        run.optimizer.step()


@_shows("non-finite/not-linear")
def nan_in_the_accumulator(run: TrainingRun) -> None:
    for window in _windows(run):
        total = _total(run, window)
        for batch in window:
            _share(run, batch, total).backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(len(window) - 1)
                p.grad.mul_(len(window) - 1)
        run.optimizer.step()
        run.optimizer.zero_grad()
