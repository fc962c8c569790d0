"""Sound loops that round differently from the built-in ones."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.loops import BUILT_IN
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Loop, TrainingRun


def float_shares(run: TrainingRun) -> None:
    """Scale losses by Python floats."""
    for window in windows(run):
        counts = [float(run.count(batch)) for batch in window]
        for batch, count in zip(window, counts, strict=True):
            loss = run.loss(run.model, batch)
            (loss * (count / sum(counts)) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def one_backward(run: TrainingRun) -> None:
    """Add up a window's losses and run one backward."""
    for window in windows(run):
        total = window_count(run, window)
        losses: Any = sum(part_of_window(run, batch, total) for batch in window)
        losses.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def any_order(run: TrainingRun) -> None:
    """Take a window's micro-batches from the last to the first."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in reversed(window):
            part_of_window(run, batch, total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def autograd_grad(run: TrainingRun) -> None:
    """Add up what `torch.autograd.grad` returns."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        total = window_count(run, window)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for batch in window:
            loss = part_of_window(run, batch, total)
            if loss.requires_grad:
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
        for p, gradient in zip(parameters, sums, strict=True):
            p.grad = gradient
        run.optimizer.step()


def scaled_and_back(run: TrainingRun, factor: float = 3) -> None:
    """Multiply each loss by a factor and divide the gradients by it."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            (factor * part_of_window(run, batch, total)).backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(factor)
        run.optimizer.step()
        run.optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    **BUILT_IN,
    "float_shares": float_shares,
    "one_backward": one_backward,
    "any_order": any_order,
    "autograd_grad": autograd_grad,
    "scaled_and_back": scaled_and_back,
}
"""The sound loops that the campaign judges."""
