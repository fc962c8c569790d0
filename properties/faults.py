"""Loops with one planted fault each: every property shows on one of them that it can fail."""

from __future__ import annotations

import torch

from gradcheck_suite import TrainingRun
from gradcheck_suite.loops.windows import backward_window, windows


def mean_of_means(run: TrainingRun) -> None:
    """Divide each micro-batch's mean by the window's micro-batches, whatever their counts."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            (run.loss(run.model, batch) / len(window)).backward()
        run.optimizer.step()


def no_divide(run: TrainingRun) -> None:
    """Add up means."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.step()


def double_divide(run: TrainingRun) -> None:
    """Divide by the window's micro-batches twice."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            (run.loss(run.model, batch) / len(window) / len(window)).backward()
        run.optimizer.step()


def tail_over_steps(run: TrainingRun) -> None:
    """Divide by accumulation_steps in the short last window too."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            (run.loss(run.model, batch) / run.accumulation_steps).backward()
        run.optimizer.step()


def reset_per_micro_batch(run: TrainingRun) -> None:
    """Reset before every micro-batch: only the last one survives."""
    for window in windows(run):
        for batch in window:
            run.optimizer.zero_grad()
            run.loss(run.model, batch).backward()
        run.optimizer.step()


def no_reset(run: TrainingRun) -> None:
    """Never reset."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


def reset_by_multiplication(run: TrainingRun) -> None:
    """Reset by `p.grad.mul_(0)`, which keeps a NaN for ever."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0)


def reset_all_but_the_last(run: TrainingRun) -> None:
    """Forget one parameter when resetting, as a group that was added later is forgotten."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in list(run.model.parameters())[:-1]:
            p.grad = None


def zeros_for_none(run: TrainingRun) -> None:
    """Reset to zeros where None was promised."""
    for window in windows(run):
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        backward_window(run, window)
        run.optimizer.step()


def running_sum_rescaled(run: TrainingRun) -> None:
    """Halve the accumulator at every micro-batch: later ones weigh more."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(2)
        run.optimizer.step()


def first_only(run: TrainingRun) -> None:
    """Hand over the first micro-batch's mean and ignore the others."""
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(run.model, window[0]).backward()
        run.optimizer.step()


def clip_per_micro_batch(run: TrainingRun) -> None:
    """Clip the running sum at every micro-batch, which is not linear in the loss."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = sum(run.count(batch) for batch in window)
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss * run.count(batch) / total if run.reduction == "mean" else loss).backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        run.optimizer.step()
