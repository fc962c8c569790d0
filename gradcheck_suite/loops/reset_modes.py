"""The reset modes, and further sound loops.

Each is an ordinary training loop under the loop contract, sound under the assumptions that it
declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from gradcheck_suite.core.contract import (
    EQUAL_MICRO_BATCHES,
    SUM_REDUCTION,
    WHOLE_WINDOWS,
    Batch,
    Loop,
    TrainingRun,
    training_loop,
)
from gradcheck_suite.core.text import summary_of

# The windows of an epoch and the backward of one window, shared by the correct loops.


def windows(run: TrainingRun) -> Iterator[list[Batch]]:
    """Yield each epoch's micro-batches in windows of `accumulation_steps`, the last one possibly
    shorter.

    With several ranks a window is what all of them contribute to one step. A rank that has no
    micro-batch left yields empty windows until all ranks are at the end.
    """
    for _ in range(run.epochs):
        micro_batches = iter(run.loader)
        # every rank asks whether any has a micro-batch left, at the same time: a rank that left the
        # loop by itself would leave the others waiting
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
    """Return the denominator of the window's mean: the sum of its micro-batches' counts, over all
    ranks.
    """
    counts = [run.count(batch) for batch in window] or [
        torch.zeros((), dtype=torch.promote_types(torch.float32, run.dtype))
    ]
    total: torch.Tensor = sum(counts[1:], start=counts[0])
    return over_ranks(run, total)


def part_of_window(run: TrainingRun, batch: Batch, total: Any) -> torch.Tensor:
    """Return a micro-batch's part of the window's loss: its summed loss, over the window's count
    for a mean.
    """
    loss = run.loss(run.model, batch)
    return loss if run.reduction == "sum" else loss * (run.count(batch) / total)


def backward_window(run: TrainingRun, window: list[Batch]) -> None:
    """Accumulate a window's gradient, one backward per micro-batch."""
    total = window_count(run, window)
    for batch in window:
        part_of_window(run, batch, total).backward()


# The reset modes. A new one is a row in `MODES`.


Parameters = Sequence[torch.nn.Parameter]
Reset = Callable[[Parameters, torch.optim.Optimizer], None]


# --- resets


