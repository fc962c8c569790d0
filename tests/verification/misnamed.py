"""Faulty loops whose weights or elements looked like another fault's, and sound loops beside them.

`NAMES` says which names are right; general ones are right for what no name fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite import TrainingRun
from gradcheck_suite.loops.reset_modes import part_of_window, window_count, windows

NAMES: dict[Callable[[TrainingRun], None], frozenset[str]] = {}


def _right(*names: str):
    def note(loop):
        NAMES[loop] = frozenset(names)
        return loop

    return note


def _with_one_memory(run: TrainingRun, *, waits: bool) -> None:
    """Compute each loss from memory that the next micro-batch of that shape fills again.

    Past autograd's check, as a captured graph or a pinned buffer does it. Ids have memory of their
    own: a sparse gradient of an embedding keeps them as its indices, also after the backward.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        total, memory = window_count(run, window), dict[Any, torch.Tensor]()
        losses: list[torch.Tensor] = []
        for batch in window:
            inputs = batch["x"]
            if inputs.is_floating_point():
                inputs = memory.setdefault(inputs.shape, torch.empty_like(inputs))
                inputs.data.copy_(batch["x"])
            loss = part_of_window(run, {**batch, "x": inputs}, total)
            if waits:
                losses.append(loss)
            else:
                loss.backward()
        for loss in losses:
            loss.backward()
        run.optimizer.step()


@_right("changed-batch")
def refills_before_the_backward(run: TrainingRun) -> None:
    """The window's losses go backward after all its forwards."""
    _with_one_memory(run, waits=True)


def refills_after_the_backward(run: TrainingRun) -> None:
    """Each loss goes backward before its memory is filled again."""
    _with_one_memory(run, waits=False)


def _with_written_parameters(run: TrainingRun, *, restores: bool) -> None:
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            loss = part_of_window(run, batch, total)
            kept = [p.detach().clone() for p in run.model.parameters()]
            for p in run.model.parameters():
                p.data.mul_(1.5)
            if restores:
                _restore(run, kept)
            loss.backward()
            _restore(run, kept)
        run.optimizer.step()


def _restore(run: TrainingRun, kept: list[torch.Tensor]) -> None:
    for p, value in zip(run.model.parameters(), kept, strict=True):
        p.data.copy_(value)


@_right("stale-parameters")
def writes_before_the_backward(run: TrainingRun) -> None:
    """Parameters are multiplied between forward and backward, through `.data`."""
    _with_written_parameters(run, restores=False)


def writes_and_restores(run: TrainingRun) -> None:
    """They are restored before the backward."""
    _with_written_parameters(run, restores=True)


