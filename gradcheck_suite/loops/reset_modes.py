"""The reset modes, one record each with its laws of cost, and further sound loops.

Each is an ordinary training loop under the loop contract, sound for `mean` and `sum`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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

# What a training window does to its gradients in memory, as plain data.
#
# The laws of the reset modes (`gradcheck_suite.loops.reset_modes`) predict it, and the ledger
# (`gradcheck_suite.studies`)
# measures it.


@dataclass(frozen=True)
class Traffic:
    """Operations and the bytes they moved.

    Attributes:
        operations: number of operations, views left out.
        views: number of operations that only made a view or changed metadata.
        read: bytes of the tensors that the operations were given.
        written: bytes of the tensors that they made or changed.
        allocated: bytes of the storages that were allocated.
        freed: bytes of the storages that were freed.
    """

    operations: int = 0
    views: int = 0
    read: int = 0
    written: int = 0
    allocated: int = 0
    freed: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.read + self.written


@dataclass(frozen=True)
class ParameterUse:
    """One parameter in one window.

    Attributes:
        bytes: bytes of its gradient.
        itemsize: bytes of an element.
        reached: number of the window's micro-batches whose loss reaches the parameter.
        reached_in_last_window: whether a micro-batch of the window before reached it.
        reached_before: whether a micro-batch of any earlier window reached it.
    """

    bytes: int
    itemsize: int
    reached: int
    reached_in_last_window: bool
    reached_before: bool


@dataclass(frozen=True)
class WindowUse:
    """One window: its trainable parameters, and whether it is the first window of the run."""

    parameters: tuple[ParameterUse, ...]
    first: bool


@dataclass(frozen=True)
class Cost:
    """What one window does to gradients, from the reset before it to the end of its step.

    Attributes:
        reset: zeroing or releasing the gradients of the window before.
        accumulate: adding each micro-batch's gradients to the sum. The backward makes these gradients, and they are
            released after they were added, in every mode alike: that is not counted.
        handling: what the loop does to gradients between backward and step.
        kept: bytes of gradients alive from the end of the reset to the first backward.
    """

    reset: Traffic
    accumulate: Traffic
    handling: Traffic
    kept: int

    @property
    def moved(self) -> int:
        """Bytes of gradients that the window reads and writes."""
        return self.reset.moved + self.accumulate.moved + self.handling.moved


def uniform_window(
    parameters: int, elements: int, itemsize: int, micro_batches: int, *, first: bool = False
) -> WindowUse:
    """Return a window in which every micro-batch reaches every parameter.

    Args:
        parameters: number of parameters.
        elements: number of elements of all parameters together.
        itemsize: bytes of an element.
        micro_batches: number of micro-batches in the window.
        first: whether it is the first window of a run, which finds no gradients.
    """
    each, left = divmod(elements, parameters)
    sizes = (each + (i < left) for i in range(parameters))
    uses = (ParameterUse(size * itemsize, itemsize, micro_batches, not first, not first) for size in sizes)
    return WindowUse(tuple(uses), first)


# The laws of the reset modes: what one window does to gradients, worked out from sizes alone.
#
# The laws assume dense gradients that autograd can take as they are: of the parameter's own strides, and held by
# nothing else. `add_` reads two operands and writes one, `zero_` writes one, and taking a gradient moves nothing. The
# ledger (`gradcheck_suite.studies.ledger`) measures the same quantities, and `properties/test_cost_laws.py` requires
# equality.


Law = Callable[[WindowUse], Cost]

FLOAT32_ITEMSIZE = 4


def _bytes(parameters: Iterable[ParameterUse]) -> int:
    return sum(p.bytes for p in parameters)


def _additions(counts: Iterable[tuple[ParameterUse, int]]) -> Traffic:
    """Return what adding gradients to sums of the same dtype moves, `count` times for each parameter."""
    total = Traffic()
    for p, count in counts:
        total += Traffic(operations=count, read=2 * count * p.bytes, written=count * p.bytes)
    return total


def zeroed(window: WindowUse) -> Cost:
    """Keep each gradient from the first backward that reaches its parameter; zero it, then add K times."""
    kept = [p for p in window.parameters if p.reached_before]
    added = ((p, p.reached if p.reached_before else max(p.reached - 1, 0)) for p in window.parameters)
    return Cost(
        reset=Traffic(operations=len(kept), written=_bytes(kept)),
        accumulate=_additions(added),
        handling=Traffic(),
        kept=_bytes(kept),
    )


def zeroed_at_once(window: WindowUse) -> Cost:
    """Do what `zeroed` does, with one call for all gradients of one dtype and device."""
    cost = zeroed(window)
    return replace(cost, reset=replace(cost.reset, operations=min(1, cost.reset.operations)))


def released(window: WindowUse) -> Cost:
    """Free each gradient; take the gradient of the first micro-batch that reaches its parameter, add K - 1 times."""
    return Cost(
        reset=Traffic(freed=_bytes(p for p in window.parameters if p.reached_in_last_window)),
        accumulate=_additions((p, max(p.reached - 1, 0)) for p in window.parameters),
        handling=Traffic(),
        kept=0,
    )


def laws_flat_buffer(window: WindowUse) -> Cost:
    """Keep all gradients in one buffer from the start of the run; zero it with one call, then add K times."""
    size = _bytes(window.parameters)
    return Cost(
        reset=Traffic() if window.first else Traffic(operations=1, written=size),
        accumulate=_additions((p, p.reached) for p in window.parameters),
        handling=Traffic(),
        kept=size,
    )


def stepped_in_backward(window: WindowUse) -> Cost:
    """Step on each gradient and free it as soon as the last micro-batch's was added: none is left to reset."""
    return replace(released(window), reset=Traffic())


