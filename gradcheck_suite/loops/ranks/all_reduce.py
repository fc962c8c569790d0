"""Gradients added up over ranks by one all-reduce per window, just before the step."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite.schema.contract import Loop, TrainingRun


def add_up_gradients(run: TrainingRun) -> None:
    """Give every rank the sum of all ranks' gradients; a parameter that no rank reaches gets zeros.

    The sum replaces each gradient in place, so that views of a buffer stay views.
    """
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    for p in trainable:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        elif p.grad.layout is not torch.strided:
            # ranks may reach other rows, so they add up dense gradients
            p.grad = p.grad.to_dense()
    gradients = [p.grad for p in trainable if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def all_reduced(loop: Loop) -> Loop:
    """Return a loop whose every step begins with an all-reduce of the gradients."""

    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        def add_up(*_: Any) -> None:
            add_up_gradients(run)

        run.optimizer.register_step_pre_hook(add_up)
        loop(run)

    trained.__doc__ = f"{_first_line(loop)} One all-reduce per window."
    return trained


def _first_line(loop: Loop) -> str:
    return (loop.__doc__ or "").strip().split("\n")[0]