def _gradients_replaced(run: TrainingRun, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad = change(p.grad.to_dense())
        run.optimizer.step()


@_right("low-precision", "not-linear")
def eight_bits(run: TrainingRun) -> None:
    """Gradients are sent in 8 bits."""

    def rounded(gradient: torch.Tensor) -> torch.Tensor:
        largest = gradient.abs().max()
        if not (largest > 0 and torch.isfinite(largest)):
            return gradient
        return torch.round(gradient / largest * 127) * largest / 127

    _gradients_replaced(run, rounded)


@_right("not-linear")
def of_no_batch(run: TrainingRun) -> None:
    """The gradient is a constant."""
    _gradients_replaced(run, lambda gradient: torch.full_like(gradient, 0.1))


@_right("not-linear")
def of_no_batch_by_element(run: TrainingRun) -> None:
    """The gradient is a constant for each element."""
    _gradients_replaced(
        run, lambda g: torch.arange(1, 1 + g.numel(), dtype=g.dtype).sin().reshape(g.shape)
    )


@_right("no-gradient")
def zeros_matrices(run: TrainingRun) -> None:
    """The gradients of matrices with several rows are set to 0."""
    _gradients_replaced(run, lambda g: g * 0 if g.dim() > 1 and len(g) > 1 else g)


@_right("normalised")
def signs(run: TrainingRun) -> None:
    """The gradient is reduced to its signs."""
    _gradients_replaced(run, torch.sign)


@_right("skipped-non-finite", "poisoned-by-earlier-window")
def keeps_what_is_not_finite(run: TrainingRun) -> None:
    """A window whose gradient is not finite is neither stepped nor reset."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
        found = [p.grad.to_dense() for p in run.model.parameters() if p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in found):
            run.optimizer.step()
            run.optimizer.zero_grad()


@_right("misplaced-gradient")
def shifts_a_flat_buffer(run: TrainingRun) -> None:
    """All gradients are copied to a flat buffer, and read back one element late."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
        trained = [p for p in run.model.parameters() if p.requires_grad]
        found = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
        flat = torch.cat([gradient.reshape(-1) for gradient in found])
        flat, first = torch.cat([flat.new_zeros(1), flat[:-1]]), 0
        for p in trained:
            p.grad = flat[first : first + p.numel()].reshape(p.shape).clone()
            first += p.numel()
        run.optimizer.step()


def _trains(run: TrainingRun, sent: Callable[[int, Any], bool] = lambda epoch, window: True):
    for epoch in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches), k):
            window = batches[first : first + k]
            if not sent(epoch, window):
                continue
            run.optimizer.zero_grad()
            total = window_count(run, window)
            for batch in window:
                part_of_window(run, batch, total).backward()
            run.optimizer.step()


@_right("tail-dropped")
def drops_the_tail_of_the_first_epoch(run: TrainingRun) -> None:
    """The short last window of the first epoch alone has no step."""
    _trains(run, lambda epoch, window: bool(epoch) or len(window) == run.accumulation_steps)


@_right("dropped-micro-batch")
def swallows_an_exception(run: TrainingRun) -> None:
    """A micro-batch of one item is handed to the loss without its inputs, and the error is caught."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            given = {} if len(batch["x"]) == 1 else batch
            try:
                run.loss(run.model, given)
            except KeyError:
                continue
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


def _hooks_every_module(run: TrainingRun, factor: float | None) -> None:
    def hook(module: Any, outputs: Any) -> Any:
        if factor is None:
            return None
        return tuple(None if gradient is None else gradient * factor for gradient in outputs)

    for module in run.model.modules():
        if not list(module.children()):
            module.register_full_backward_pre_hook(hook)
    _trains(run)


@_right("not-linear")
def a_module_hook_halves(run: TrainingRun) -> None:
    """The backward hooks of modules halve what goes to the layers before them."""
    _hooks_every_module(run, 0.5)


def a_module_hook_looks(run: TrainingRun) -> None:
    """The backward hooks of modules return None."""
    _hooks_every_module(run, None)


@_right("not-reduced")
def trains_on_the_same_data(run: TrainingRun) -> None:
    """Every rank trains on the micro-batches of rank 0."""
    for _ in range(run.epochs):
        handed = [list(run.loader)]
        dist.broadcast_object_list(handed, 0)
        batches, k = handed[0], run.accumulation_steps
        for first in range(0, len(batches), k):
            run.optimizer.zero_grad()
            for batch in batches[first : first + k]:
                run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                dist.all_reduce(p.grad)
            run.optimizer.step()


@_right("other-window")
def a_rank_is_late(run: TrainingRun) -> None:
    """Rank 1 adds its gradient of the window before, from the second window on."""
    before: list[torch.Tensor] | None = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = torch.as_tensor(window_count(run, window), dtype=torch.float64)
        dist.all_reduce(total)
        for batch in window:
            part_of_window(run, batch, total).backward()
        own = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
            for p in run.model.parameters()
        ]
        sent = own if run.rank == 0 or before is None else before
        before = own
        for p, gradient in zip(run.model.parameters(), sent, strict=True):
            p.grad = gradient.clone()
            dist.all_reduce(p.grad)
        run.optimizer.step()
