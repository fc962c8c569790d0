"""Whether a Problem is a sum over items: found before any loop is blamed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradcheck_suite.catalogue.tables import is_accumulable
from gradcheck_suite.core.case import Case
from gradcheck_suite.core.comparison import LOSS_TOLERANCE
from gradcheck_suite.core.contract import Batch, Problem
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import counted, error_text
from gradcheck_suite.errors import UsageError
from gradcheck_suite.reference.large_batch import (
    REFERENCES,
    CannotJudgeError,
    Reference,
    WindowReference,
)
from gradcheck_suite.run.instance import (
    Instance,
    Items,
    generated_instance,
    seeded,
    tensor_leaves,
    user_instance,
)
from gradcheck_suite.run.optimizers import optimizer_of
from gradcheck_suite.run.runner import users_line

LARGEST_COUNT = 64
"""Largest whole number in a proportion of weights that is printed in whole numbers."""


def weights_of_items(loss: Callable[[Sequence[int]], float], items: int) -> list[float] | None:
    """Return the weights relative to the first item's, or None if the loss is no weighted mean or
    all are equal.

    If a batch's loss is sum(w_i l_i) / sum(w_i), the loss of two items lies between their own
    losses and determines the quotient of their weights. The quotients must then explain the losses
    of all other batches.

    Args:
        loss: indices of items -> the loss of their batch.
        items: number of items; at least three are needed to recognise a loss that is no weighted
            mean.
    """
    per_item = [loss([i]) for i in range(items)]
    scale = max(map(abs, per_item))
    weights = [1.0]
    for j in range(1, items):
        together = loss([0, j])
        # the first item has no weight beside this one, or both have the same loss: the quotient
        # below has no digits
        if abs(together - per_item[j]) <= LOSS_TOLERANCE * scale:
            return None
        weights.append((per_item[0] - together) / (together - per_item[j]))
    # a negative weight is no mean's, and of equal weights there is nothing to tell
    if min(weights) <= 0 or max(weights) - min(weights) <= LOSS_TOLERANCE:
        return None
    for batch in [*itertools.combinations(range(items), 2), tuple(range(items))]:
        expected = sum(weights[i] * per_item[i] for i in batch) / sum(weights[i] for i in batch)
        # negated, so that a NaN refutes as well
        if not abs(loss(batch) - expected) <= LOSS_TOLERANCE * scale:
            return None
    return weights


def proportion(weights: Sequence[float]) -> str:
    """Return positive weights as `5 : 3 : 4`, in whole numbers if small ones fit."""
    for count in range(1, LARGEST_COUNT + 1):
        scaled = [count * weight / weights[0] for weight in weights]
        if all(math.isclose(x, round(x), rel_tol=1e-3 / count) for x in scaled):
            return " : ".join(str(round(x)) for x in scaled)
    return " : ".join(f"{weight / weights[0]:.3g}" for weight in weights)


# Finds the module, or the loss, that makes an objective not separable over samples.


AS_A_BATCH = (
    "If a loop computes it for a whole window (GradCache, cached negatives), state"
    ' Problem(reduction="batch")'
)
FINE = 1e-9
"""Share of the largest value up to which outputs are equal: what computes them has the same shapes."""
MOST_REPLACED = 8
"""Items that are replaced, one at a time, to see whether another one's output changes."""
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
    # the model before the loss: a module that mixes items makes every loss over them inseparable
    if (found := _mixing_module(instance, model, whole)) is not None:
        name, module = found
        where = f"{name or 'the model'} ({type(module).__name__})"
        sentence = f"{where} gives an item an output that depends on the other items"
        if isinstance(module, _BatchNorm) and module.training:
            sentence += (
                ": batch normalization in train mode. Keep it in eval mode (frozen statistics), or"
                " use group or layer normalization"
            )
        return sentence
    if _losses_add_up(instance, model):
        return (
            "the losses of the micro-batches add up to the large batch's and the gradients do not:"
            " a backward (a custom autograd.Function, a hook) gives an item a gradient that depends"
            " on the other items"
        )
    if (constant := _constant_per_batch(instance, model)) is not None:
        return (
            f"every batch's loss contains {constant:.6g} once, whatever its items, as a penalty on"
            " parameters would: multiply it by the number of items, or leave it to the optimizer"
        )
    return (
        "the model is separable over samples and the loss is not: it compares items with each other"
        " (in-batch negatives, pairs, rankings), or contains statistics of the batch (a product of"
        " batch means, targets standardised over the batch)"
    )


