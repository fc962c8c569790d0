"""Faults beside those of the zoo, each as an ordinary training loop somebody could have written.

Apart from its one fault every loop is sound: the others would hide it. `WANTED` says what verifying each must find.
"""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite import TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import gradients_of, train_with_weights, window_losses

WANTED: dict[Any, frozenset[str]] = {}
"""Loop -> the diagnoses it may get, `kind/diagnosis`: several where a small window shows two faults alike."""


def _shows(*findings: str):
    def note(loop):
        WANTED[loop] = frozenset(findings)
        return loop

    return note


# Resets


@_shows("none-pattern/no-gradient")
def reset_between_backward_and_step(run: TrainingRun) -> None:
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.zero_grad()
        run.optimizer.step()


@_shows("gradient/no-gradient")
def zeroed_between_backward_and_step(run: TrainingRun) -> None:
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.zero_grad(set_to_none=False)
        run.optimizer.step()


@_shows("gradient/stale-window")
def reset_once_per_epoch(run: TrainingRun) -> None:
    seen = 0
    for window in windows(run):
        if seen % len(run.loader) == 0:
            run.optimizer.zero_grad()
        backward_window(run, window)
        seen += len(window)
        run.optimizer.step()


# Denominators


@_shows("gradient/wrong-scale")
def sum_divided_by_count(run: TrainingRun) -> None:
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part = part_of_window(run, batch, total)
            (part if run.reduction == "mean" else part / total).backward()
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def count_of_the_window_before(run: TrainingRun) -> None:
    before = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total if before is None else before).backward()
        before = total
        run.optimizer.step()


@_shows("gradient/wrong-scale")
def count_of_the_epoch(run: TrainingRun) -> None:
    total = window_count(run, list(run.loader))
    train_with_weights(run, lambda window, batch: run.count(batch) / total)


@_shows("gradient/low-precision")
def weights_in_float32(run: TrainingRun) -> None:
    train_with_weights(run, lambda window, batch: (run.count(batch) / window_count(run, window)).float())


# Window boundaries


@_shows("step-count/wrong-windows")
def counter_runs_over_epochs(run: TrainingRun) -> None:
    seen = 0
    for window in windows(run):
        for loss in window_losses(run, window):
            loss.backward()
            seen += 1
            if seen % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


@_shows("step-count/step-per-micro-batch")
def step_per_micro_batch(run: TrainingRun) -> None:
    for window in windows(run):
        for loss in window_losses(run, window):
            loss.backward()
            run.optimizer.step()
        run.optimizer.zero_grad()


@_shows("step-count/never-stepped")
def optimizer_of_its_own(run: TrainingRun) -> None:
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for window in windows(run):
        optimizer.zero_grad()
        backward_window(run, window)
        optimizer.step()


@_shows("parameters/parameter-drift")
def updates_by_hand_as_well(run: TrainingRun) -> None:
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        gradients = gradients_of(run)
        run.optimizer.step()
    with torch.no_grad():
        for p, gradient in gradients.items():
            p.sub_(0.1 * gradient.to_dense())


# What is not linear


@_shows("non-finite/not-linear")
def nan_in_the_accumulator(run: TrainingRun) -> None:
    for window in windows(run):
        backward_window(run, window)
        for gradient in gradients_of(run).values():
            gradient.div_(len(window) - 1).mul_(len(window) - 1)
        run.optimizer.step()
        run.optimizer.zero_grad()