def zero_by_hand(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero every gradient in place, by `p.grad.zero_()`; detach it first where it has a graph."""
    for p in parameters:
        if p.grad is not None:
            if p.grad.grad_fn is not None:  # after create_graph=True
                p.grad.detach_()
            p.grad.zero_()


def none_by_hand(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Release every gradient: `p.grad = None`."""
    for p in parameters:
        p.grad = None


def zero_grad_false(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.zero_grad(set_to_none=False)`, which zeroes tensor by tensor."""
    optimizer.zero_grad(set_to_none=False)


def zero_grad_foreach(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.zero_grad(set_to_none=False)` of an optimizer with `foreach`, which zeroes
    all at once.
    """
    # `zero_grad` reads the default of the optimizer, and not that of its groups
    optimizer.defaults["foreach"] = True
    optimizer.zero_grad(set_to_none=False)


def zero_grad_none(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.zero_grad(set_to_none=True)`, torch's default since 2.0."""
    optimizer.zero_grad(set_to_none=True)


def allocate_flat(parameters: Parameters) -> None:
    """Make every gradient a view of one flat buffer of zeros per dtype and device."""
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters):
        members = [p for p in parameters if (p.dtype, p.device) == (dtype, device)]
        flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
        for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            p.grad = part.view_as(p)


def zero_flat(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero the flat buffers whose views the gradients are."""
    views = [p.grad._base for p in parameters if p.grad is not None]
    bases = {id(base): base for base in views if base is not None}
    for flat in bases.values():
        flat.zero_()


# --- loops


def after_step(reset: Reset) -> Loop:
    """Return the loop that resets once after each step."""

    def loop(run: TrainingRun) -> None:
        parameters = list(run.model.parameters())
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            reset(parameters, run.optimizer)

    loop.__doc__ = f"{summary_of(reset)} After each step."
    return loop


def before_forward(run: TrainingRun) -> None:
    """Zero every gradient in place, before each window's first forward."""
    for window in windows(run):
        zero_by_hand(list(run.model.parameters()), run.optimizer)
        backward_window(run, window)
        run.optimizer.step()


def between_forward_and_backward(run: TrainingRun) -> None:
    """Zero every gradient in place, between each window's first forward and its first backward."""
    for window in windows(run):
        total = window_count(run, window)
        # other ranks have micro-batches left, and add this one's gradients to theirs
        if not window:
            zero_by_hand(list(run.model.parameters()), run.optimizer)
        for j, batch in enumerate(window):
            loss = part_of_window(run, batch, total)
            if j == 0:
                zero_by_hand(list(run.model.parameters()), run.optimizer)
            loss.backward()
        run.optimizer.step()


def flat_buffer(run: TrainingRun) -> None:
    """Hold all gradients as views of one flat buffer per dtype and device, zeroed at once after
    each step.
    """
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    allocate_flat(trainable)
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        zero_flat(trainable, run.optimizer)


MODES: dict[str, Loop] = {
    "zero_": after_step(zero_by_hand),
    "zero_grad": after_step(zero_grad_false),
    "zero_grad_foreach": after_step(zero_grad_foreach),
    "set_to_none": after_step(zero_grad_none),
    "grad_none": after_step(none_by_hand),
    "flat_buffer": flat_buffer,
    "zero_before_forward": before_forward,
    "zero_between": between_forward_and_backward,
}
"""The loops of the built-in reset modes by name: what `verify` runs when it is given no loop."""

# Correct loops of mixed precision, in every dtype: autocast, a gradient scaler, float32
# accumulators.


SCALE = 4.0
"""Initial scale of the gradient scaler. The default, 65536, overflows float16 on losses that are summed over items, and
the scaler skips the step of a window whose gradients overflow."""


@training_loop(autocast="bfloat16")
def autocast_bfloat16(run: TrainingRun) -> None:
    """Compute each loss under `torch.autocast` in bfloat16, and its backward outside."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                loss = part_of_window(run, batch, total)
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@training_loop(autocast="float16")
def grad_scaler(run: TrainingRun) -> None:
    """Scale losses computed under autocast in float16; unscale, step and update once per window.

    A `GradScaler` refuses to unscale float16 gradients, since it is made for float32 parameters.
    For float16 parameters the loop divides the scale out itself.
    """
    scaler = torch.amp.GradScaler(run.device.type, init_scale=SCALE)
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            with torch.autocast(run.device.type, dtype=torch.float16):
                loss = part_of_window(run, batch, total)
            scaler.scale(loss).backward()
        if run.dtype is torch.float16:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(scaler.get_scale())
            run.optimizer.step()
        else:
            scaler.step(run.optimizer)
            scaler.update()
        run.optimizer.zero_grad()


def float32_accumulator(run: TrainingRun) -> None:
    """Sum gradients in float32, or the parameter's dtype if that is wider, and cast the sum once,
    at the step.
    """
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for batch in window:
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    gradient = p.grad.to(torch.promote_types(p.dtype, torch.float32))
                    sums[p] = sums[p] + gradient if p in sums else gradient
                    p.grad = None
        for p, accumulated in sums.items():
            p.grad = accumulated.to(p.dtype)
        run.optimizer.step()
        run.optimizer.zero_grad()


PRECISION: dict[str, Loop] = {
    f.__name__: f for f in (autocast_bfloat16, grad_scaler, float32_accumulator)
}


# Correct loops in the forms that people write; some state assumptions. `verify` must find that each
# holds.


def plain(run: TrainingRun) -> None:
    """Keep the window, reset, accumulate each micro-batch's share of the window's mean, step."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = sum(run.count(batch) for batch in window)
        for batch in window:
            loss = run.loss(run.model, batch)
            if run.reduction == "mean":
                loss = loss * run.count(batch) / total
            loss.backward()
        run.optimizer.step()


def rescale_at_the_end(run: TrainingRun) -> None:
    """Accumulate summed losses, then divide the gradients by the window's count."""
    for window in windows(run):
        total: Any = 0
        for batch in window:
            count = run.count(batch)
            loss = run.loss(run.model, batch)
            (loss * count if run.reduction == "mean" else loss).backward()
            total = total + count
        if run.reduction == "mean":
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(total)
        run.optimizer.step()
        run.optimizer.zero_grad()


def closure(run: TrainingRun) -> None:
    """Pass each step a closure that resets, accumulates the window and returns its loss, as L-BFGS
    needs.
    """
    for window in windows(run):
        total = window_count(run, window)

        def loss_of_window(window: list[Batch], total: torch.Tensor) -> float:
            run.optimizer.zero_grad()
            # all losses before any backward: an optimizer that searches along a line asks for the
            # loss again
            parts = [part_of_window(run, batch, total) for batch in window]
            for part in parts:
                part.backward()
            return sum(float(part.detach()) for part in parts)

        run.optimizer.step(partial(loss_of_window, window, total))


@training_loop(assumes=(SUM_REDUCTION,))
def summed(run: TrainingRun) -> None:
    """Add up summed losses with no division at all. Assumes a sum over items."""
    for window in windows(run):
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@training_loop(assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS))
def divide_by_steps(run: TrainingRun) -> None:
    """Divide each mean by the accumulation steps. Assumes equal counts and whole windows."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if (i + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


SOUND: dict[str, Loop] = {
    f.__name__: f for f in (plain, rescale_at_the_end, closure, summed, divide_by_steps)
}


BUILT_IN: dict[str, Loop] = {**MODES, **SOUND, **PRECISION}
"""Built-in loops by name: the reset modes, which `verify` runs when given no loop, and further sound loops."""