def _plain_loss(instance: Instance, model: torch.nn.Module, batch: Batch) -> float:
    return float(instance.problem.loss(model, batch).detach())


def _micro_batches(instance: Instance) -> list[Batch]:
    return [instance.batch(items, torch.float64) for items in instance.case.plan.cuts]


def _losses_add_up(instance: Instance, model: torch.nn.Module) -> bool:
    """Return whether losses times counts add up to rounding, so that the forward is a sum over
    items.
    """
    batches = [
        instance.batch(range(instance.case.plan.total_items), torch.float64),
        *_micro_batches(instance),
    ]
    weights = [
        1.0 if instance.problem.reduction == "sum" else float(instance.count(batch))
        for batch in batches
    ]
    whole, *parts = (
        weight * _plain_loss(instance, model, batch) if weight else 0.0
        for weight, batch in zip(weights, batches, strict=True)
    )
    return abs(whole - sum(parts)) <= EXACT * max(abs(whole), sum(map(abs, parts)))


def _constant_per_batch(instance: Instance, model: torch.nn.Module) -> float | None:
    """Return what a summed loss contains once in every batch, or None: all pairs of three items
    must show it.
    """
    # a generated problem has the items of its case alone; of a user's any number can be drawn
    drawn = 3 if instance.users_problem else instance.case.plan.total_items
    if instance.problem.reduction != "sum" or drawn < 3:
        return None
    items = Items(instance.drawn(3, torch.float64))

    def loss(*indices: int) -> float:
        return _plain_loss(instance, model, items.__getitems__(indices))

    first, *others = (loss(i) + loss(j) - loss(i, j) for i, j in ((0, 1), (0, 2), (1, 2)))
    scale = LOSS_TOLERANCE * max(abs(loss(0, 1, 2)), abs(first))
    return (
        first
        if abs(first) > scale and all(abs(other - first) <= scale for other in others)
        else None
    )


def batch_norm_refusal(model: torch.nn.Module) -> str | None:
    """Return a sentence about the batch normalization that rejects a micro-batch of one item, or
    None.
    """
    found = next(
        ((n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None
    )
    return found and (
        f"{found[0]} ({type(found[1]).__name__}) rejects a micro-batch with one value per channel,"
        " and gives an item an output that depends on the other items: batch normalization in"
        " train mode, so no plain accumulation can equal the large batch and no loop is to blame."
        " Keep it in eval mode (frozen statistics), or use group or layer normalization"
    )


def _mixing_module(
    instance: Instance, model: torch.nn.Module, whole: Batch
) -> tuple[str, torch.nn.Module] | None:
    """Return the first module whose output for an item changes with another item, while its inputs
    for it do not.

    Several items are replaced in turn: where few values occur, as after the layer normalization of
    two features, one may by chance leave the statistics of the batch as they are.
    """
    items = Items(whole)
    total = instance.case.plan.total_items
    before = _calls(instance, model, whole)
    doubled = _calls_on_all_twice(instance, model, items, total)
    for place in range(min(total, MOST_REPLACED)):
        order = list(range(total))
        # another item of the batch in its place, so that the values stay among those that the model
        # takes
        order[place] = (place + 1) % total
        try:
            after = _calls(instance, model, items.__getitems__(order))
        except (RuntimeError, ValueError, IndexError):
            continue  # of two equal items, as where a kernel matrix is singular
        # an expert without items is not called
        for key in (key for key in before if key in after):
            is_changed = [
                _is_any_changed(then, now, twice, place, total)
                for then, now, twice in zip(
                    before[key], after[key], doubled.get(key, (None, None)), strict=True
                )
            ]
            # the innermost module comes first, and is the one where the mixing begins
            if is_changed == [False, True]:
                return key[0], model.get_submodule(key[0])
    return None


def _calls_on_all_twice(
    instance: Instance, model: torch.nn.Module, items: Items, total: int
) -> Calls:
    """Return the calls on a batch that has each item twice: what is of items is twice as long."""
    try:
        return _calls(instance, model, items.__getitems__([*range(total), *range(total)]))
    except (RuntimeError, ValueError, IndexError):
        return {}  # as where a kernel matrix of equal items is singular


def _is_any_changed(
    before: Values, after: Values, doubled: Values | None, place: int, total: int
) -> bool:
    """Return whether values of items beside that at a place have changed.

    Args:
        before: the inputs or the outputs of a call.
        after: the same with another item at the place.
        doubled: the same on a batch that has each item twice; None where it is not known.
        place: of the item that was replaced.
        total: number of items.
    """
    lengths = [2 * total for _ in before] if doubled is None else list(map(_length, doubled))
    return any(
        # the last state of an RNN of two directions has these along its first axis
        length == 2 * total and _changes(then, now, place, total)
        for then, now, length in zip(before, after, lengths, strict=False)
    )


def _length(value: torch.Tensor) -> int:
    return len(value) if value.ndim else 0


def _changes(before: torch.Tensor, after: torch.Tensor, place: int, total: int) -> bool:
    """Return whether values of items change beside that at a place; no values of items do."""
    # without the items along the first axis nobody can say whose value it is
    if before.shape != after.shape or not before.ndim or len(before) != total:
        return False
    a, b = (torch.cat((values[:place], values[place + 1 :])) for values in (before, after))
    scale = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0).max()) if a.numel() else 0.0
    return not bool((((a - b).abs() <= FINE * scale) | (a.isnan() & b.isnan())).all())


