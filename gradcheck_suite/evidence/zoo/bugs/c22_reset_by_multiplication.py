"""Multiplying by zero keeps a NaN for ever."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun


def _batch(items: int, seed: int) -> Batch:
    """Return items of which the first stands at the root's corner: its loss is 0 and its gradient NaN."""
    return torch.arange(items, dtype=torch.float64)[:, None]


def _model(seed: int) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    return model


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.sqrt().mean()


def loop(run: TrainingRun) -> None:
    """Reset by scaling with 0."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0)


BUG = Bug(
    number=22,
    name="reset-by-multiplication",
    citations=("optax MultiSteps 0.2.8",),
    mechanism="The accumulator is reset by a factor 0; 0 * NaN is NaN, so one bad micro-batch poisons all that follow.",
    needs="a NaN gradient in an earlier window",
    loop=loop,
    wanted=frozenset({"non-finite/poisoned-by-earlier-window"}),
    problem=Problem(_model, _batch, _loss),
)
