"""A problem whose items name their expert, so that a plan decides which parameters a window
reaches.
"""

from __future__ import annotations

import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.run.instance import Instance, user_instance

EXPERTS = 3


class Routed(torch.nn.Module):
    """One linear expert per route; an expert without items in the batch is not in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(EXPERTS))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return (n,), each item's output by its own expert."""
        out = batch["x"].new_zeros(len(batch["x"]))
        for route in batch["route"].unique().tolist():
            chosen = batch["route"] == route
            out = out.masked_scatter(chosen, self.experts[route](batch["x"][chosen]))
        return out


def _model(seed: int) -> Routed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Routed()


def routed_instance(
    routes: list[list[int]], accumulation_steps: int, *, epochs: int = 1, device: str = "cpu"
) -> Instance:
    """Return the instance of a plan whose micro-batch j has one item for each entry of `routes[j]`.

    Args:
        routes: for every micro-batch, the expert of each of its items.
        accumulation_steps: K.
        epochs: passes.
        device: where it runs.
    """
    flat = [route for micro_batch in routes for route in micro_batch]

    def batch(items: int, seed: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(-1, 1, 2 * items, dtype=torch.float64).reshape(items, 2)
        return {
            "x": x,
            "route": torch.tensor(flat),
            "target": torch.ones(items, dtype=torch.float64),
        }

    problem = Problem(
        model=_model,
        batch=batch,
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch), batch["target"]),
    )
    plan = Plan(tuple(map(len, routes)), accumulation_steps, epochs)
    return user_instance(Case("properties/routed.py:PROBLEM", plan, device=device), problem)
