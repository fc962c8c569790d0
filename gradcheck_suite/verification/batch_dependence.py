"""Finds the module, or the loss, that makes an objective not separable over samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradcheck_suite.execution.batches import Items, leaves
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.schema.contract import Batch

TOLERANCE = 1e-5
"""Relative tolerance. Models run in float64, but may have float32 parts, which round at 1e-7."""
Outputs = dict[tuple[str, int], torch.Tensor]
"""Outputs by the module's name and the index of the output, inner modules before outer ones."""


def batch_dependence(instance: Instance, model: torch.nn.Module) -> str:
    """Return a clause that names the module or the loss in which samples interact.

    Args:
        instance: the instance of the problem.
        model: the problem's model in float64.
    """
    items = instance.case.plan.total_items
    whole = instance.batch(range(items), torch.float64)
    if (found := _mixing_module(instance, model, whole)) is not None:
        name, module = found
        where = f"{name or 'the model'} ({type(module).__name__})"
        said = f"{where} gives an item an output that depends on the other items"
        if isinstance(module, _BatchNorm) and module.training:
            said += (
                ": batch normalisation in train mode. Keep it in eval mode (frozen statistics), or use group or layer "
                "normalisation"
            )
        return said
    twice = Items(whole).__getitems__([*range(items), *range(items)])
    once, again = (float(instance.problem.loss(model, batch).detach()) for batch in (whole, twice))
    if instance.problem.reduction == "sum":
        again /= 2
    if abs(once - again) <= TOLERANCE * max(abs(once), abs(again)):
        return (
            "the model is separable over samples and the loss is not: it contains statistics of the batch (a product "
            "of batch means, targets standardised over the batch)"
        )
    return (
        "the model is separable over samples and the loss is not: it compares items with each other (in-batch "
        "negatives, pairs, rankings)"
    )


def batch_norm_refusal(model: torch.nn.Module) -> str | None:
    """Return a sentence about the batch normalisation that rejects a micro-batch of one item, or None."""
    if (found := _training_batch_norm(model)) is None:
        return None
    return (
        f"{found[0]} ({type(found[1]).__name__}) rejects a micro-batch with one value per channel, and gives an item "
        "an output that depends on the other items: batch normalisation in train mode, so no accumulation can equal "
        "the large batch and no loop is to blame. Keep it in eval mode (frozen statistics), or use group or layer "
        "normalisation"
    )


def _training_batch_norm(model: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    return next(((n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)


def _mixing_module(instance: Instance, model: torch.nn.Module, whole: Batch) -> tuple[str, torch.nn.Module] | None:
    """Return the first module whose outputs for some micro-batch's items depend on the other items.

    All micro-batches are compared: if only few values occur, as after the layer normalisation of two features, one
    micro-batch may by chance have the statistics of the whole.
    """
    plan = instance.case.plan
    try:
        in_whole = _outputs(instance, model, whole)
        for j in range(len(plan.micro_batches)):
            some = plan.items(j)
            in_part = _outputs(instance, model, instance.batch(some, torch.float64))
            # an expert without items has no output
            for key in (key for key in in_whole if key in in_part):
                a, b = in_whole[key], in_part[key]
                of_items = a.ndim > 0 and b.ndim > 0 and (len(a), len(b)) == (plan.total_items, len(some))
                if of_items and a.shape[1:] == b.shape[1:] and not _close(a[some.start : some.stop], b):
                    return key[0], model.get_submodule(key[0])
    except (RuntimeError, ValueError, IndexError):
        return _training_batch_norm(model)
    return None


@torch.no_grad()
def _outputs(instance: Instance, model: torch.nn.Module, batch: Batch) -> Outputs:
    """Return every module's outputs on a batch."""
    found: Outputs = {}
    seen: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():

        def note(module: torch.nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            for tensor in leaves(output):
                if tensor.is_floating_point():
                    found[name, seen[name]] = tensor.detach().to(torch.float64).clone()
                    seen[name] += 1

        handles.append(module.register_forward_hook(note))
    try:
        instance.problem.loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = float(torch.maximum(a.abs(), b.abs()).max()) if a.numel() else 0.0
    return bool(((a - b).abs() <= TOLERANCE * scale).all() | (a.isnan() & b.isnan()).all())
