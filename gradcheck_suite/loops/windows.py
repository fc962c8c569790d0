"""The windows of an epoch and the backward of one window, shared by the correct loops."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from gradcheck_suite.schema.contract import Batch, TrainingRun


def windows(run: TrainingRun) -> Iterator[list[Batch]]:
    """Yield each epoch's micro-batches in windows of `accumulation_steps`, the last one possibly shorter."""
    for _ in range(run.epochs):
        micro_batches = iter(run.loader)
        while window := list(islice(micro_batches, run.accumulation_steps)):
            yield window


def window_count(run: TrainingRun, window: list[Batch]) -> torch.Tensor:
    """Return the denominator of the window's mean: the sum of its micro-batches' counts."""
    total: torch.Tensor = sum((run.count(batch) for batch in window[1:]), start=run.count(window[0]))
    return total


def part_of_window(run: TrainingRun, batch: Batch, total: Any) -> torch.Tensor:
    """Return a micro-batch's part of the window's loss: its summed loss, over the window's count for a mean."""
    loss = run.loss(run.model, batch)
    return loss if run.reduction == "sum" else loss * (run.count(batch) / total)


def backward_window(run: TrainingRun, window: list[Batch]) -> None:
    """Accumulate a window's gradient, one backward per micro-batch."""
    total = window_count(run, window)
    for batch in window:
        part_of_window(run, batch, total).backward()
