"""The main loss is normalised over the window, the auxiliary one is not."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import window_count, windows
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun

WIDTH = 6


class Router(torch.nn.Module):
    """A linear model with a router of its own, which only the auxiliary loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.main = torch.nn.Linear(WIDTH, 1, bias=False)
        self.router = torch.nn.Linear(WIDTH, 1, bias=False)

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the main and the auxiliary mean over the items."""
        return (self.main(x) - 1).square().mean(), self.router(x).square().mean()


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Router()


def _batch(items: int, seed: int) -> Batch:
    return torch.randn(items, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    main, auxiliary = model.losses(batch)  # type: ignore[operator]
    return main + auxiliary


def loop(run: TrainingRun) -> None:
    """Weight the main loss by the micro-batch's share of the window, and add the auxiliary one as it is."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            if isinstance(run.model, Router):
                main, auxiliary = run.model.losses(batch)
                (main * run.count(batch) / total + auxiliary).backward()
            else:
                (run.loss(run.model, batch) * (run.count(batch) / total if run.reduction == "mean" else 1)).backward()
        run.optimizer.step()


BUG = Bug(
    number=8,
    name="aux-loss-unscaled",
    citations=("NeMo Automodel#3359",),
    mechanism="The main loss is normalised, the auxiliary one is not: K times too large on the router alone.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/mean-of-means", "gradient/wrong-scale"}),
    problem=Problem(_model, _batch, _loss),
)
