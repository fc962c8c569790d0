"""The large-batch gradient in torch: one forward, one backward, nothing accumulated."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.execution.instance import Instance

Gradients = dict[str, torch.Tensor | None]


def gradients_of(
    instance: Instance,
    model: torch.nn.Module,
    items: range,
    *,
    summed: bool = False,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Return the gradient of the objective over some items in one batch, without a change of the model's `.grad`.

    Args:
        instance: the instance whose items and loss are used.
        model: the model whose parameters are used.
        items: indices of the items in the epoch.
        summed: whether to return the gradient of the summed loss if the problem's reduction is a mean.
        dtype: dtype of the batch's floating-point tensors; the instance's if None.

    Returns:
        Name of each trainable parameter -> its dense gradient, or None if the loss does not reach it.
    """
    batch = instance.batch(items, dtype)
    loss = instance.problem.loss(model, batch)
    if summed and instance.problem.reduction == "mean":
        loss = loss * instance.count(batch)
    return parameter_gradients(loss, model)


def parameter_gradients(loss: torch.Tensor, model: torch.nn.Module) -> Gradients:
    """Return the dense gradient of a loss for each trainable parameter by name, or None if it does not reach one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: tuple[Any, ...] = (None,) * len(named)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in zip(named, found, strict=True)}
