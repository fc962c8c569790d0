"""The windows of an epoch and the backward of one window, shared by the correct loops.

With several ranks a window is what all of them contribute to one step. They agree on the number of windows and on the
count of each; who adds up their gradients is for the loop to say (`loops.ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from gradcheck_suite.schema.contract import Batch, TrainingRun


def windows(run: TrainingRun) -> Iterator[list[Batch]]:
    """Yield each epoch's micro-batches in windows of `accumulation_steps`, the last one possibly shorter.

    A rank that has no micro-batch left yields empty windows until all ranks are at the end.
    """
    for _ in range(run.epochs):
        micro_batches = iter(run.loader)
        while (window := list(islice(micro_batches, run.accumulation_steps))) or run.world_size > 1:
            if not over_ranks(run, torch.tensor(len(window))):
                break
            yield window


def over_ranks(run: TrainingRun, value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a value over all ranks."""
    if run.world_size > 1:
        value = value.to(run.device)
        torch.distributed.all_reduce(value)
    return value


def window_count(run: TrainingRun, window: list[Batch]) -> torch.Tensor:
    """Return the denominator of the window's mean: the sum of its micro-batches' counts, over all ranks."""
    counts = [run.count(batch) for batch in window] or [
        torch.zeros((), dtype=torch.promote_types(torch.float32, run.dtype))
    ]
    total: torch.Tensor = sum(counts[1:], start=counts[0])
    return over_ranks(run, total)


def part_of_window(run: TrainingRun, batch: Batch, total: Any) -> torch.Tensor:
    """Return a micro-batch's part of the window's loss: its summed loss, over the window's count for a mean."""
    loss = run.loss(run.model, batch)
    return loss if run.reduction == "sum" else loss * (run.count(batch) / total)


def backward_window(run: TrainingRun, window: list[Batch]) -> None:
    """Accumulate a window's gradient, one backward per micro-batch."""
    total = window_count(run, window)
    for batch in window:
        part_of_window(run, batch, total).backward()
