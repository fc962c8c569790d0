"""The reset modes as plain functions, and the window they are part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Parameters = list[torch.nn.Parameter]


def zero_(parameters: Parameters) -> None:
    """Zero each gradient with a call of its own."""
    for p in parameters:
        if p.grad is not None:
            p.grad.zero_()


def foreach_zero(parameters: Parameters) -> None:
    """Zero all gradients with one call, as `zero_grad(set_to_none=False)` of a foreach optimizer does."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


def set_to_none(parameters: Parameters) -> None:
    """Release each gradient."""
    for p in parameters:
        p.grad = None


@dataclass(frozen=True)
class Mode:
    """A way to reset.

    Attributes:
        name: of the mode.
        reset: of all the parameters' gradients.
        flat: whether the gradients are views of one buffer, made before the first backward.
        keeps: whether the gradients' memory is kept between steps.
    """

    name: str
    reset: Callable[[Parameters], None]
    flat: bool = False
    keeps: bool = True


def _zero_flat(parameters: Parameters) -> None:
    buffer = parameters[0].grad
    assert buffer is not None
    assert buffer._base is not None
    buffer._base.zero_()


MODES = {
    mode.name: mode
    for mode in (
        Mode("zero_", zero_),
        Mode("zero_grad_foreach", foreach_zero),
        Mode("flat_buffer", _zero_flat, flat=True),
        Mode("set_to_none", set_to_none, keeps=False),
    )
}


def prepare(mode: Mode, parameters: Parameters) -> None:
    """Give the gradients the storage that the mode works on, filled with ones: nothing is timed on zeros."""
    if mode.flat:
        flat = torch.ones(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        start = 0
        for p in parameters:
            p.grad = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        return
    for p in parameters:
        p.grad = torch.ones_like(p)


def window(mode: Mode, model: torch.nn.Module, parameters: Parameters, batches: list[torch.Tensor]) -> None:
    """Run one window: each micro-batch forward and backward, then the reset that ends it."""
    for batch in batches:
        model(batch).sum().backward()
    mode.reset(parameters)
