"""Correct loops of mixed precision, in every dtype: autocast, a gradient scaler, float32 accumulators."""

from __future__ import annotations

import torch

from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Loop, TrainingRun, training_loop

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
