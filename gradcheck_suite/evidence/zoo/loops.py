"""What the loops and Problems of several bugs share: weighted losses, sums kept outside of `.grad`, seeded data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, TrainingRun


def train_with_weights(run: TrainingRun, weight: Callable[[list[Batch], Batch], Any]) -> None:
    """Train with `weight(window, batch)` times the mean loss of every micro-batch; a sum stays as it is.

    Only the weight can be wrong: the loop resets, accumulates and steps as it should.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss * weight(window, batch) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


def train_with_sums(
    run: TrainingRun, add: Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor], gradient: str = "grad"
) -> None:
    """Train with sums that are kept outside of `.grad`, which holds the gradient of one micro-batch at a time.

    Args:
        run: the training run.
        add: of a micro-batch's index in its window, the sum so far (None before the first) and the micro-batch's
            gradient: the new sum.
        gradient: the parameters' attribute that holds the gradient after a backward, `.grad` where there is none.
    """
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for j, batch in enumerate(window):
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                found = getattr(p, gradient, p.grad)
                if found is not None:
                    sums[p] = add(j, sums.get(p), found)
        for p, found in sums.items():
            p.grad = found.to(p.dtype)
        run.optimizer.step()


def dense(run: TrainingRun) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient which is not sparse."""
    return [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[int], torch.nn.Module]:
    """Return the `model` of a Problem: a fresh module whose weights are drawn from the seed."""

    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return make()

    return model


def normal_rows(features: int) -> Callable[[int, int], Batch]:
    """Return the `batch` of a Problem: (items, features) float64, drawn from the standard normal distribution."""
    return lambda items, seed: torch.randn(
        items, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


Gradients = dict[torch.nn.Parameter, torch.Tensor]


def window_gradients(run: TrainingRun, window: list[Batch]) -> Gradients:
    """Return the right gradient of a window, of the parameters that it reaches; `.grad` is None afterwards."""
    run.optimizer.zero_grad()
    backward_window(run, window)
    found = {p: p.grad.to_dense() for p in run.model.parameters() if p.grad is not None}
    run.optimizer.zero_grad()
    return found


def step_with(run: TrainingRun, gradients: Gradients) -> None:
    """Step with these gradients: zeros where a parameter has none."""
    for p in run.model.parameters():
        if p.requires_grad:
            p.grad = gradients[p].clone() if p in gradients else torch.zeros_like(p)
    run.optimizer.step()


def train_with_the_gradients_before(
    run: TrainingRun, choose: Callable[[Gradients, Gradients | None], Gradients]
) -> None:
    """Train with a choice between the right gradient of every window and that of the window before it.

    Args:
        run: the training run.
        choose: of a window's gradients and of those of the window before, None for the first: the gradients of the
            step.
    """
    before: Gradients | None = None
    for window in windows(run):
        gradients = window_gradients(run, window)
        step_with(run, choose(gradients, before))
        before = gradients


def train_with_gradients(run: TrainingRun, change: Callable[[Gradients, list[torch.nn.Parameter]], None]) -> None:
    """Train with the right gradient of every window, changed before the step.

    Args:
        run: the training run.
        change: changes the gradients in place, given them and the model's trainable parameters.
    """
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        gradients = window_gradients(run, window)
        change(gradients, parameters)
        step_with(run, gradients)