@torch.no_grad()
def _calls(instance: Instance, model: torch.nn.Module, batch: Batch) -> Calls:
    """Return the inputs and outputs of every call of a module on a batch."""
    found: Calls = {}
    seen: Counter[str] = Counter()
    handles = []

    def copied(values: Any) -> Values:
        # a copy, since the next module may write in place
        return [t.detach().clone() for t in tensor_leaves(values) if t.is_floating_point()]

    for name, module in model.named_modules():

        def note(module: torch.nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            found[name, seen[name]] = copied(inputs), copied(output)
            seen[name] += 1

        handles.append(module.register_forward_hook(note))
    try:
        instance.problem.loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


# Checks of a problem before any loop runs: its contract, and that its objective is a sum over
# items.


WEIGHED_ITEMS = 4
"""Number of items from which a weighted mean is recognised: enough to refute one that is no weighted mean."""


def adds_up(whole: float, parts: list[float]) -> bool:
    """Return whether parts add up to a whole, up to `LOSS_TOLERANCE` of their sizes.

    The scripts of violations have a copy of this function.
    """
    return abs(whole - sum(parts)) <= LOSS_TOLERANCE * max(sum(map(abs, parts)), abs(whole))


def objective_fault(instance: Instance) -> str | None:
    """Return why no accumulation can equal the large batch of this problem, or None.

    The check runs forward passes on the case's micro-batches. count(X) * loss(X) of all items X
    must equal the sum of count(X_i) * loss(X_i) over the micro-batches X_i, without the counts if
    the reduction is a sum.

    Raises:
        UsageError: the problem breaks its contract. Its model is not new at each call, depends on
            more than the seed or has no trainable parameter; its loss is not a scalar, does not
            depend on the parameters, is not finite or is random; or its count is no number, is
            negative, or is 0 for items with a loss.
        CannotJudgeError: a window has no valid targets, so there is no mean over it.
    """
    # a problem may draw random numbers, and the loop has to find the generators as they were
    with seeded(None, instance.device):
        return _objective_fault(instance)


def _objective_fault(instance: Instance) -> str | None:
    name = _name(instance)
    plan = instance.case.plan
    _expect_fresh_models(instance)
    model = instance.model(torch.float64)
    # it refuses a model without a trainable parameter
    optimizer_of(None, model)
    _expect_no_hooks(name, model)
    _expect_targets(instance, model)
    everything = instance.batch(range(plan.total_items), torch.float64)
    before = {key: tensor.detach().clone() for key, tensor in _tensors(model)}
    try:
        whole = _checked_loss(
            instance,
            model,
            everything,
            need_graph=True,
        )
    except (RuntimeError, ValueError):
        sentence = (
            batch_norm_refusal(model) if instance.users_problem and plan.total_items == 1 else None
        )
        if sentence is None:
            raise
        return f"{name}: {sentence}"
    _expect_stateless(instance, model, everything, whole, before)
    # its windows are computed whole, so there is nothing that would have to add up
    if instance.problem.reduction == "batch":
        return None
    terms = []
    counts = []
    total = _weight(instance, everything)
    for batch in _micro_batches(instance):
        weight = _weight(instance, batch)
        # a micro-batch without valid targets has no part in the sum, and its mean may be NaN
        if weight:
            try:
                terms.append(weight * _checked_loss(instance, model, batch))
            except (RuntimeError, ValueError):
                if (sentence := batch_norm_refusal(model)) is None:
                    raise
                return f"{name}: {sentence}"
            counts.append(weight)
    # before the losses, which a wrong count makes wrong as well
    if instance.problem.reduction == "mean" and not adds_up(total, counts):
        return (
            f"{name}: Problem.count of all {plan.total_items} items is {total:.6g}, but the counts"
            f" of the micro-batches {list(plan.micro_batches)} add up to {sum(counts):.6g}; the"
            " count must be a sum over items"
        )
    if not adds_up(total * whole, terms):
        # a wrong reduction is the common mistake, and far easier to mend than a loss that compares
        # items
        if meant := _meant(instance, model, whole):
            return (
                f"{name}: the loss is not a mean with the divisor Problem.count, so no loop can be"
                f" right: the large batch's loss times its count is {total * whole:.6g}, those of"
                f" the micro-batches {list(plan.micro_batches)} add up to {sum(terms):.6g}; {meant}"
            )
        return (
            f"{name}: the objective is not a sum over items, so no plain accumulation can equal the"
            f" large batch and no loop is to blame: {batch_dependence(instance, model)}."
            f" {AS_A_BATCH}. The large batch's loss times its count is {total * whole:.6g}, those"
            f" of the micro-batches {list(plan.micro_batches)} add up to {sum(terms):.6g}"
        )
    return None


def _expect_no_hooks(name: str, model: torch.nn.Module) -> None:
    for parameter_name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name}: the parameter {parameter_name!r} has a post-accumulate-grad hook, which"
                " changes .grad after autograd: register it in the loop, or remove it for the"
                " verification"
            )