def laws_main_gradients(window: WindowUse) -> Cost:
    """Add each micro-batch's gradient to a sum in float32 or wider, and free it.

    At the end of a window the sums are rounded to the parameters' dtype, which is a copy only where that is narrower. A
    sum is kept from the first addition on.
    """
    reset, accumulate, handling, kept = Traffic(), Traffic(), Traffic(), 0
    for p in window.parameters:
        wide = p.bytes // p.itemsize * max(FLOAT32_ITEMSIZE, p.itemsize)
        rounded = p.bytes if p.itemsize < FLOAT32_ITEMSIZE else 0
        accumulate += Traffic(operations=p.reached, read=p.reached * (wide + p.bytes), written=p.reached * wide)
        if p.reached_in_last_window:
            reset += Traffic(operations=1, written=wide, freed=rounded)
        if p.reached and p.itemsize < FLOAT32_ITEMSIZE:
            handling += Traffic(operations=1, read=wide, written=rounded, allocated=rounded)
        if p.reached_before:
            kept += wide
    return Cost(reset, accumulate, handling, kept)


def bytes_saved_by_releasing(gradient_bytes: int, micro_batches: int = 1) -> int:
    """Return the bytes that a window moves less when it releases gradients than when it zeroes them.

    Zeroing writes every gradient once more, and one more addition reads two operands and writes one: four times the
    gradients' bytes for any number of micro-batches.

    Args:
        gradient_bytes: bytes of one gradient of all parameters.
        micro_batches: number of micro-batches in the window.
    """
    window = uniform_window(1, gradient_bytes, 1, micro_batches)
    return zeroed(window).moved - released(window).moved


# The windows of an epoch and the backward of one window, shared by the correct loops.
#
# With several ranks a window is what all of them contribute to one step. They agree on the number of windows and on
# the count of each; who adds up their gradients is for the loop to say (`loops.ranks`).


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


# The reset modes, one record each: everything else that concerns reset modes iterates over `RESET_MODES`.
#
# A new mode is one record here, with a law from `laws.py` or a new one there.


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
    law: Law
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


def modes_flat_buffer(run: TrainingRun) -> None:
    """Hold all gradients as views of one flat buffer per dtype and device, zeroed at once after each step."""
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    allocate_flat(trainable)
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        zero_flat(trainable, run.optimizer)


def modes_main_gradients(run: TrainingRun) -> None:
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


def _after_step(name: str, reset: Reset, law: Law, **about: Any) -> ResetMode:
    return ResetMode(name, after_step(reset), law, reset, **about)


RESET_MODES: dict[str, ResetMode] = {
    mode.name: mode
    for mode in (
        _after_step("zero_", zero_by_hand, zeroed, benchmarked=True),
        _after_step("zero_grad", zero_grad_false, zeroed),
        _after_step("zero_grad_foreach", zero_grad_foreach, zeroed_at_once, benchmarked=True),
        _after_step("set_to_none", zero_grad_none, released, releases=True, benchmarked=True),
        _after_step("grad_none", none_by_hand, released, releases=True),
        ResetMode(
            "flat_buffer", modes_flat_buffer, laws_flat_buffer, zero_flat, preallocate=allocate_flat, benchmarked=True
        ),
        ResetMode("zero_before_forward", before_forward, zeroed, zero_by_hand),
        ResetMode("zero_between", between_forward_and_backward, zeroed, zero_by_hand),
        _after_step("foreach_zero", foreach_zero, zeroed_at_once, built_in=False),
        ResetMode("main_gradients", modes_main_gradients, laws_main_gradients, built_in=False),
        ResetMode("optimizer_in_backward", optimizer_in_backward, stepped_in_backward, built_in=False, steps=False),
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


PRECISION: dict[str, Loop] = {
    "autocast_bfloat16": autocast_bfloat16,
    "grad_scaler": grad_scaler,
    "float32_accumulator": float32_accumulator,
}


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


SOUND: dict[str, Loop] = {
    "plain": plain,
    "rescale_at_the_end": rescale_at_the_end,
    "closure": closure,
    "summed": summed,
    "divide_by_steps": divide_by_steps,
}


# The built-in loops: the reset modes, one record each, and further sound loops.
#
# Each built-in loop is an ordinary training loop under the loop contract, sound for `mean` and `sum`. This package
# does not import what runs, judges or measures loops.


BUILT_IN: dict[str, Loop] = {**MODES, **SOUND, **PRECISION}
"""Built-in loops by name: the reset modes, which `verify` runs when given no loop, and further sound loops."""
