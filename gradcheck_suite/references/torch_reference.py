"""The large-batch gradient in torch: one forward, one backward, nothing accumulated."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.contract import Batch
from gradcheck_suite.trial import Trial

Gradients = dict[str, torch.Tensor | None]


def gradients_of(
    trial: Trial,
    model: torch.nn.Module,
    items: range,
    *,
    summed: bool = False,
    dtype: torch.dtype | None = None,
    batch: Batch | None = None,
) -> Gradients:
    """Return the gradient of the objective over some items in one batch, leaving the model's own `.grad` alone.

    Args:
        trial: whose items and loss.
        model: at whose parameters.
        items: which of the epoch's items.
        summed: the gradient of the summed loss, where the problem's reduction is a mean.
        dtype: of the batch's floating tensors, where not the trial's.
        batch: in place of those items.

    Returns:
        Trainable parameters' names -> dense gradients, or None where the loss does not reach a parameter.
    """
    if batch is None:
        batch = trial.batch(items, dtype)
    loss = trial.problem.loss(model, batch)
    if summed and trial.problem.reduction == "mean":
        loss = loss * trial.count(batch)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: tuple[Any, ...] = (None,) * len(named)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in zip(named, found, strict=True)}