def _name(instance: Instance) -> str:
    return instance.case.problem_name or "the problem"


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _expect_stateless(
    instance: Instance,
    model: torch.nn.Module,
    batch: Batch,
    loss: float,
    before: dict[str, torch.Tensor],
) -> None:
    """Raise `UsageError` if a forward writes a parameter, or the loss of the same batch changes.

    Args:
        instance: the instance of the problem.
        model: after one forward.
        batch: the batch of the forward.
        loss: the loss of that forward.
        before: parameters and buffers before it.
    """
    name = _name(instance)
    changed = [key for key, tensor in _tensors(model) if not torch.equal(tensor, before[key])]
    trainable = {key for key, _ in model.named_parameters()}
    if written := [key for key in changed if key in trainable]:
        raise UsageError(
            f"{name}: the forward changes the parameter {written[0]!r}, as an embedding with"
            " max_norm or a clamp of a weight does, so the gradient of a window depends on how"
            " often the loop runs it: do so after the optimizer's step, or leave it out for the"
            " verification"
        )
    second = _checked_loss(instance, model, batch)
    # a buffer that has nearly converged changes the loss by less than float32 parts of a model may
    if (
        second == loss
        or (adds_up(loss, [second]) and not changed)
        or abs(second - loss) <= EXACT * abs(loss)
    ):
        return
    sentence = f"{name}: the loss of the same batch is first {loss:.6g} and then {second:.6g}; "
    if changed:
        raise UsageError(
            f"{sentence}a forward changes the buffer {changed[0]!r} and the loss depends on it, as"
            " the power iteration of a spectral norm or a moving average does: keep that module in"
            " eval mode, or freeze the buffer"
        )
    raise UsageError(
        f"{sentence}it must not be random: set dropout to 0, or pass its mask with the batch"
    )


