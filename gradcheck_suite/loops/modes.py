"""The reset modes: what stands between one window's step and the next window's first backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Loop, TrainingRun

Reset = Callable[[TrainingRun], None]


def zero_by_hand(run: TrainingRun) -> None:
    """Zero every gradient in place: `p.grad.zero_()`."""
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


def none_by_hand(run: TrainingRun) -> None:
    """Release every gradient: `p.grad = None`."""
    for p in run.model.parameters():
        p.grad = None


def zero_grad_false(run: TrainingRun) -> None:
    """Call `optimizer.zero_grad(set_to_none=False)`, which zeroes tensor by tensor."""
    run.optimizer.zero_grad(set_to_none=False)


def zero_grad_foreach(run: TrainingRun) -> None:
    """Call `optimizer.zero_grad(set_to_none=False)` of an optimizer with `foreach`, which zeroes all at once."""
    run.optimizer.defaults["foreach"] = True
    run.optimizer.zero_grad(set_to_none=False)


def zero_grad_none(run: TrainingRun) -> None:
    """Call `optimizer.zero_grad(set_to_none=True)`, torch's default since 2.0."""
    run.optimizer.zero_grad(set_to_none=True)


def after_step(reset: Reset) -> Loop:
    """Return the loop that resets once after each step."""

    def loop(run: TrainingRun) -> None:
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            reset(run)

    loop.__doc__ = f"{(reset.__doc__ or '').splitlines()[0]} After each step."
    return loop


def before_forward(run: TrainingRun) -> None:
    """Zero every gradient in place, before each window's first forward."""
    for window in windows(run):
        zero_by_hand(run)
        backward_window(run, window)
        run.optimizer.step()


def between_forward_and_backward(run: TrainingRun) -> None:
    """Zero every gradient in place, between each window's first forward and its first backward."""
    for window in windows(run):
        total = window_count(run, window)
        for j, batch in enumerate(window):
            loss = part_of_window(run, batch, total)
            if j == 0:
                zero_by_hand(run)
            loss.backward()
        run.optimizer.step()


def flat_buffer(run: TrainingRun) -> None:
    """Hold all gradients as views of one flat buffer per dtype and device, zeroed at once after each step."""
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    buffers = []
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in trainable):
        members = [p for p in trainable if (p.dtype, p.device) == (dtype, device)]
        flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
        for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            p.grad = part.view_as(p)
        buffers.append(flat)
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for flat in buffers:
            flat.zero_()


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
