"""Faulty loops that used to get a misleading name: each must get a right name or a general one.

`RIGHT` says which names are right. A general name says that the weights or the steps are wrong, and shows the numbers.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite import TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows

RIGHT: dict[Any, frozenset[str]] = {}
"""Loop -> the right names, `kind/name`."""
RANKS: dict[Any, int] = {}
"""Loop -> number of ranks, where it needs several."""


def _right(*names: str, ranks: int = 1):
    def note(loop):
        RIGHT[loop] = frozenset(names)
        if ranks > 1:
            RANKS[loop] = ranks
        return loop

    return note


def _train(run: TrainingRun, share: Any) -> None:
    """Train with `share(window, batch)` as the weight of each micro-batch's mean."""
    for window in windows(run):
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss if run.reduction == "sum" else loss * share(window, batch)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _own_share(run: TrainingRun, window: list[Any], batch: Any) -> float:
    return float(run.count(batch) / window_count(run, window))


@_right("gradient/wrong-count")
def share_is_capped(run: TrainingRun) -> None:
    """A micro-batch's share of the window is 0.4 at most."""
    _train(run, lambda window, batch: min(_own_share(run, window, batch), 0.4))


@_right("gradient/wrong-windows", "gradient/other-window", "gradient/repeated-micro-batch")
def tail_filled_from_the_start(run: TrainingRun) -> None:
    """A short last window takes further micro-batches from the start of the loader."""
    k = run.accumulation_steps
    for _ in range(run.epochs):
        batches = list(run.loader)
        missing = -len(batches) % k
        filled = list(chain(batches, (batches * k)[:missing]))
        for first in range(0, len(filled), k):
            backward_window(run, filled[first : first + k])
            run.optimizer.step()
            run.optimizer.zero_grad()


@_right("gradient/low-precision", "gradient/other-parameters")
def float32_copies_from_the_second_on(run: TrainingRun) -> None:
    """From a window's second micro-batch on, the forward runs on copies of the parameters in float32."""
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
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[Any, Any] = {}
        for place, batch in enumerate(window):
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    own = p.grad.to_dense().half().to(p.dtype) if place else p.grad.to_dense()
                    sums[p] = sums[p] + own if p in sums else own
                p.grad = None
        for p, value in sums.items():
            p.grad = value
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/not-reduced", ranks=2)
def reduced_to_the_owner_alone(run: TrainingRun) -> None:
    """The gradient is added up on the rank that owns the parameter, and stays partial on the other."""
    for window in windows(run):
        backward_window(run, window)
        for index, p in enumerate(p for p in run.model.parameters() if p.requires_grad):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad = p.grad.to_dense()
            dist.reduce(p.grad, index % run.world_size)
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/reset-inside-window", "gradient/first-only", "gradient/dropped-micro-batch")
def closure_sees_one_micro_batch(run: TrainingRun) -> None:
    """The closure of each step computes the loss of the window's last micro-batch alone."""
    for window in windows(run):
        total = window_count(run, window)
        batch = window[-1]

        def closure(batch: Any = batch, total: Any = total) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = part_of_window(run, batch, total)
            loss.backward()
            return loss

        run.optimizer.step(closure)


@_right("gradient/wrong-scale", "gradient/wrong-count")
def coefficients_of_the_first_window(run: TrainingRun) -> None:
    """The shares of the first window's micro-batches are kept for all windows."""
    kept: list[float] = []
    for window in windows(run):
        kept = kept or [_own_share(run, window, batch) for batch in window]
        for place, batch in enumerate(window):
            loss = run.loss(run.model, batch)
            (loss if run.reduction == "sum" else loss * kept[place]).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/wrong-scale", "gradient/wrong-count")
def counts_memoised(run: TrainingRun) -> None:
    """A batch's count is looked up under its place in the window, which another window's batch had before."""
    known: dict[int, float] = {}
    for window in windows(run):
        total = sum(known.setdefault(place, float(run.count(batch))) for place, batch in enumerate(window)) or 1.0
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss if run.reduction == "sum" else loss * run.count(batch) / total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/rescaled-accumulator", "gradient/rescaled-accumulator", ranks=2)
def running_sum_reduced_each_time(run: TrainingRun) -> None:
    """The running sum is added up over the ranks after every micro-batch."""
    for window in windows(run):
        total = window_count(run, window)
        length = torch.tensor(len(window))
        dist.all_reduce(length, dist.ReduceOp.MAX)
        for place in range(int(length)):
            if place < len(window):
                part_of_window(run, window[place], total).backward()
            for p in run.model.parameters():
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                    dist.all_reduce(p.grad)
        run.optimizer.step()
        run.optimizer.zero_grad()


@_right("gradient/dropped-micro-batch", "gradient/wrong-windows", "step-count/wrong-windows")
def one_micro_batch_too_many_is_taken(run: TrainingRun) -> None:
    """Each window takes one micro-batch more from the loader to see that it ends, and drops it."""
    for _ in range(run.epochs):
        window: list[Any] = []
        for batch in run.loader:
            if len(window) == run.accumulation_steps:
                backward_window(run, window)
                run.optimizer.step()
                run.optimizer.zero_grad()
                window = []
                continue
            window.append(batch)
        if window:
            backward_window(run, window)
            run.optimizer.step()
            run.optimizer.zero_grad()
