"""The reset modes, one record each with its law of cost, and further sound loops.

Each is an ordinary training loop under the loop contract, sound under the assumptions that it declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from gradcheck_suite.loops import laws

# The windows of an epoch and the backward of one window, shared by the correct loops.


def windows(run: TrainingRun) -> Iterator[list[Batch]]:
    """Yield each epoch's micro-batches in windows of `accumulation_steps`, the last one possibly shorter.

    With several ranks a window is what all of them contribute to one step. A rank that has no micro-batch left yields
    empty windows until all ranks are at the end.
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


# The reset modes. A new one is a record in `RESET_MODES`, with a law from `laws.py` or a new one there.


Parameters = Sequence[torch.nn.Parameter]
Reset = Callable[[Parameters, torch.optim.Optimizer], None]


@dataclass(frozen=True)
class ResetMode:
    """One way to reset gradients between a window's step and the next window's first backward.

    Attributes:
        name: the mode's name on the command line, in records and in the report.
        loop: the training loop that resets in this way; sound under the loop contract if `steps`.
        law: what one window does to gradients in memory.
        reset: resets the gradients of the given parameters; None where the loop resets in some other way.
        releases: whether the reset leaves None. Otherwise it leaves zeros.
        preallocate: gives every parameter the gradient, of zeros, that the loop allocates at its start; None where
            autograd makes the gradients.
        built_in: whether `verify` offers the loop by the mode's name. The other modes are measured for comparison only.
        steps: whether the loop calls `run.optimizer.step()`; if not, no observer sees its gradients together.
        benchmarked: whether the benchmarks time the reset; False where another mode runs the same kernels.
    """

    name: str
    loop: Loop
    law: laws.Law
    reset: Reset | None = None
    releases: bool = False
    preallocate: Callable[[Parameters], None] | None = None
    built_in: bool = True
    steps: bool = True
    benchmarked: bool = False


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
    """Call `optimizer.zero_grad(set_to_none=False)` of an optimizer with `foreach`, which zeroes all at once."""
    optimizer.defaults["foreach"] = True
    optimizer.zero_grad(set_to_none=False)


