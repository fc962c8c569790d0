"""Gradients averaged over ranks by `DistributedDataParallel`, in the last backward of each window."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.schema.contract import (
    BUSY_RANKS,
    DENSE_GRADIENTS,
    Batch,
    Loop,
    TrainingRun,
    assumptions_of,
    training_loop,
)


def is_last_of_window(run: TrainingRun, call: int) -> bool:
    """Return whether a rank's n-th micro-batch of the run, from 0, is the last one of its window."""
    place = call % len(run.loader) + 1
    return place % run.accumulation_steps == 0 or place == len(run.loader)


def in_ddp(loop: Loop, *, assumes: Iterable[str] = (), **options: Any) -> Loop:
    """Return a loop that trains the model in `DistributedDataParallel`.

    The wrapper averages over ranks, so each loss is multiplied by their number. All micro-batches of a window but the
    last one run under `no_sync`. With `static_graph` the first of the run does not, where torch would fail an assertion
    (pytorch#143580): the part that is reduced twice stays what it is. A rank without a micro-batch in a window would
    leave the others waiting.

    Args:
        loop: that accumulates each micro-batch's part of the window's loss.
        assumes: what the loop assumes besides, as some options do.
        options: of `DistributedDataParallel`. Random models have parameters that a micro-batch does not reach, so
            `find_unused_parameters` is on if nothing else is said.
    """
    settings = {"find_unused_parameters": True, **options}
    assumed = (*assumptions_of(loop), BUSY_RANKS, DENSE_GRADIENTS, *assumes)

    @training_loop(assumes=assumed)
    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        wrapped, calls = DistributedDataParallel(run.model, **settings), count()

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            own: AbstractContextManager[None] = nullcontext()
            call = next(calls)
            if not is_last_of_window(run, call) and (call or not settings.get("static_graph")):
                own = wrapped.no_sync()
            with own:
                return run.loss(wrapped, batch) * run.world_size

        loop(replace(run, loss=loss))

    first = (loop.__doc__ or "").strip().split("\n")[0]
    told = "".join(f", {name}={value}" for name, value in options.items())
    trained.__doc__ = f"{first} In DistributedDataParallel{told}."
    return trained
