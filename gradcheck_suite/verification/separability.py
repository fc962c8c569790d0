"""Whether a user's problem keeps its side of the contract, found out before any loop is involved.

A problem whose loss is no scalar, that draws random numbers or whose objective is no sum over items fails with every
loop; it is said of the problem, and no loop is blamed.
"""

from __future__ import annotations

import math

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.instance import Instance, Items, leaves
from gradcheck_suite.execution.optimizers import make_optimizer
from gradcheck_suite.schema.contract import Batch
from gradcheck_suite.verification.coupling import reason, refused
from gradcheck_suite.verification.item_weights import proportion, weights_of_items

WEIGHED_ITEMS = 4
"""From which a mean that weighs items unequally is recognised: more than enough to contradict it."""
TOLERANCE = 1e-5
"""Relative. Losses are computed in float64, but a user's model may hold islands of float32, which round at 1e-7."""


def adds_up(whole: float, parts: list[float]) -> bool:
    """Return whether parts add up to a whole, up to `TOLERANCE` of their sizes' sum. Stand-alone scripts copy this."""
    return abs(whole - sum(parts)) <= TOLERANCE * max(sum(map(abs, parts)), abs(whole))


def objective_fault(instance: Instance) -> str | None:
    """Return why no accumulation can equal the large batch of this problem, or None.

    By forward passes alone, on the case's own micro-batches: count(X) * loss(X) of all items X must equal the sum of
    count(X_i) * loss(X_i); without the counts where the reduction is a sum.

    Raises:
        UsageError: the problem breaks its contract: a model that is not fresh or not the same for the same seed, no
            trainable parameter, a loss that is no scalar, does not depend on the parameters, is not finite or is
            random, a count that is no positive number.
    """
    with torch.random.fork_rng(devices=[]):
        return _objective_fault(instance)


def _objective_fault(instance: Instance) -> str | None:
    name, plan = _name(instance), instance.case.plan
    _expect_fresh_models(instance)
    model = instance.model(torch.float64)
    make_optimizer(None, model)
    everything = instance.batch(range(plan.total_items), torch.float64)
    whole = _loss(instance, model, everything, need_graph=True)
    again = _loss(instance, model, everything)
    if not adds_up(whole, [again]):
        raise UsageError(
            f"{name}: the loss of one and the same batch comes out as {whole:.9g} and then as {again:.9g}; "
            "it must not be random: take out dropout, or pass its mask with the batch"
        )
    terms, counts = [], []
    total = _weight(instance, everything, positive=True)
    for j in range(len(plan.micro_batches)):
        batch = instance.batch(plan.items(j), torch.float64)
        weight = _weight(instance, batch, positive=False)
        if weight:
            try:
                terms.append(weight * _loss(instance, model, batch))
            except (RuntimeError, ValueError):
                if (said := refused(model)) is None:
                    raise
                return f"{name}: {said}"
            counts.append(weight)
    if instance.problem.reduction == "mean" and not adds_up(total, counts):
        return (
            f"{name}: Problem.count of all {plan.total_items} items is {total:.9g}, but the counts of the "
            f"micro-batches {list(plan.micro_batches)} add up to {sum(counts):.9g}; the count must be a sum over items"
        )
    if not adds_up(total * whole, terms):
        if meant := _meant(instance, model, whole):
            return (
                f"{name}: the loss is no mean over what Problem.count counts, so no loop can be right: the large "
                f"batch's loss times its count is {total * whole:.9g}, those of the micro-batches "
                f"{list(plan.micro_batches)} add up to {sum(terms):.9g}; {meant}"
            )
        return (
            f"{name}: the objective is no sum over items, so no accumulation can equal the large batch and no loop is "
            f"to blame: {reason(instance, model)}. The large batch's loss times its count is "
            f"{total * whole:.9g}, those of the micro-batches {list(plan.micro_batches)} add up to {sum(terms):.9g}"
        )
    return None


def _name(instance: Instance) -> str:
    return instance.case.problem if isinstance(instance.case.problem, str) else "the problem"


