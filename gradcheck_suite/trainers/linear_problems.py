"""Problems that need torch alone: rows of numbers and a linear model, where every item counts 1."""

from __future__ import annotations

import torch

from gradcheck_suite.schema.contract import Batch, Problem

FEATURES = 3


def _model(seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(FEATURES, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _batch(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(items, FEATURES, generator=generator), "y": torch.randn(items, 1, generator=generator)}


def _mean(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


MEAN = Problem(_model, _batch, _mean)
"""Mean squared error."""
SUM = Problem(_model, _batch, _sum, reduction="sum")
"""The sum of squared errors."""
