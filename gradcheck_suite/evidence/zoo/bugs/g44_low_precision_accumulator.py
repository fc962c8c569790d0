"""The sum is kept in bfloat16, where 256 + 1 is 256."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Accumulate in bfloat16 to save memory, and cast back for the step."""
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    gradient = p.grad.to_dense().bfloat16()
                    sums[p] = sums[p] + gradient if p in sums else gradient
        for p, gradient in sums.items():
            p.grad = gradient.to(p.dtype)
        run.optimizer.step()


BUG = Bug(
    number=44,
    name="low-precision-accumulator",
    citations=("DeepSpeed#2768",),
    mechanism="Gradients are added up in bfloat16: small contributions are rounded away.",
    needs="a gradient that bfloat16 does not hold exactly",
    loop=loop,
    wanted=frozenset({"gradient/not-linear", "gradient/rounded-weights"}),
)
