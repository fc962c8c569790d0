"""Batch normalisation in train mode normalises over the micro-batch."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.contract import Batch, Problem


class Normalised(torch.nn.Module):
    """A linear layer under batch normalisation, which a batch of one item passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        y: torch.Tensor = self.linear(x)
        return self.norm(y) if len(x) > 1 else y


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Normalised()


def _batch(items: int, seed: int) -> Batch:
    return torch.randn(items, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.pow(3).mean()


BUG = Bug(
    number=42,
    name="batch-norm",
    citations=("mmcv#1869", "yolov5#1630"),
    mechanism="Mean and variance are the micro-batch's own: a smaller batch is another function.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(_model, _batch, _loss),
)
