"""What a loop computed its losses from: the model's mode and parameters, and the batches, in one recorded run.

The losses are computed again from what they were called with. Where that gives the observed gradient, and the right
inputs do not, the inputs are the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, listed
from gradcheck_suite.execution.batches import leaves, map_leaves, named_leaves
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.references.torch_reference import Gradients, parameter_gradients
from gradcheck_suite.schema.contract import Batch

Flat = Callable[[Gradients], Vector]
CLOSE = 1e-9
"""Share of the largest element up to which a gradient that is computed again is the same."""


@dataclass
class LossCall:
    """A call of the loss.

    Attributes:
        step: number of optimizer steps before it.
        batch: a copy of the batch.
        parameters: name -> a copy of the value, of the model that it was called with; none where it was called with
            the output of one, as `run.criterion` does. The batch is without what the model reads then.
        training: name of each module -> its mode.
        cotangent: what backward handed to the loss; None where the loss was not sent backward.
    """

    step: int
    batch: Batch
    parameters: dict[str, torch.Tensor]
    training: dict[str, bool]
    cotangent: torch.Tensor | None = None

    def note(self, cotangent: torch.Tensor) -> None:
        """Add what a backward hands to the loss."""
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent


class LossRecorder:
    """Records the calls of a loss.

    Attributes:
        calls: those with gradients, in order.
        called: whether the loop calls the loss to train, which a look under `no_grad` is not.
        original: the instance whose loss is recorded.
        instance: the instance that records.
    """

    def __init__(self, instance: Instance) -> None:
        self.calls: list[LossCall] = []
        self.called = False
        self.original = instance
        self._loss, self._steps = instance.problem.loss, 0
        self.instance = replace(instance, problem=replace(instance.problem, loss=self._recorded))

    def note_step(self, *_: Any) -> None:
        """Count an optimizer's step."""
        self._steps += 1

    def _recorded(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self.called |= torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            return self._loss(model, batch)
        read = model if isinstance(model, torch.nn.Module) else torch.nn.ParameterDict()
        call = LossCall(
            self._steps,
            map_leaves(lambda t: t.detach().clone(), batch),
            {name: p.detach().clone() for name, p in read.named_parameters()},
            _modes(read),
        )
        loss = self._loss(model, batch)
        if loss.requires_grad:
            self.calls.append(call)
            loss.register_hook(call.note)
        return loss


def _modes(model: torch.nn.Module) -> dict[str, bool]:
    """Return whether each module is in train mode, by name."""
    return {name: module.training for name, module in model.named_modules()}


def run_recorded(runner: LoopRunner, instance: Instance) -> tuple[LossRecorder, Outcome | None]:
    """Run a loop and record its losses; the outcome is None where it raised or no run is left."""
    recorder = LossRecorder(instance)
    if instance.case.plan.ranks:
        # the losses are called in the ranks' own processes, where nobody records them
        recorder.called = True
        outcome = runner.run(instance)
        return recorder, None if outcome is None or outcome.raised is not None else outcome
    handle = register_optimizer_step_post_hook(recorder.note_step)
    try:
        outcome = runner.run(recorder.instance)
    finally:
        handle.remove()
    return recorder, None if outcome is None or outcome.raised is not None else outcome


def explain_inputs(
    recorder: LossRecorder,
    flat: Flat,
    members: Sequence[int],
    observed: Vector,
    step: int,
    parameters: dict[str, torch.Tensor] | None = None,
) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is right for other inputs than the contract's, or None.

    Args:
        recorder: of the run.
        flat: returns gradients by name as one vector, (P,).
        members: indices of the micro-batches of the step's window.
        observed: (P,): the wrong gradient.
        step: index of the step.
        parameters: those that the step changes; None for the initial ones.
    """
    sent = [call for call in recorder.calls if call.step == step and call.cotangent is not None]
    instance, right = recorder.original, recorder.original.model()
    if parameters is not None:
        right.load_state_dict(parameters, strict=False)
    sent = [_completed(instance, right, members, *numbered) for numbered in enumerate(sent)]
    times, rest = divmod(len(sent), len(members))
    passes = [sent]
    if times > 1 or rest:
        # what an earlier pass over the window computed may have been cleared
        passes.append(sent[-len(members) :])
    if times > 1 and not rest:
        # an earlier loss of each micro-batch may be of use for its inputs alone, as in adversarial training
        passes.append(sent[times - 1 :: times])
    for calls in passes:
        if not calls or not _gives(instance, flat, calls, observed):
            continue
        found = {}
        for name, sentence, corrected in _differences(instance, right, members, calls):
            if corrected is None or not _gives(instance, flat, corrected, observed):
                found[name] = sentence
        if found:
            return Diagnosis(" or ".join(found), "; or: ".join(found.values()))
    return None


def _gives(instance: Instance, flat: Flat, calls: Sequence[LossCall], observed: Vector) -> bool:
    """Whether the losses, computed again as they were called, have a gradient."""
    total = np.zeros_like(observed)
    for call in calls:
        model = instance.model()
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        if modules.keys() != call.training.keys() or parameters.keys() != call.parameters.keys():
            return False
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(call.parameters[name])
        for name, module in modules.items():
            module.training = call.training[name]
        assert call.cotangent is not None
        loss = instance.problem.loss(model, map_leaves(torch.clone, call.batch))
        total += flat(parameter_gradients(loss * call.cotangent, model))
    return bool((np.abs(total - observed) <= CLOSE * np.abs(total).max(initial=0.0)).all())


def _completed(
    instance: Instance, right: torch.nn.Module, members: Sequence[int], place: int, call: LossCall
) -> LossCall:
    """Return a call that was given the output of a model, with the model and the input that the contract has there."""
    if call.parameters:
        return call
    given = dict(named_leaves(call.batch))
    own = instance.batch(instance.case.plan.items(members[place % len(members)]))
    names = iter([name for name, _ in named_leaves(own)])
    return replace(
        call,
        batch=map_leaves(lambda t: given.get(next(names), t), own),
        parameters={name: p.detach() for name, p in right.named_parameters()},
        training=_modes(right),
    )


def _differences(
    instance: Instance, model: torch.nn.Module, members: Sequence[int], calls: Sequence[LossCall]
) -> Iterator[tuple[str, str, list[LossCall] | None]]:
    """Yield name and sentence of each input that is not the contract's, and the calls with it corrected."""
    right = _modes(model)
    if any(call.training != right for call in calls):
        yield "wrong-mode", _mode_text(right, calls), [replace(call, training=right) for call in calls]
    start = {name: p.detach() for name, p in model.named_parameters()}
    if any(not torch.equal(value, start[name]) for call in calls for name, value in call.parameters.items()):
        yield "other-parameters", _moved_text(start, calls), [replace(call, parameters=start) for call in calls]
    if (whole := _split_text(instance, members, calls)) is not None:
        yield *whole, None
    elif changed := _changed_text(instance, members, calls):
        yield "changed-batch", changed, None


def _mode_text(right: dict[str, bool], calls: Sequence[LossCall]) -> str:
    off = [[name for name, training in call.training.items() if training != right[name]] for call in calls]
    number = sum(map(bool, off))
    which = "the window's losses" if number == len(calls) else f"{number} of the window's {len(calls)} losses"
    names = list(dict.fromkeys(name for call in off for name in call))
    where = "" if "" in names else f" in {listed(names)}"
    mode = "train" if calls[0].training.get(names[0]) and number == len(calls) else "eval"
    return (
        f"{which} {'is' if number == 1 < len(calls) else 'are'} computed in {mode} mode{where}, while the run hands "
        "the model over in train mode: call model.train() after an evaluation"
    )


def _moved_text(start: dict[str, torch.Tensor], calls: Sequence[LossCall]) -> str:
    values = [(name, value) for call in calls for name, value in call.parameters.items()]
    moved = [(name, value) for name, value in values if not torch.equal(value, start[name])]
    name, value = moved[0]
    own, at = start[name].flatten(), int((value - start[name]).abs().argmax())
    names = list(dict.fromkeys(name for name, _ in moved))
    return (
        f"the losses are computed at other values of {listed(names)} than those that the step changes ({name} has "
        f"an element {value.flatten()[at]:.6g} in place of {own[at]:.6g}), and the gradient is right there: look for a "
        "copy or an average of the model, and for parameters that are perturbed or rounded and restored before the step"
    )


def _split_text(instance: Instance, members: Sequence[int], calls: Sequence[LossCall]) -> tuple[str, str] | None:
    """Return name and sentence of wrong weights where the batches are parts of the window's micro-batches, or None.

    Items whose count is 0 may be left out.
    """
    owners: list[int] = []
    due = [(j, i) for j in members for i in range(instance.case.plan.micro_batches[j])]
    batches = {j: instance.batch(instance.case.plan.items(j)) for j in members}
    at = 0

    def part(j: int, first: int, items: int) -> Batch:
        return map_leaves(lambda t: t[first : first + items], batches[j])

    for call in calls:
        given, items = dict(named_leaves(call.batch)), len(next(leaves(call.batch), ()))
        while at < len(due) and not _equal(given, dict(named_leaves(part(*due[at], items)))):
            if instance.count(part(*due[at], 1)):
                return None
            at += 1
        if at == len(due) or not items:
            return None
        owners.append(due[at][0])
        at += items
    if len(set(owners)) == len(calls) or any(instance.count(part(*one, 1)) for one in due[at:]):
        return None
    weights = [float(call.cotangent) for call in calls if call.cotangent is not None]
    split = f"micro-batches are split, into {len(calls)} parts here, and the "
    for j in set(owners):
        own = [weight for owner, weight in zip(owners, weights, strict=True) if owner == j]
        if instance.problem.reduction == "sum" or not np.allclose(own, own[0], rtol=CLOSE):
            return "unequal-items", f"{split}parts weigh {listed([f'{w:.6g}' for w in weights], 4)}: {_BY_COUNT}"
    return "mean-of-means", f"{split}means of a micro-batch's parts have one weight whatever they count: {_BY_COUNT}"


_BY_COUNT = "divide each part's summed loss by the window's count"


def _changed_text(instance: Instance, members: Sequence[int], calls: Sequence[LossCall]) -> str | None:
    """Return how a batch of the window is none that the loader yields, or None."""
    plan = instance.case.plan
    yielded = [dict(named_leaves(instance.batch(plan.items(j)))) for j in range(len(plan.micro_batches))]
    for place, call in enumerate(calls):
        given = dict(named_leaves(call.batch))
        if any(_equal(given, own) for own in yielded):
            continue
        index = members[min(place, len(members) - 1)]
        own = yielded[index]
        items, due = len(next(leaves(call.batch), ())), plan.micro_batches[index]
        what = f"{items} items in place of {due}"
        if items == due:
            off = [name for name in own if name not in given or not _equal({"": given[name]}, {"": own[name]})]
            what = f"other values in {listed(off)}"
        return (
            f"a loss is computed from a batch that the loader does not yield: where micro-batch {index} is due, it has "
            f"{what}, and the gradient is right for that batch: look for what changes batches between the loader and "
            "the loss (a normalization in place, augmentation, truncation, padding, targets shifted against "
            "inputs)"
        )
    return None


def _equal(given: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    return given.keys() == own.keys() and all(
        t.shape == own[name].shape and t.dtype == own[name].dtype and bool(((t == own[name]) | (t != t)).all())
        for name, t in given.items()
    )