def _expect_fresh_models(instance: Instance) -> None:
    """Raise `UsageError` if two models share tensors, or differ although their seed is the same."""
    name = _name(instance)
    first = instance.problem.model(instance.case.seed)
    second = instance.problem.model(instance.case.seed)
    for model in (first, second):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"{name}: Problem.model(seed) must return a torch.nn.Module, got"
                f" {type(model).__name__}"
            )
    if first is second:
        raise UsageError(
            f"{name}: Problem.model(seed) must return a fresh module each time, got the same one"
            " twice: build it inside"
        )
    one, other = (dict(_tensors(m)) for m in (first, second))
    # by identity: equal values are what the same seed is for
    owned = {id(tensor): key for key, tensor in one.items()}
    if shared := [key for key, tensor in other.items() if id(tensor) in owned]:
        raise UsageError(
            f"{name}: two models from Problem.model share {shared[0]}, so one loop's training would"
            " change another's start: create every parameter and buffer inside"
        )
    if one.keys() != other.keys():
        raise UsageError(
            f"{name}: Problem.model(seed) must return the same model for the same seed, got two whose"
            " parameters or buffers have different names"
        )
    for key, tensor in one.items():
        # before its shape is asked for, at which a lazy parameter raises
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name}: {key} has no shape before the first forward, since its module is lazy:"
                " pass a batch through the model inside Problem.model, or name the sizes"
            )
        if tensor.is_meta:
            raise UsageError(
                f"{name}: {key} is on the meta device and has no values: materialise the model"
                " first"
            )
        if tensor.shape != other[key].shape or not torch.equal(tensor, other[key]):
            raise UsageError(
                f"{name}: Problem.model(seed) must return the same values for the same seed, got"
                f" two that differ in {key}: call torch.manual_seed(seed) before the module is"
                " built"
            )


def _meant(instance: Instance, model: torch.nn.Module, whole: float) -> str | None:
    """Return what the loss is a mean over, or that it is a sum; None if neither fits."""
    plan = instance.case.plan
    try:
        losses = [_checked_loss(instance, model, batch) for batch in _micro_batches(instance)]
    except (UsageError, RuntimeError, ValueError):
        return None  # a micro-batch without valid targets: the loss is neither a mean over all items nor a sum
    guesses: dict[str, list[float]] = {}
    if instance.problem.reduction == "mean":
        guesses["it is a mean over items: leave Problem.count out"] = [
            float(n) for n in plan.micro_batches
        ]
        guesses['it is a sum over items: pass reduction="sum"'] = []
    else:
        guesses['it is a mean over items: pass reduction="mean"'] = [
            float(n) for n in plan.micro_batches
        ]
    for text, weights in guesses.items():
        terms = [w * loss for w, loss in zip(weights or [1.0] * len(losses), losses, strict=True)]
        if adds_up((sum(weights) or 1.0) * whole, terms):
            return text
    return _weighed(instance, model)


def _weighed(instance: Instance, model: torch.nn.Module) -> str | None:
    """Return the unequal weights of items in a user's mean, in words, or None if it is no weighted
    mean.
    """
    if instance.problem.reduction == "sum" or instance.users_problem is None:
        return None
    items = Items(instance.drawn(WEIGHED_ITEMS, torch.float64))
    try:
        weights = weights_of_items(
            lambda chosen: _checked_loss(instance, model, items.__getitems__(chosen)), WEIGHED_ITEMS
        )
    except (UsageError, RuntimeError, ValueError):
        return None  # a single item may have no valid targets, and batch normalization rejects it
    if weights is None:
        return None
    return (
        f"it is a mean with unequal weights of items, {proportion(weights)} for {WEIGHED_ITEMS} of"
        " them (such as a mean over tokens or over valid targets): let Problem.count return the"
        " divisor of the mean"
    )


