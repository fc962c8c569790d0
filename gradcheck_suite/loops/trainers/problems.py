"""Problems that trainers are asked about and that need torch alone, and a loss computed in the
model's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from gradcheck_suite.core.contract import Batch, Problem, TrainingRun
from gradcheck_suite.errors import CannotRunHere

# Problems that need torch alone: rows of numbers and a linear model, where every item counts 1.


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
    return {
        "x": torch.randn(items, FEATURES, generator=generator),
        "y": torch.randn(items, 1, generator=generator),
    }


def _mean(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


MEAN = Problem(_model, _batch, _mean)
"""Mean squared error."""
SUM = Problem(_model, _batch, _sum, reduction="sum")
"""The sum of squared errors."""


def _jax_model(seed: int) -> dict[str, Any]:
    import jax

    return {"w": jax.random.normal(jax.random.key(seed), (FEATURES, 1)), "b": jax.numpy.zeros(1)}


def _jax_batch(items: int, seed: int) -> Batch:
    return {name: tensor.numpy() for name, tensor in _batch(items, seed).items()}


def _jax_squares(params: Any, batch: Batch) -> Any:
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


# in the words of JAX: (params, batch) -> a scalar array
JAX_MEAN = Problem(_jax_model, _jax_batch, lambda params, batch: _jax_squares(params, batch).mean())  # type: ignore[arg-type]
"""Mean squared error, for a loop of JAX."""
JAX_SUM = Problem(
    _jax_model,  # type: ignore[arg-type]
    _jax_batch,
    lambda params, batch: _jax_squares(params, batch).sum(),
    reduction="sum",
)
"""The sum of squared errors, for a loop of JAX."""


# A run's model with its loss inside `forward`, in the forms that transformers' Trainer
# distinguishes.


IGNORED = -100


class AcceptingCount(torch.nn.Module):
    """A module whose `forward` takes the trainer's count of targets, as transformers' models do."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model = run.model
        self.is_mean = run.reduction == "mean"
        self.loss = run.loss
        self.count = run.count

    def forward(
        self, labels: torch.Tensor, batch: Batch, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Return the loss: divided by the trainer's count where it is given and the loss is a mean."""
        loss = self.loss(self.model, batch)
        if num_items_in_batch is not None and self.is_mean:
            loss = loss * (self.count(batch) / num_items_in_batch)
        return {"loss": loss}


class Plain(torch.nn.Module):
    """A module whose `forward` returns the loss of the batch it is given, and takes no count."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model = run.model
        self.loss = run.loss

    def forward(self, labels: torch.Tensor, batch: Batch) -> dict[str, Any]:
        """Return the loss."""
        return {"loss": self.loss(self.model, batch)}


class Outputs(torch.nn.Module):
    """A module that leaves its loss to the trainer's `compute_loss_func`."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model = run.model
        self.loss = run.loss
        self.count = run.count

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Return the loss of the batch and its count."""
        return {"mean": self.loss(self.model, batch), "count": self.count(batch)}


def labelled(run: TrainingRun) -> DataLoader[Any]:
    """Return a loader of the same micro-batches, each with `labels` of which as many are not
    ignored as it counts.
    """
    return DataLoader(
        run.loader.dataset,
        batch_sampler=run.loader.batch_sampler,
        collate_fn=_with_labels(run.loader.collate_fn, run.count),
    )


def _with_labels(
    collate: Callable[[Any], Batch], count: Callable[[Batch], torch.Tensor]
) -> Callable[[Any], dict[str, Any]]:
    def with_labels(items: Any) -> dict[str, Any]:
        batch = collate(items)
        counted = float(count(batch))
        if counted != int(counted):
            raise CannotRunHere(
                f"transformers' Trainer counts targets, and this loss divides by {counted:g}, which"
                " is no number of targets: take a loss without weights"
            )
        # one more, since a batch without valid targets has labels too, all ignored
        labels = torch.full((1, int(counted) + 1), IGNORED)
        labels[0, : int(counted)] = 0
        return {"labels": labels, "batch": batch}

    return with_labels
