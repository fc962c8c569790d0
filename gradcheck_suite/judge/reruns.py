"""Running a loop a few more times to name its fault, and what is known of a wrong gradient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from gradcheck_suite.core.case import SMALL_SCALE
from gradcheck_suite.core.comparison import Comparison, Vector, within
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Batch, Loop, assumptions_of, is_jax
from gradcheck_suite.judge.elements import place_of_the_fault
from gradcheck_suite.judge.fitted_weights import diagnose_case
from gradcheck_suite.judge.weights import Diagnosis, any_of, first_of
from gradcheck_suite.reference.large_batch import Reference, WindowReference, parameter_gradients
from gradcheck_suite.run.instance import (
    Instance,
    map_leaves,
    named_leaves,
    scaled_loss,
    tensor_leaves,
)
from gradcheck_suite.run.losses import LateValues, LossCall, Losses, train_modes
from gradcheck_suite.run.ranks import run_ranks
from gradcheck_suite.run.runner import Outcome

MAX_RUNS = 3
"""Runs that one diagnosis may take beside that which showed the violation; `judge.gradient` may allow one more."""


class LoopRunner:
    """Runs one loop, up to a number of times.

    Attributes:
        runs_left: number of runs that may still be asked for.
        assumes: what the loop assumes, names from `ASSUMPTIONS`.
        rank: the rank whose outcome is looked at.
        alike: whether all ranks had the same gradients at each step, in every run so far.
        runs: number of runs so far.
        is_jax: whether the loop is one of JAX.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        time_limit_s: float | None = DEFAULT_TIME_LIMIT,
        max_runs: int = MAX_RUNS,
        assumes: Iterable[str] = (),
        rank: int = 0,
        alike: bool = False,
    ) -> None:
        self._loop = loop
        self._time_limit_s = time_limit_s
        self.runs_left = max_runs
        self.rank = rank
        self.alike = alike
        self.runs = 0
        self.assumes = frozenset(assumes) | assumptions_of(loop)
        self.is_jax = is_jax(loop)

    def run(self, instance: Instance) -> Outcome | None:
        """Return what the loop does with an instance, or None where no run is left."""
        outcomes = self.run_on_ranks(instance)
        return None if outcomes is None else self.chosen(outcomes)

    def run_on_ranks(
        self, instance: Instance, *, record_losses: bool = False
    ) -> list[Outcome] | None:
        """Return what the loop does on each rank, or None where no run is left."""
        if not self.runs_left:
            return None
        self.runs_left -= 1
        self.runs += 1
        outcomes = run_ranks(
            self._loop, instance, time_limit_s=self._time_limit_s, record_losses=record_losses
        )
        # a run that failed shows nothing of what ranks have in common
        if all(outcome.raised is None for outcome in outcomes):
            self.alike &= outcomes[self.rank].alike
        return outcomes

    def chosen(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of the first rank that failed, else that of the rank looked at."""
        # a rank that fails leaves the others waiting, so that theirs are errors that follow from it
        failed = next((outcome for outcome in outcomes if outcome.raised is not None), None)
        return failed or outcomes[self.rank]

    def repeats(
        self, instance: Instance, is_same: Callable[[Outcome], bool], times: int = 2
    ) -> bool:
        """Return whether further runs on the instance that showed the violation, while any is left,
        do the same.
        """
        for _ in range(times):
            outcome = self.run(instance)
            if outcome is None:
                break
            if not is_same(outcome):
                return False
        return True


# What a loop computed its losses from, in one recorded run.


CLOSE = 1e-9
"""Share of the largest element up to which a gradient that is computed again is the same."""


@dataclass(frozen=True)
class RecordedLosses:
    """The losses of a run, of each rank.

    Attributes:
        original: the instance whose losses they are.
        of_ranks: what each rank recorded, one for a single process; empty where nobody records.
    """

    original: Instance
    of_ranks: tuple[Losses, ...] = ()

    @property
    def called(self) -> bool:
        """Whether the loop calls the loss to train.

        True where that was not recorded.
        """
        return not self.of_ranks or any(losses.called for losses in self.of_ranks)

    def members(self, step: int) -> list[list[int]]:
        """Return the micro-batches that each rank has of a step's window."""
        plan = self.original.case.plan
        window = plan.windows[step % len(plan.windows)]
        if not plan.ranks:
            return [list(window)]
        return [[j for j in window if plan.owners[j] == r] for r in range(len(plan.ranks))]

    def sent(self, step: int) -> list[list[LossCall]]:
        """Return the calls of each rank that were sent backward for a step."""
        return [losses.sent(step) for losses in self.of_ranks]


def run_recorded(runner: LoopRunner, instance: Instance) -> tuple[RecordedLosses, Outcome | None]:
    """Run a loop and record its losses; the outcome is None where it raised or no run is left."""
    # in JAX a loss is traced, and its numbers are not at hand
    record = not runner.is_jax
    outcomes = runner.run_on_ranks(instance, record_losses=record)
    if outcomes is None:
        return RecordedLosses(instance), None
    outcome = runner.chosen(outcomes)
    losses = tuple(one.losses for one in outcomes if one.losses is not None)
    # losses of some ranks alone say nothing of a gradient that all of them have made
    recorded = RecordedLosses(instance, losses if len(losses) == len(outcomes) else ())
    return recorded, None if outcome.raised is not None else outcome


def explain_inputs(
    recorded: RecordedLosses,
    observed: Vector,
    step: int,
    parameters: dict[str, torch.Tensor] | None = None,
) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is right for other inputs than the contract's, or
    None.

    The losses are computed again from what they were called with. Where that gives the observed
    gradient, and the right inputs do not, the inputs are the fault. Of several ranks the losses of
    all are taken together.

    Args:
        recorded: the run's losses.
        observed: (P,): the wrong gradient.
        step: index of the step.
        parameters: those that the step changes; None for the initial ones.
    """
    instance = recorded.original
    reference = Reference(instance)
    right = instance.model()
    if parameters is not None:
        # a step changes parameters; buffers stay those of the instance
        right.load_state_dict(parameters, strict=False)
    of_ranks = recorded.members(step)
    sent = [
        [
            _completed(instance, right, members, place, call)
            for place, call in enumerate(calls)
            # a rank without a micro-batch sends a loss of zeros to keep its all-reduces going
            if members or call.parameters
        ]
        for members, calls in zip(of_ranks, recorded.sent(step), strict=False)
    ]
    members = list(chain.from_iterable(of_ranks))
    for calls in _passes(sent, of_ranks):
        # inputs are only blamed where they give this very gradient
        if not calls or not _losses_give(reference, calls, observed):
            continue
        differences = [
            *_written_between(calls, instance),
            *_differences(instance, right, members, calls),
        ]
        found = [
            one
            for one, corrected in differences
            # a difference that changes nothing is none of the fault
            if corrected is None or not _losses_give(reference, corrected, observed)
        ]
        if found:
            return any_of(found)
    return None


def _passes(
    sent: Sequence[list[LossCall]], of_ranks: Sequence[list[int]]
) -> Iterator[list[LossCall]]:
    """Yield the losses that may have made the gradient: all that ranks sent backward, then parts of
    these.
    """
    yield list(chain.from_iterable(sent))
    # how often each rank sent its part of the window, and how many losses are left over
    times = {divmod(len(c), len(m)) for c, m in zip(sent, of_ranks, strict=False) if m}
    # one loss for each micro-batch is what the first guess is about
    if times - {(1, 0)}:
        # what an earlier pass over the window computed may have been cleared
        pairs = zip(sent, of_ranks, strict=True)
        last = [calls[max(0, len(calls) - len(members)) :] for calls, members in pairs]
        yield list(chain.from_iterable(last))
    number, rest = next(iter(times), (0, 0))
    if len(times) == 1 and number > 1 and not rest:
        # an earlier loss of each micro-batch may be of use for its inputs alone, as in adversarial
        # training
        yield list(chain.from_iterable(calls[number - 1 :: number] for calls in sent))


def _losses_give(reference: Reference, calls: Sequence[LossCall], observed: Vector) -> bool:
    """Whether the losses, computed again as they were called, have a gradient.

    Ranks add up their gradients, or average them, as DistributedDataParallel does.
    """
    total = _gradient_again(reference, calls, np.zeros_like(observed))
    if total is None:
        return False
    near = CLOSE * np.abs(total).max(initial=0.0)
    # an all-reduce adds up, DistributedDataParallel averages
    divisors = {1, reference.instance.case.plan.world_size}
    return any(within(total / ranks, observed, near / ranks) for ranks in divisors)


def _gradient_again(
    reference: Reference, calls: Sequence[LossCall], zeros: Vector
) -> Vector | None:
    """Return the gradient of losses, computed again as they were called.

    None where they were called with another model than the instance's.
    """
    instance = reference.instance
    total = zeros
    for call in calls:
        model = instance.model()
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters())
        if modules.keys() != call.training.keys() or parameters.keys() != call.parameters.keys():
            return None
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(call.parameters[name])
        for name, module in modules.items():
            module.training = call.training[name]
        assert call.cotangent is not None
        # a loss may write into its batch, which is needed again for the next guess
        batch = map_leaves(torch.clone, call.batch)
        loss = instance.problem.loss(model, batch)
        if call.late is not None:
            _write_late(call.late, batch, parameters)
        total = total + reference.flat(parameter_gradients(loss * call.cotangent, model))
    return total


def _write_late(
    late: LateValues, batch: Batch, parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Write what stood in a batch and in parameters at the backward."""
    # autograd's check of what it saved looks at the versions, which `.data` has not
    leaves_of = dict(named_leaves(batch))
    for name, value in late.batch.items():
        leaves_of[name].data.copy_(value)
    for name, value in late.parameters.items():
        parameters[name].data.copy_(value)


def _completed(
    instance: Instance, right: torch.nn.Module, members: Sequence[int], place: int, call: LossCall
) -> LossCall:
    """Return a call that was given the output of a model, with the model and the input that the
    contract has there.
    """
    if call.parameters:
        return call
    given = dict(named_leaves(call.batch))
    own = instance.batch(instance.case.plan.items(members[place % len(members)]))
    # `map_leaves` visits leaves in the order of `named_leaves`
    names = iter([name for name, _ in named_leaves(own)])
    return replace(
        call,
        batch=map_leaves(lambda t: given.get(next(names), t), own),
        parameters={name: p.detach() for name, p in right.named_parameters()},
        training=train_modes(right),
    )


def _differences(
    instance: Instance, model: torch.nn.Module, members: Sequence[int], calls: Sequence[LossCall]
) -> Iterator[tuple[Diagnosis, list[LossCall] | None]]:
    """Yield the diagnosis of each input that is not the contract's, and the calls with it
    corrected.
    """
    right = train_modes(model)
    if any(call.training != right for call in calls):
        yield (
            Diagnosis("wrong-mode", _mode_text(calls)),
            [replace(call, training=right) for call in calls],
        )
    start = {name: p.detach() for name, p in model.named_parameters()}
    if moved := _moved_parameters(start, calls):
        yield (
            Diagnosis("other-parameters", _moved_text(start, moved, calls)),
            [replace(call, parameters=start) for call in calls],
        )
    if (split := _diagnosis_of_parts(instance, members, calls)) is not None:
        yield split, None
    elif changed := _changed_text(instance, members, calls):
        yield Diagnosis("changed-batch", changed), None


def _written_between(
    calls: Sequence[LossCall], instance: Instance
) -> Iterator[tuple[Diagnosis, list[LossCall] | None]]:
    """Yield the diagnosis of inputs that were written between a forward and its backward, and the
    calls without that.
    """
    late = [call.late for call in calls if call.late is not None]
    batch = dict.fromkeys(chain.from_iterable(values.batch for values in late))
    parameters = dict.fromkeys(chain.from_iterable(values.parameters for values in late))
    kept = [replace(call, late=None) for call in calls]
    written_on = _on_ranks([call for call in calls if call.late is not None], calls)
    when = (
        f"between the forward and the backward of {len(late)} of the window's"
        f" {len(calls)} losses{written_on}"
    )
    right = "and the gradient is right for what stood there at the backward"
    if batch:
        text = f"the memory of {first_of([*batch])} is written again {when}, {right}"
        yield Diagnosis("changed-batch", text, causes=("written",)), kept
    if parameters:
        text = f"{first_of([*parameters])} are written {when}, without autograd's notice, {right}"
        yield Diagnosis("stale-parameters", text, causes=("written",)), kept


def _mode_text(calls: Sequence[LossCall]) -> str:
    off = [[name for name, training in call.training.items() if not training] for call in calls]
    number = sum(map(bool, off))
    which = (
        "the window's losses"
        if number == len(calls)
        else f"{number} of the window's {len(calls)} losses"
    )
    names = list(dict.fromkeys(chain.from_iterable(off)))
    where = "" if "" in names else f" in {first_of(names)}"
    is_off = [call for call, names in zip(calls, off, strict=True) if names]
    return (
        f"{which} {'is' if number == 1 < len(calls) else 'are'} computed in eval mode{where}"
        f"{_on_ranks(is_off, calls)}, while the run hands the model over in train mode"
    )


def _on_ranks(chosen: Sequence[LossCall], calls: Sequence[LossCall]) -> str:
    """Return on which ranks some calls were made, as a part of a sentence.

    Empty where all calls were made on these.
    """
    ranks = sorted({call.rank for call in chosen})
    if len(ranks) == len({call.rank for call in calls}):
        return ""
    return f", on rank{'s' if len(ranks) > 1 else ''} {first_of(ranks)}"


@dataclass(frozen=True)
class _MovedParameter:
    """A parameter that has another value at a call of the loss than at the step.

    Attributes:
        name: of the parameter.
        value: at the call.
        call: of the loss.
    """

    name: str
    value: torch.Tensor
    call: LossCall


def _moved_parameters(
    start: dict[str, torch.Tensor], calls: Sequence[LossCall]
) -> list[_MovedParameter]:
    """Return the parameters that are not those of the start, in order of the calls."""
    found = []
    for call in calls:
        for name, value in call.parameters.items():
            if not torch.equal(value, start[name]):
                found.append(_MovedParameter(name, value, call))
    return found


def _moved_text(
    start: dict[str, torch.Tensor], moved: Sequence[_MovedParameter], calls: Sequence[LossCall]
) -> str:
    shown = moved[0]
    own = start[shown.name]
    at = int((shown.value - own).abs().argmax())
    names = list(dict.fromkeys(one.name for one in moved))
    where = _on_ranks([one.call for one in moved], calls)
    where = f"{where}," if where else ""
    return (
        f"the losses are computed{where} at other values of {first_of(names)} than those that the step"
        f" changes ({shown.name} has an element {shown.value.flatten()[at]:.6g} in place of"
        f" {own.flatten()[at]:.6g}), and the gradient is right there"
    )


def _diagnosis_of_parts(
    instance: Instance, members: Sequence[int], calls: Sequence[LossCall]
) -> Diagnosis | None:
    """Return the diagnosis of wrong weights where the batches are parts of the window's
    micro-batches, or None.

    Items whose count is 0 may be left out.
    """
    owners = _owners_of_parts(instance, members, calls)
    # as many calls as micro-batches: none of them is split
    if owners is None or len(set(owners)) == len(calls):
        return None
    weights = [float(call.cotangent) for call in calls if call.cotangent is not None]
    split = f"micro-batches are split, into {len(calls)} parts here, and the "
    for j in set(owners):
        own = [weight for owner, weight in zip(owners, weights, strict=True) if owner == j]
        if instance.problem.reduction == "sum" or not np.allclose(own, own[0], rtol=CLOSE):
            sentence = f"{split}parts weigh {first_of([f'{w:.6g}' for w in weights], 4)}"
            return Diagnosis("unequal-items", sentence, causes=("parts",))
    return Diagnosis(
        "mean-of-means",
        f"{split}means of a micro-batch's parts have one weight whatever they count",
    )


def _owners_of_parts(
    instance: Instance, members: Sequence[int], calls: Sequence[LossCall]
) -> list[int] | None:
    """Return the micro-batch of which each call has a part, in order.

    None where some call has something else, or an item that counts is in no call.
    """
    plan = instance.case.plan
    batches = {j: instance.batch(plan.items(j)) for j in members}
    due: list[tuple[int, int]] = []
    for j in members:
        due += [(j, i) for i in range(plan.micro_batches[j])]

    def part(j: int, first: int, items: int) -> Batch:
        return map_leaves(lambda t: t[first : first + items], batches[j])

    owners: list[int] = []
    at = 0
    for call in calls:
        given = dict(named_leaves(call.batch))
        items = len(next(tensor_leaves(call.batch), ()))
        # parts come in the loader's order; items that count nothing may be left out between them
        while at < len(due) and not _same_state(given, dict(named_leaves(part(*due[at], items)))):
            if instance.count(part(*due[at], 1)):
                return None
            at += 1
        if at == len(due) or not items:
            return None
        owners.append(due[at][0])
        at += items
    return None if any(instance.count(part(*one, 1)) for one in due[at:]) else owners


def _changed_text(
    instance: Instance, members: Sequence[int], calls: Sequence[LossCall]
) -> str | None:
    """Return how a batch of the window differs from those that the loader yields, or None."""
    plan = instance.case.plan
    yielded = [dict(named_leaves(instance.batch(items))) for items in plan.cuts]
    for place, call in enumerate(calls):
        given = dict(named_leaves(call.batch))
        if any(_same_state(given, own) for own in yielded):
            continue
        # a loss beyond the window's micro-batches is compared with the last one
        index = members[min(place, len(members) - 1)]
        own = yielded[index]
        items = len(next(tensor_leaves(call.batch), ()))
        due = plan.micro_batches[index]
        what = f"{items} items in place of {due}"
        if items == due:
            off = [
                name
                for name in own
                if name not in given or not _same_state({"": given[name]}, {"": own[name]})
            ]
            what = f"other values in {first_of(off)}"
        return (
            "a loss is computed from a batch that the loader does not yield: where micro-batch"
            f" {index} is due, it has {what}, and the gradient is right for that batch"
        )
    return None


def _same_state(given: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    return given.keys() == own.keys() and all(
        t.shape == own[name].shape
        and t.dtype == own[name].dtype
        # NaN is no change: `t != t` is true of it alone, and the batch may hold it on purpose
        and bool(((t == own[name]) | (t != t)).all())
        for name, t in given.items()
    )


# Whether a loop leaves micro-batches out because their loss is NaN or infinite.


SKIPPED = Diagnosis(
    "skipped-non-finite",
    "the loss of a micro-batch without valid targets is NaN, its gradient is 0, and with finite"
    " losses in place of such ones the loop is right: it skips, resets or ends the window where a"
    " loss is not finite",
    causes=("no-targets",),
)


def run_with_finite_losses(runner: LoopRunner, instance: Instance) -> Outcome | None:
    """Run a loop on a case whose losses are made finite.

    None where they are already, or where no run is left.
    """
    plan = instance.case.plan
    model = instance.model()
    # ranks compute the losses of their own case, in processes of their own
    if plan.ranks:
        return None
    # torch's mean over no valid targets is NaN, and its gradient 0 (cross_entropy with
    # ignore_index): a loop that skips such a micro-batch may lose more than that
    batches = [instance.batch(items) for items in plan.cuts]
    with torch.no_grad():
        uncounted = [batch for batch in batches if not instance.count(batch)]
        if all(instance.problem.loss(model, batch).isfinite() for batch in uncounted):
            return None

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        value = instance.problem.loss(model, batch)
        # backward gives 0 where the value was not finite, which is the gradient of such a loss
        return value if value.isfinite() else value.nan_to_num()

    return runner.run(replace(instance, problem=replace(instance.problem, loss=loss)))


# Whether another window's gradient was left behind, or its micro-batches were sent backward again.


def explain_foreign(e: Evidence, found: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a gradient that has something of earlier windows, with the cause where
    the losses tell it.

    Args:
        e: what is known of the gradient.
        found: the diagnosis without a cause.
    """
    # one run is made to tell, whatever is left: "reset the gradients" would be the wrong remedy
    e.runner.runs_left = max(e.runner.runs_left, 1)
    recorded, rerun = e.calls
    if rerun is None or not repeats_gradient(rerun, e.comparison):
        return found
    plan = e.instance.case.plan
    yielded = [dict(named_leaves(e.instance.batch(items))) for items in plan.cuts]
    again = set[int]()
    for calls in recorded.sent(e.step):
        for call in calls:
            given = dict(named_leaves(call.batch))
            equal = {j for j, own in enumerate(yielded) if _same_state(given, own)}
            # a batch that two windows have alike tells nothing
            again |= set() if equal & {*e.window.members} else equal
    if not again:
        return found
    sentence = (
        f"{found.sentence}; the losses of micro-batches {first_of(sorted(again))} are sent backward"
        " for this step once more"
    )
    return replace(found, sentence=sentence, causes=("sent-again",))


# Whether a module's backward hook is what makes a gradient wrong.


BACKWARD_HOOKS = (
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


@contextmanager
def _no_backward_hooks() -> Iterator[None]:
    """Let no module get a backward hook meanwhile."""

    def refused(*_: Any, **__: Any) -> RemovableHandle:
        return RemovableHandle(OrderedDict())

    with ExitStack() as stack:
        for name in BACKWARD_HOOKS:
            stack.enter_context(mock.patch.object(torch.nn.Module, name, refused))
        yield


def explain_module_hooks(e: Evidence, hooked: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is right without the modules' backward hooks, or None.

    Args:
        e: what is known of the gradient.
        hooked: the modules that have one.
    """
    # the hooks of ranks are registered in processes of their own
    if not hooked or e.instance.case.plan.ranks:
        return None
    # a run of its own, so that no other evidence is given up for a hook that is named in the model
    e.runner.runs_left += 1
    with _no_backward_hooks():
        rerun = e.gradient(e.runner.run(e.instance))
    if rerun is None:
        return None
    off = np.abs(rerun - e.comparison.expected)
    if not bool((off <= e.comparison.allowed).all()):
        return None
    text = (
        f"the backward hooks of {first_of([*hooked])} change what goes further backward: without"
        " them the gradient is right"
    )
    return Diagnosis("not-linear", text, causes=("module-hook",))


# Whether a loop hands its step the same gradient when it runs again on the same case.


NOT_REPEATABLE = Diagnosis(
    "not-repeatable",
    "run again on the same case, the loop hands its step another gradient: it keeps state from one"
    " run to the next, or draws from a generator that no seed of the run sets",
)


def repeats_gradient(rerun: Vector, comparison: Comparison) -> bool:
    """Return whether a further run gives the observed gradient, up to rounding."""
    seen = comparison.observed
    with np.errstate(invalid="ignore"):
        near = np.abs(rerun - seen) <= comparison.allowed
    # of two infinities the difference is NaN
    both_not_finite = ~np.isfinite(rerun) & ~np.isfinite(seen)
    return bool((near | (rerun == seen) | both_not_finite).all())


# What is known of a wrong gradient, of a case or of a weight probe.


def gradient_of_step(
    outcome: Outcome, reference: Reference, step: int, seen: Vector | None = None
) -> Vector | None:
    """Return the gradient at a step of a run, (P,); None where the loop raised or stopped before.

    Where the step calls its closure several times: that of the last call, or of the one nearest to
    what was `seen`.
    """
    if outcome.raised is not None or step >= len(outcome.observations):
        return None
    calls = [
        reference.flat(evaluation.gradients)
        for evaluation in outcome.observations[step].evaluations
    ]
    if seen is None:
        return calls[-1]
    with np.errstate(invalid="ignore"):
        # `nansum`, since one NaN would make every call equally far
        return min(calls, key=lambda gradient: float(np.nansum(np.abs(gradient - seen))))


@dataclass(frozen=True)
class Evidence:
    """What is known of a wrong gradient.

    What a further run shows is known once something asks, while runs are left.

    Attributes:
        comparison: the gradient compared with the right one.
        window: the window of that gradient.
        epoch: the epoch of the step.
        runner: runs the loop again.
        known_calls: the repetition, where it has been made.
    """

    comparison: Comparison
    window: WindowReference
    epoch: int
    runner: LoopRunner
    known_calls: tuple[RecordedLosses, Vector | None] | None = None

    @property
    def instance(self) -> Instance:
        """What the loop trained."""
        return self.window.reference.instance

    @property
    def step(self) -> int:
        """Index of the step in the run."""
        return self.epoch * len(self.instance.case.plan.windows) + self.window.index

    def gradient(self, outcome: Outcome | None) -> Vector | None:
        """Return the gradient at the step of another run, the nearest to this one.

        None where it has none.
        """
        if outcome is None:
            return None
        return gradient_of_step(outcome, self.window.reference, self.step, self.comparison.observed)

    @cached_property
    def calls(self) -> tuple[RecordedLosses, Vector | None]:
        """A repetition: what its losses were computed from, and its gradient at the step."""
        if self.known_calls:
            return self.known_calls
        recorded, outcome = run_recorded(self.runner, self.instance)
        return recorded, self.gradient(outcome)

    @cached_property
    def small(self) -> Vector | None:
        """(P,): the gradient at the step with a loss 2**-20 times as large."""
        outcome = self.runner.run(scaled_loss(self.instance, SMALL_SCALE))
        return (
            None if outcome is None else gradient_of_step(outcome, self.window.reference, self.step)
        )

    @cached_property
    def parameters(self) -> Vector:
        """(P,): the values of the parameters."""
        values = {name: p.detach().double() for name, p in self.window.model().named_parameters()}
        return self.window.reference.flat(
            {name: values[name] for name in self.comparison.layout.names}
        )

    @property
    def of_weights(self) -> Diagnosis | None:
        """What the gradient alone says of weights and elements."""
        return diagnose_case(
            self.window,
            self.comparison,
            self.epoch,
            alike=self.runner.alike,
        )

    @property
    def of_inputs(self) -> Diagnosis | None:
        """What a repetition says: that the fault is gone, or that the inputs of losses are wrong."""
        recorded, rerun = self.calls
        if rerun is None:
            return None
        if not repeats_gradient(rerun, self.comparison):
            return NOT_REPEATABLE
        return explain_inputs(recorded, self.comparison.observed, self.step, self.window.parameters)

    def confirmed(self, found: Diagnosis) -> Diagnosis:
        """Return a diagnosis, or `not-repeatable` where one of the remaining runs gives another
        gradient.
        """

        def is_same(outcome: Outcome) -> bool:
            rerun = self.gradient(outcome)
            # a gradient scaler took fewer steps than there are windows
            return bool(outcome.skipped) or (
                rerun is not None and repeats_gradient(rerun, self.comparison)
            )

        return found if self.runner.repeats(self.instance, is_same) else NOT_REPEATABLE

    @property
    def place(self) -> str:
        """Which parameters are wrong and which right, as a clause."""
        return place_of_the_fault(self.comparison)
