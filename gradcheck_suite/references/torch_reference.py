"""The large-batch gradient in torch: one forward, one backward, nothing accumulated."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.schema.contract import Batch

Gradients = dict[str, torch.Tensor | None]


def gradients_of(
    instance: Instance,
    model: torch.nn.Module,
    items: range,
    *,
    summed: bool = False,
    dtype: torch.dtype | None = None,
    batch: Batch | None = None,
) -> Gradients:
    """Return the gradient of the objective over some items in one batch, leaving the model's own `.grad` alone.

    Args:
        instance: whose items and loss.
        model: at whose parameters.
        items: which of the epoch's items.
        summed: the gradient of the summed loss, where the problem's reduction is a mean.
        dtype: of the batch's floating tensors, where not the instance's.
        batch: in place of those items.

    Returns:
        Trainable parameters' names -> dense gradients, or None where the loss does not reach a parameter.
    """
    if batch is None:
        batch = instance.batch(items, dtype)
    loss = instance.problem.loss(model, batch)
    if summed and instance.problem.reduction == "mean":
        loss = loss * instance.count(batch)
    return parameter_gradients(loss, model)


def parameter_gradients(loss: torch.Tensor, model: torch.nn.Module) -> Gradients:
    """Return trainable parameters' names -> dense gradients of a loss, or None where it does not reach a parameter."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: tuple[Any, ...] = (None,) * len(named)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in zip(named, found, strict=True)}
