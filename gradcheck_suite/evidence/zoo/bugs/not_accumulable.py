"""Objectives that are no sum over items: no accumulation can equal the large batch, and no loop is to blame."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import normal_rows, seeded
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.contract import Batch, Problem


def _pairs(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(items, 3, generator=generator, dtype=torch.float64) for name in ("query", "answer")}


def _contrastive(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["query"]) @ model(batch["answer"]).T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


IN_BATCH_NEGATIVES = Bug(
    number=41,
    name="in-batch-negatives",
    citations=("sentence-transformers#1822", "GradCache#7"),
    mechanism="The other items of a batch are each item's negatives: a smaller batch is another objective.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(seeded(lambda: torch.nn.Linear(3, 2)), _pairs, _contrastive),
)


class Normalized(torch.nn.Module):
    """A linear layer under batch normalization, which is skipped for a batch of one item."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        y: torch.Tensor = self.linear(x)
        return self.norm(y) if len(x) > 1 else y


BATCH_NORM = Bug(
    number=42,
    name="batch-norm",
    citations=("mmcv#1869", "yolov5#1630"),
    mechanism="Mean and variance are the micro-batch's own: a smaller batch is another function.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(seeded(Normalized), normal_rows(3), lambda model, batch: model(batch).pow(3).mean()),
)
