"""What the bugs between ranks share: a loop that adds up over ranks, of which one part is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite.loops.ranks.all_reduce import add_up_gradients
from gradcheck_suite.loops.windows import over_ranks, part_of_window, windows
from gradcheck_suite.schema.contract import Batch, TrainingRun

Share = Callable[[torch.Tensor, torch.Tensor], Any]
"""(this rank's count of the window, all ranks' count) -> what the summed loss is divided by, for a mean."""


def right_share(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return all ranks' count."""
    return total


def _own_count(run: TrainingRun, window: list[Batch]) -> torch.Tensor:
    """Return what this rank's micro-batches of a window count together."""
    return sum((run.count(batch) for batch in window), start=torch.zeros((), dtype=torch.float64))


def train_over_ranks(
    run: TrainingRun,
    share: Share = right_share,
    *,
    reduce: Callable[[TrainingRun], None] = add_up_gradients,
    factor: float = 1.0,
) -> None:
    """Train with one reduction over ranks per window.

    Args:
        run: the training run.
        share: what each rank divides its summed losses by.
        reduce: makes the ranks' gradients one, before the step.
        factor: of every loss.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        own = _own_count(run, window)
        divisor = share(own, over_ranks(run, own.clone()))
        for batch in window:
            (part_of_window(run, batch, divisor) * factor).backward()
        reduce(run)
        run.optimizer.step()


def fill_missing(run: TrainingRun) -> list[torch.Tensor]:
    """Return the gradients of all trainable parameters, zeros where there was none."""
    for p in run.model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in run.model.parameters() if p.grad is not None]


def reduce_each(gradients: Iterable[torch.Tensor]) -> None:
    """Add up each gradient over ranks, in place."""
    for gradient in gradients:
        dist.all_reduce(gradient)
