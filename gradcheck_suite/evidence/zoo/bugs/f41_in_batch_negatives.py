"""Every item's loss depends on the other items of its batch."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.contract import Batch, Problem


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def _batch(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(items, 3, generator=generator, dtype=torch.float64) for name in ("query", "answer")}


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["query"]) @ model(batch["answer"]).T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


BUG = Bug(
    number=41,
    name="in-batch-negatives",
    citations=("sentence-transformers#1822", "GradCache#7"),
    mechanism="The other items of a batch are each item's negatives: a smaller batch is another objective.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(_model, _batch, _loss),
)