def _checked_loss(
    instance: Instance, model: torch.nn.Module, batch: Batch, *, need_graph: bool = False
) -> float:
    name = _name(instance)
    # most of these are asked for their value alone, and a graph takes memory
    with torch.set_grad_enabled(need_graph):
        loss = instance.problem.loss(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.ndim:
        got = (
            f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise UsageError(
            f"{name}: Problem.loss(model, batch) must return a scalar tensor, got {got}"
        )
    if need_graph and not loss.requires_grad:
        raise UsageError(
            f"{name}: the loss does not depend on the model's parameters: there is no gradient to"
            " check"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        items = len(next(tensor_leaves(batch)))
        raise UsageError(
            f"{name}: the loss of {items} drawn items is {value}, so there is no gradient to"
            " compare; Problem.count must be 0 for items without valid targets"
        )
    return value


def _weight(instance: Instance, batch: Batch) -> float:
    """Return the factor that turns a batch's loss into a sum over items."""
    if instance.problem.reduction == "sum":
        return 1.0
    count = instance.count(batch)
    if count.numel() != 1 or not math.isfinite(float(count)) or float(count) < 0:
        raise UsageError(
            f"{_name(instance)}: Problem.count(batch) must return a number that is finite and not"
            f" negative; got {count.tolist()}"
        )
    return float(count)


def _expect_targets(instance: Instance, model: torch.nn.Module) -> None:
    """Raise `CannotJudgeError` if the count of a window is 0, and `UsageError` if its loss says
    that it should.
    """
    if instance.problem.reduction != "mean":
        return
    plan = instance.case.plan
    # each window and not each micro-batch: a micro-batch may be empty of targets, a mean over a
    # window not
    for index in range(len(plan.windows)):
        items = plan.window_items(index)
        batch = instance.batch(items, torch.float64)
        if _weight(instance, batch):
            continue
        try:
            loss = _checked_loss(instance, model, batch)
        except (UsageError, RuntimeError, ValueError):
            # a mean of nothing is no number, and batch normalization rejects a single item
            loss = 0.0
        if loss:
            raise UsageError(
                f"{_name(instance)}: Problem.count is 0 for {len(items)} items whose loss is"
                f" {loss:.6g}: return what the loss divides by, which is 0 only where all targets"
                " are ignored"
            )
        raise CannotJudgeError("a window has no valid targets: Problem.count of its items is 0")


# The reference of a case, or the violation that its problem is not accumulable, before any loop is
# blamed.


def _not_accumulable(case: Case, explanation: str) -> Violation:
    return Violation(
        "not-accumulable",
        "not-accumulable",
        explanation,
        case,
    )


def gradient_fault(reference: Reference, window: WindowReference) -> Violation | None:
    """Return why a problem that passes the forward-only check is not accumulable, or None where it
    is.

    The forward-only check compares one value, with a tolerance for float32 inside a model. So
    before a loop is blamed, torch's own accumulation in float64 must give the large batch's
    gradient.
    """
    comparison = window.compare(window.accumulated())
    difference = comparison.worst
    if difference.ratio <= 1:
        return None
    parameter, _ = reference.layout.place(difference.index)
    explanation = (
        "the objective is not a sum over items, so no plain accumulation can equal the large batch"
        f" and no loop is to blame: {batch_dependence(reference.instance, window.model())}."
        f" {AS_A_BATCH}. The gradients of {parameter} in window {window.index}, of the large batch"
        " and as the sum of the micro-batches', differ by"
        f" {error_text(difference.error, difference.allowed)}"
    )
    found = _not_accumulable(reference.instance.case, explanation)
    return replace(
        found,
        parameter=parameter,
        epoch=0,
        window=window.index,
        evidence=comparison,
    )


def _cross_sample(case: Case) -> tuple[Reference | None, Violation | None]:
    """Return what `reference_of` does, for a generated problem with a kind that is not separable
    over samples.
    """
    try:
        fault = objective_fault(generated_instance(case))
    except (RuntimeError, ValueError) as error:
        # batch normalization refuses an epoch of one item, or one without valid targets
        raise CannotJudgeError(f"the plain large batch fails: {error}") from error
    if fault:
        return None, _not_accumulable(case, fault)
    reference = REFERENCES.get(case, None)
    for index in range(len(case.plan.windows)):
        if found := gradient_fault(reference, reference.window(index)):
            return None, found
    # on this case's items it makes no difference, and a loop can be judged
    return reference, None


def reference_of(case: Case, problem: Problem | None) -> tuple[Reference | None, Violation | None]:
    """Return the case's reference, and why the problem is not accumulable, where that is so."""
    if problem is None:
        if case.spec is not None and not is_accumulable(case.spec):
            return _cross_sample(case)
        return REFERENCES.get(case, problem), None
    try:
        instance = user_instance(case, problem)
        if fault := objective_fault(instance):
            return None, _not_accumulable(case, fault)
        reference = REFERENCES.get(case, problem)
        # built now, so that an exception of the user's code is told as the problem's and not as the
        # loop's
        for window in range(len(case.plan.windows)):
            reference.window(window)
    except (UsageError, CannotJudgeError):
        raise
    except (Exception, SystemExit) as error:
        # a user's own code, which may raise anything
        fewest = min(case.plan.micro_batches)
        most = case.plan.total_items
        items = counted(most, "item")
        batches = f"batches of {fewest} to {items}" if fewest < most else f"one batch of {items}"
        raise UsageError(
            f"the problem {case.problem} failed before any loop ran, on {batches}: "
            f"{type(error).__name__}: {error} ({users_line(error)})"
        ) from error
    return reference, None