def zero_grad_none(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.zero_grad(set_to_none=True)`, torch's default since 2.0."""
    optimizer.zero_grad(set_to_none=True)


def foreach_zero(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero all dense gradients in one call to `torch._foreach_zero_`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.detach_()
    if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
        torch._foreach_zero_(dense)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.zero_()


def allocate_flat(parameters: Parameters) -> None:
    """Make every gradient a view of one flat buffer of zeros per dtype and device."""
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters):
        members = [p for p in parameters if (p.dtype, p.device) == (dtype, device)]
        flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
        for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            p.grad = part.view_as(p)


def zero_flat(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero the flat buffers whose views the gradients are."""
    bases = {id(base): base for p in parameters if p.grad is not None and (base := p.grad._base) is not None}
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

    loop.__doc__ = f"{(reset.__doc__ or '').splitlines()[0]} After each step."
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
        if not window:  # other ranks have micro-batches left, and add this one's gradients to theirs
            zero_by_hand(list(run.model.parameters()), run.optimizer)
        for j, batch in enumerate(window):
            loss = part_of_window(run, batch, total)
            if j == 0:
                zero_by_hand(list(run.model.parameters()), run.optimizer)
            loss.backward()
        run.optimizer.step()


def flat_buffer(run: TrainingRun) -> None:
    """Hold all gradients as views of one flat buffer per dtype and device, zeroed at once after each step."""
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    allocate_flat(trainable)
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        zero_flat(trainable, run.optimizer)


def main_gradients(run: TrainingRun) -> None:
    """Keep each sum in float32 or wider, round it to the parameter's dtype for the step, then zero it."""
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    mains = {p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trainable}
    reached: dict[torch.nn.Parameter, None] = {}

    def add(p: torch.Tensor) -> None:
        assert isinstance(p, torch.nn.Parameter)
        assert p.grad is not None
        mains[p].add_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        reached[p] = None
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(add) for p in trainable]
    for window in windows(run):
        backward_window(run, window)
        for p in reached:
            p.grad = mains[p].to(p.dtype)
        run.optimizer.step()
        for p in reached:
            p.grad = None
            mains[p].zero_()
        reached.clear()
    for hook in hooks:
        hook.remove()


def optimizer_in_backward(run: TrainingRun) -> None:
    """Step on each parameter as soon as its gradient of the window's last micro-batch is there, and release it."""
    groups = run.optimizer.param_groups
    optimizers = {p: _optimizer_like(run.optimizer, group, p) for group in groups for p in group["params"]}
    last = False

    def step(p: torch.Tensor) -> None:
        if last:
            assert isinstance(p, torch.nn.Parameter)
            optimizers[p].step()
            p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    for window in windows(run):
        total = window_count(run, window)
        for j, batch in enumerate(window):
            last = j == len(window) - 1
            part_of_window(run, batch, total).backward()
        for p in optimizers:
            if p.grad is not None:  # an earlier micro-batch reached it, the last one did not
                step(p)
    for hook in hooks:
        hook.remove()


def _optimizer_like(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """Return an optimizer of the same type over one parameter, with the settings of its group."""
    takes = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in group.items() if name in takes and name != "params"}
    return type(optimizer)([p], **settings)


# --- records


def _after_step(name: str, reset: Reset, law: laws.Law, **about: Any) -> ResetMode:
    return ResetMode(name, after_step(reset), law, reset, **about)


RESET_MODES: dict[str, ResetMode] = {
    mode.name: mode
    for mode in (
        _after_step("zero_", zero_by_hand, laws.zeroed, benchmarked=True),
        _after_step("zero_grad", zero_grad_false, laws.zeroed),
        _after_step("zero_grad_foreach", zero_grad_foreach, laws.zeroed_at_once, benchmarked=True),
        _after_step("set_to_none", zero_grad_none, laws.released, releases=True, benchmarked=True),
        _after_step("grad_none", none_by_hand, laws.released, releases=True),
        ResetMode("flat_buffer", flat_buffer, laws.flat_buffer, zero_flat, preallocate=allocate_flat, benchmarked=True),
        ResetMode("zero_before_forward", before_forward, laws.zeroed, zero_by_hand),
        ResetMode("zero_between", between_forward_and_backward, laws.zeroed, zero_by_hand),
        _after_step("foreach_zero", foreach_zero, laws.zeroed_at_once, built_in=False),
        ResetMode("main_gradients", main_gradients, laws.main_gradients, built_in=False),
        ResetMode(
            "optimizer_in_backward", optimizer_in_backward, laws.stepped_in_backward, built_in=False, steps=False
        ),
    )
}
"""Every reset mode by name, those included that are only measured."""

MODES: dict[str, Loop] = {mode.name: mode.loop for mode in RESET_MODES.values() if mode.built_in}
"""The loops of the built-in reset modes by name: what `verify` runs when it is given no loop."""

BENCHMARKED: tuple[ResetMode, ...] = tuple(mode for mode in RESET_MODES.values() if mode.benchmarked)
"""The reset modes that the benchmarks time."""


# Correct loops of mixed precision, in every dtype: autocast, a gradient scaler, float32 accumulators.


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

    A `GradScaler` refuses to unscale float16 gradients, since it is made for float32 parameters. For float16 parameters
    the loop divides the scale out itself.
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
    """Sum gradients in float32, or the parameter's dtype if that is wider, and cast the sum once, at the step."""
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


PRECISION: dict[str, Loop] = {f.__name__: f for f in (autocast_bfloat16, grad_scaler, float32_accumulator)}


# Correct loops in the forms that people write; some state assumptions. `verify` must find that each holds.


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
    """Pass each step a closure that resets, accumulates the window and returns its loss, as L-BFGS needs."""
    for window in windows(run):
        total = window_count(run, window)

        def loss_of_window(window: list[Batch], total: torch.Tensor) -> float:
            run.optimizer.zero_grad()
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


SOUND: dict[str, Loop] = {f.__name__: f for f in (plain, rescale_at_the_end, closure, summed, divide_by_steps)}


BUILT_IN: dict[str, Loop] = {**MODES, **SOUND, **PRECISION}
"""Built-in loops by name: the reset modes, which `verify` runs when given no loop, and further sound loops."""
