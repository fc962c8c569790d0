"""Checks of a problem before any loop runs: its contract, and that its objective is a sum over items.

A problem fails with every loop if its loss is not a scalar, if it draws random numbers, or if its objective is not a
sum over items. The verdict is then on the problem, and no loop is blamed.
"""

from __future__ import annotations

import math

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.batches import Items, leaves
from gradcheck_suite.execution.devices import seeded
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.optimizers import make_optimizer
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.schema.contract import Batch
from gradcheck_suite.verification.batch_dependence import AS_A_BATCH, EXACT, batch_dependence, batch_norm_refusal
from gradcheck_suite.verification.item_weights import proportion, weights_of_items

WEIGHED_ITEMS = 4
"""Number of items from which a weighted mean is recognised: enough to contradict it if it is none."""
TOLERANCE = 1e-5
"""Relative tolerance. Losses are computed in float64, but a model may have float32 parts, which round at 1e-7."""


def adds_up(whole: float, parts: list[float]) -> bool:
    """Return whether parts add up to a whole, up to `TOLERANCE` times the sum of their sizes. Scripts copy this."""
    return abs(whole - sum(parts)) <= TOLERANCE * max(sum(map(abs, parts)), abs(whole))


def objective_fault(instance: Instance) -> str | None:
    """Return why no accumulation can equal the large batch of this problem, or None.

    The check runs forward passes on the case's micro-batches. count(X) * loss(X) of all items X must equal the sum of
    count(X_i) * loss(X_i) over the micro-batches X_i, without the counts if the reduction is a sum.

    Raises:
        UsageError: the problem breaks its contract. Its model is not new at each call, depends on more than the seed
            or has no trainable parameter; its loss is not a scalar, does not depend on the parameters, is not finite
            or is random; or its count is no number, is negative, or is 0 for items with a loss.
        CannotJudgeError: a window has no valid targets, so there is no mean over it.
    """
    with seeded(None, instance.device):
        return _objective_fault(instance)


def _objective_fault(instance: Instance) -> str | None:
    name, plan = _name(instance), instance.case.plan
    _expect_fresh_models(instance)
    model = instance.model(torch.float64)
    make_optimizer(None, model)
    for parameter_name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name}: the parameter {parameter_name!r} has a post-accumulate-grad hook, which changes .grad after "
                "autograd: register it in the loop, or remove it for the verification"
            )
    _expect_targets(instance, model)
    everything = instance.batch(range(plan.total_items), torch.float64)
    before = {key: tensor.detach().clone() for key, tensor in _tensors(model)}
    try:
        whole = _loss(instance, model, everything, need_graph=True)
    except (RuntimeError, ValueError):
        said = batch_norm_refusal(model) if instance.users_problem and plan.total_items == 1 else None
        if said is None:
            raise
        return f"{name}: {said}"
    _expect_stateless(instance, model, everything, whole, before)
    if instance.problem.reduction == "batch":
        return None
    terms, counts = [], []
    total = _weight(instance, everything)
    for j in range(len(plan.micro_batches)):
        batch = instance.batch(plan.items(j), torch.float64)
        weight = _weight(instance, batch)
        if weight:
            try:
                terms.append(weight * _loss(instance, model, batch))
            except (RuntimeError, ValueError):
                if (said := batch_norm_refusal(model)) is None:
                    raise
                return f"{name}: {said}"
            counts.append(weight)
    if instance.problem.reduction == "mean" and not adds_up(total, counts):
        return (
            f"{name}: Problem.count of all {plan.total_items} items is {total:.6g}, but the counts of the "
            f"micro-batches {list(plan.micro_batches)} add up to {sum(counts):.6g}; the count must be a sum over items"
        )
    if not adds_up(total * whole, terms):
        if meant := _meant(instance, model, whole):
            return (
                f"{name}: the loss is not a mean with the divisor Problem.count, so no loop can be right: the large "
                f"batch's loss times its count is {total * whole:.6g}, those of the micro-batches "
                f"{list(plan.micro_batches)} add up to {sum(terms):.6g}; {meant}"
            )
        return (
            f"{name}: the objective is not a sum over items, so no plain accumulation can equal the large batch and "
            f"no loop is to blame: {batch_dependence(instance, model)}. {AS_A_BATCH}. The large batch's loss times its "
            f"count is {total * whole:.6g}, those of the micro-batches {list(plan.micro_batches)} add up to "
            f"{sum(terms):.6g}"
        )
    return None