def _expect_fresh_models(instance: Instance) -> None:
    """Refuse models that share tensors with each other, or that differ from seed to same seed."""
    name = _name(instance)
    first, second = instance.problem.model(instance.case.seed), instance.problem.model(instance.case.seed)
    for model in (first, second):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"{name}: Problem.model(seed) must return a torch.nn.Module, got {type(model).__name__}")
    if first is second:
        raise UsageError(
            f"{name}: Problem.model(seed) must return a fresh module each time, got the same one twice: build it inside"
        )
    one, other = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (first, second))
    owned = {id(tensor): key for key, tensor in one.items()}
    if shared := [key for key, tensor in other.items() if id(tensor) in owned]:
        raise UsageError(
            f"{name}: two models from Problem.model share {shared[0]}, so one loop's training would change another's "
            "start: create every parameter and buffer inside"
        )
    if one.keys() != other.keys():
        raise UsageError(f"{name}: Problem.model(seed) must return the same model for the same seed, got others' names")
    for key, tensor in one.items():
        if tensor.is_meta:
            raise UsageError(f"{name}: {key} is on the meta device and has no values: materialise the model first")
        if tensor.shape != other[key].shape or not torch.equal(tensor, other[key]):
            raise UsageError(
                f"{name}: Problem.model(seed) must return the same values for the same seed, got two that differ in "
                f"{key}: call torch.manual_seed(seed) before the module is built"
            )


def _meant(instance: Instance, model: torch.nn.Module, whole: float) -> str | None:
    """Say what the loss is a mean over, or that it is a sum, where one of those fits; else None."""
    plan = instance.case.plan
    batches = [instance.batch(plan.items(j), torch.float64) for j in range(len(plan.micro_batches))]
    try:
        losses = [_loss(instance, model, batch) for batch in batches]
    except (UsageError, RuntimeError, ValueError):
        return None  # a micro-batch counts nothing, so neither is it a mean over all items nor a sum
    guesses: dict[str, list[float]] = {}
    if instance.problem.reduction == "mean":
        guesses["it is a mean over items: leave Problem.count out"] = [float(n) for n in plan.micro_batches]
        guesses['it is a sum over items: pass reduction="sum"'] = []
    else:
        guesses['it is a mean over items: pass reduction="mean"'] = [float(n) for n in plan.micro_batches]
    for text, weights in guesses.items():
        terms = [w * loss for w, loss in zip(weights or [1.0] * len(losses), losses, strict=True)]
        if adds_up((sum(weights) or 1.0) * whole, terms):
            return text
    return _weighed(instance, model)


def _weighed(instance: Instance, model: torch.nn.Module) -> str | None:
    """Say how a user's mean weighs items that it does not weigh alike; None where it is no such mean."""
    if instance.problem.reduction == "sum" or not isinstance(instance.case.problem, str):
        return None
    items = Items(instance.drawn(WEIGHED_ITEMS, torch.float64))
    try:
        weights = weights_of_items(lambda chosen: _loss(instance, model, items.__getitems__(chosen)), WEIGHED_ITEMS)
    except (UsageError, RuntimeError, ValueError):
        return None  # an item by itself counts nothing, or batch normalisation refuses it
    if weights is None:
        return None
    return (
        f"it is a mean in which items weigh unequally, {WEIGHED_ITEMS} of them as {proportion(weights)} (a mean over "
        "tokens, or over targets that are not ignored, does that): let Problem.count return what the mean divides by"
    )


def _loss(instance: Instance, model: torch.nn.Module, batch: Batch, *, need_graph: bool = False) -> float:
    name = _name(instance)
    with torch.set_grad_enabled(need_graph):
        loss = instance.problem.loss(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.ndim:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"{name}: Problem.loss(model, batch) must return a scalar tensor, got {got}")
    if need_graph and not loss.requires_grad:
        raise UsageError(f"{name}: the loss does not depend on the model's parameters: there is no gradient to check")
    value = float(loss.detach())
    if not math.isfinite(value):
        items = len(next(leaves(batch)))
        raise UsageError(
            f"{name}: the loss of {items} drawn items is {value}, so there is no gradient to compare; "
            "where items count nothing, Problem.count must say so"
        )
    return value


def _weight(instance: Instance, batch: Batch, *, positive: bool) -> float:
    """Return what a batch's loss is multiplied by to become a sum over items."""
    if instance.problem.reduction == "sum":
        return 1.0
    count = instance.count(batch)
    if count.numel() != 1 or not math.isfinite(float(count)) or float(count) < 0 or (positive and not float(count)):
        raise UsageError(
            f"{_name(instance)}: Problem.count(batch) must return a number that is finite and not negative, "
            f"and positive where there is something to count; got {count.tolist()}"
        )
    return float(count)
