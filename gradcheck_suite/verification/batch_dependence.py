"""Finds the module, or the loss, that makes an objective not separable over samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradcheck_suite.execution.batches import Items, leaves
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.schema.contract import Batch

TOLERANCE = 1e-5
"""Relative tolerance. Models run in float64, but may have float32 parts, which round at 1e-7."""
AS_A_BATCH = 'If a loop computes it for a whole window (GradCache, cached negatives), state Problem(reduction="batch")'
FINE = 1e-9
MOST_FIRST = 8
"""Numbers of first items that are compared with all, beside the micro-batches."""
EXACT = 1e-11
"""Relative tolerance of losses in float64 that add up to rounding."""
Values = list[torch.Tensor]
Calls = dict[tuple[str, int], tuple[Values, Values]]
"""Inputs and outputs by the module's name and the index of its call, inner modules before outer ones."""


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
                ": batch normalization in train mode. Keep it in eval mode (frozen statistics), or use group or layer "
                "normalization"
            )
        return said
    if _losses_add_up(instance, model):
        return (
            "the losses of the micro-batches add up to the large batch's and the gradients do not: a backward (a "
            "custom autograd.Function, a hook) gives an item a gradient that depends on the other items"
        )
    if (constant := _constant_per_batch(instance, model)) is not None:
        return (
            f"every batch's loss contains {constant:.6g} once, whatever its items, as a penalty on parameters would: "
            "multiply it by the number of items, or leave it to the optimizer"
        )
    twice = Items(whole).__getitems__([*range(items), *range(items)])
    once, again = (_loss(instance, model, batch) for batch in (whole, twice))
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


def _loss(instance: Instance, model: torch.nn.Module, batch: Batch) -> float:
    return float(instance.problem.loss(model, batch).detach())


def _micro_batches(instance: Instance) -> list[Batch]:
    plan = instance.case.plan
    return [instance.batch(plan.items(j), torch.float64) for j in range(len(plan.micro_batches))]


def _losses_add_up(instance: Instance, model: torch.nn.Module) -> bool:
    """Return whether losses times counts add up to rounding, so that the forward is a sum over items."""
    batches = [instance.batch(range(instance.case.plan.total_items), torch.float64), *_micro_batches(instance)]
    weights = [1.0 if instance.problem.reduction == "sum" else float(instance.count(batch)) for batch in batches]
    whole, *parts = (
        weight * _loss(instance, model, batch) if weight else 0.0
        for weight, batch in zip(weights, batches, strict=True)
    )
    return abs(whole - sum(parts)) <= EXACT * max(abs(whole), sum(map(abs, parts)))


def _constant_per_batch(instance: Instance, model: torch.nn.Module) -> float | None:
    """Return what a summed loss contains once in every batch, or None: all pairs of three items must show it."""
    drawn = 3 if instance.users_problem else instance.case.plan.total_items
    if instance.problem.reduction != "sum" or drawn < 3:
        return None
    items = Items(instance.drawn(3, torch.float64))

    def loss(*indices: int) -> float:
        return _loss(instance, model, items.__getitems__(indices))

    first, *others = (loss(i) + loss(j) - loss(i, j) for i, j in ((0, 1), (0, 2), (1, 2)))
    scale = TOLERANCE * max(abs(loss(0, 1, 2)), abs(first))
    return first if abs(first) > scale and all(abs(other - first) <= scale for other in others) else None


def batch_norm_refusal(model: torch.nn.Module) -> str | None:
    """Return a sentence about the batch normalization that rejects a micro-batch of one item, or None."""
    if (found := _training_batch_norm(model)) is None:
        return None
    return (
        f"{found[0]} ({type(found[1]).__name__}) rejects a micro-batch with one value per channel, and gives an item "
        "an output that depends on the other items: batch normalization in train mode, so no plain accumulation can "
        "equal the large batch and no loop is to blame. Keep it in eval mode (frozen statistics), or use group or "
        "layer normalization"
    )


def _training_batch_norm(model: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    return next(((n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)


def _mixing_module(instance: Instance, model: torch.nn.Module, whole: Batch) -> tuple[str, torch.nn.Module] | None:
    """Return the first module that gives some micro-batch's items other outputs, although its inputs are the same.

    All micro-batches are compared: if only few values occur, as after the layer normalization of two features, one
    micro-batch may by chance have the statistics of the whole. Where all have them, the outputs are the same and the
    gradients are not, so the first items are compared, too.
    """
    plan = instance.case.plan
    cuts = [plan.items(j) for j in range(len(plan.micro_batches))]
    cuts += [range(items) for items in range(1, min(plan.total_items, MOST_FIRST + 1))]
    try:
        # rounding in float32 parts of a model is taken for a difference only if nothing else is found
        for tolerance in (TOLERANCE, FINE):
            if found := _first_mixing(instance, model, whole, cuts, tolerance):
                return found
        return None
    except (RuntimeError, ValueError, IndexError):
        return _training_batch_norm(model)


def _first_mixing(
    instance: Instance, model: torch.nn.Module, whole: Batch, cuts: Sequence[range], tolerance: float
) -> tuple[str, torch.nn.Module] | None:
    items = instance.case.plan.total_items
    in_whole = _calls(instance, model, whole)
    for some in cuts:
        in_part = _calls(instance, model, instance.batch(some, torch.float64))
        # an expert without items is not called
        for key in (key for key in in_whole if key in in_part):
            inputs, outputs = (
                [_same_items(a, b, some, items, tolerance) for a, b in zip(*values, strict=False)]
                for values in zip(in_whole[key], in_part[key], strict=True)
            )
            if False in outputs and False not in inputs:
                return key[0], model.get_submodule(key[0])
    return None


def _same_items(whole: torch.Tensor, part: torch.Tensor, some: range, total: int, tolerance: float) -> bool | None:
    """Return whether a part's values are those that its items have in the whole; None where values are of no items."""
    if not (whole.ndim and part.ndim and (len(whole), len(part)) == (total, len(some))):
        return None
    return None if whole.shape[1:] != part.shape[1:] else _close(whole[some.start : some.stop], part, tolerance)


@torch.no_grad()
def _calls(instance: Instance, model: torch.nn.Module, batch: Batch) -> Calls:
    """Return the inputs and outputs of every call of a module on a batch."""
    found: Calls = {}
    seen: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():

        def note(module: torch.nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            found[name, seen[name]] = _copied(inputs), _copied(output)
            seen[name] += 1

        handles.append(module.register_forward_hook(note))
    try:
        instance.problem.loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copied(values: Any) -> Values:
    return [t.detach().to(torch.float64).clone() for t in leaves(values) if t.is_floating_point()]


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    scale = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0).max()) if a.numel() else 0.0
    return bool((((a - b).abs() <= tolerance * scale) | (a.isnan() & b.isnan())).all())