def _name(instance: Instance) -> str:
    return instance.case.problem_name or "the problem"


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _expect_stateless(
    instance: Instance, model: torch.nn.Module, batch: Batch, loss: float, before: dict[str, torch.Tensor]
) -> None:
    """Raise `UsageError` if a forward writes a parameter, or the loss of the same batch changes.

    Args:
        instance: of the problem.
        model: after one forward.
        batch: that the forward was on.
        loss: of that forward.
        before: parameters and buffers before it.
    """
    name = _name(instance)
    changed = [key for key, tensor in _tensors(model) if not torch.equal(tensor, before[key])]
    trainable = {key for key, _ in model.named_parameters()}
    if written := [key for key in changed if key in trainable]:
        raise UsageError(
            f"{name}: the forward changes the parameter {written[0]!r}, as an embedding with max_norm or a clamp of a "
            "weight does, so the gradient of a window depends on how often the loop runs it: do so after the "
            "optimizer's step, or leave it out for the verification"
        )
    again = _loss(instance, model, batch)
    # a buffer that has nearly converged changes the loss by less than float32 parts of a model may
    if again == loss or (adds_up(loss, [again]) and not changed) or abs(again - loss) <= EXACT * abs(loss):
        return
    said = f"{name}: the loss of the same batch is first {loss:.6g} and then {again:.6g}; "
    if changed:
        raise UsageError(
            f"{said}a forward changes the buffer {changed[0]!r} and the loss depends on it, as the power iteration of "
            "a spectral norm or a moving average does: keep that module in eval mode, or freeze the buffer"
        )
    raise UsageError(f"{said}it must not be random: set dropout to 0, or pass its mask with the batch")


def _expect_fresh_models(instance: Instance) -> None:
    """Raise `UsageError` if two models share tensors, or differ although their seed is the same."""
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
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name}: {key} has no shape before the first forward, since its module is lazy: pass a batch through "
                "the model inside Problem.model, or name the sizes"
            )
        if tensor.is_meta:
            raise UsageError(f"{name}: {key} is on the meta device and has no values: materialise the model first")
        if tensor.shape != other[key].shape or not torch.equal(tensor, other[key]):
            raise UsageError(
                f"{name}: Problem.model(seed) must return the same values for the same seed, got two that differ in "
                f"{key}: call torch.manual_seed(seed) before the module is built"
            )


def _meant(instance: Instance, model: torch.nn.Module, whole: float) -> str | None:
    """Return what the loss is a mean over, or that it is a sum; None if neither fits."""
    plan = instance.case.plan
    batches = [instance.batch(plan.items(j), torch.float64) for j in range(len(plan.micro_batches))]
    try:
        losses = [_loss(instance, model, batch) for batch in batches]
    except (UsageError, RuntimeError, ValueError):
        return None  # a micro-batch without valid targets: the loss is neither a mean over all items nor a sum
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
    """Return the unequal weights of items in a user's mean, in words, or None if it is no weighted mean."""
    if instance.problem.reduction == "sum" or instance.users_problem is None:
        return None
    items = Items(instance.drawn(WEIGHED_ITEMS, torch.float64))
    try:
        weights = weights_of_items(lambda chosen: _loss(instance, model, items.__getitems__(chosen)), WEIGHED_ITEMS)
    except (UsageError, RuntimeError, ValueError):
        return None  # a single item may have no valid targets, and batch normalization rejects it
    if weights is None:
        return None
    return (
        f"it is a mean with unequal weights of items, {proportion(weights)} for {WEIGHED_ITEMS} of them (such as a "
        "mean over tokens or over valid targets): let Problem.count return the divisor of the mean"
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
            "Problem.count must be 0 for items without valid targets"
        )
    return value


def _weight(instance: Instance, batch: Batch) -> float:
    """Return the factor that turns a batch's loss into a sum over items."""
    if instance.problem.reduction == "sum":
        return 1.0
    count = instance.count(batch)
    if count.numel() != 1 or not math.isfinite(float(count)) or float(count) < 0:
        raise UsageError(
            f"{_name(instance)}: Problem.count(batch) must return a number that is finite and not negative; "
            f"got {count.tolist()}"
        )
    return float(count)


def _expect_targets(instance: Instance, model: torch.nn.Module) -> None:
    """Raise `CannotJudgeError` if the count of a window is 0, and `UsageError` if its loss says that it should."""
    if instance.problem.reduction != "mean":
        return
    plan = instance.case.plan
    for index in range(len(plan.windows)):
        items = plan.window_items(index)
        batch = instance.batch(items, torch.float64)
        if _weight(instance, batch):
            continue
        try:
            loss = _loss(instance, model, batch)
        except (UsageError, RuntimeError, ValueError):
            loss = 0.0  # a mean of nothing is no number, and batch normalization rejects a single item
        if loss:
            raise UsageError(
                f"{_name(instance)}: Problem.count is 0 for {len(items)} items whose loss is {loss:.6g}: return what "
                "the loss divides by, which is 0 only where all targets are ignored"
            )
        raise CannotJudgeError("a window has no valid targets: Problem.count of its items is 0")
