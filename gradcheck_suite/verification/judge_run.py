"""Judge what a loop did in one run: its steps, the gradients that they used and the parameters that
they changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch

from gradcheck_suite.core.case import PARAMETER, Case, Plan, is_probe
from gradcheck_suite.core.comparison import (
    UNIT_ROUNDOFF,
    Comparison,
    Layout,
    Vector,
    accumulation_bound,
    finite_or_right,
    quick_bound,
)
from gradcheck_suite.core.contract import EDITS_PARAMETERS, EDITS_SETTINGS
from gradcheck_suite.core.faults import is_of_weights, with_note
from gradcheck_suite.core.results import Verdict, Violation, ViolationKind
from gradcheck_suite.judge.fitted_weights import diagnose_case
from gradcheck_suite.judge.gradient import explain_gradient, explain_missing, explain_probe
from gradcheck_suite.judge.probe import expected_gradients, gradients_of_steps
from gradcheck_suite.judge.reruns import Evidence, LoopRunner, explain_module_hooks
from gradcheck_suite.judge.sizes import NOT_IN_GRADIENT, is_linear
from gradcheck_suite.judge.steps import explain_steps, step_pattern
from gradcheck_suite.judge.weights import Diagnosis, missing_gradient, none_and_not_zeros
from gradcheck_suite.reference.large_batch import (
    CannotJudgeError,
    Reference,
    WindowReference,
    accumulation_fault,
    disagreement,
    gradients_of,
    precision_fault,
)
from gradcheck_suite.run.instance import Compute, autocast_context, coarsest
from gradcheck_suite.run.observer import Evaluation, Observation
from gradcheck_suite.run.optimizers import (
    OPTIMIZERS,
    ParameterFault,
    fault_before,
    fault_between,
    fault_of_step,
    largest_error,
)
from gradcheck_suite.run.runner import Outcome
from gradcheck_suite.verification.separability import gradient_fault, reference_of


def steps_of_plan(
    plan: Plan, outcome: Outcome, may_skip: Callable[[int, int], bool]
) -> list[int] | None:
    """Return for each step that a loop took its index in the plan.

    None where the numbers of steps do not fit.

    Args:
        plan: the plan of the run.
        outcome: what the loop did.
        may_skip: (index of a window in its epoch, number of steps taken before it) -> whether its
            gradient is so.
    """
    # an endless loop has no last step, so its number says nothing
    if outcome.endless or len(outcome.observations) + len(outcome.skipped) < plan.steps:
        return None
    places: list[int] = []
    skipped = list(outcome.skipped)
    for step in range(plan.steps):
        # a GradScaler is there to skip the step of a window whose gradient is infinite, NaN or out
        # of range
        if len(places) in skipped and may_skip(step % len(plan.windows), len(places)):
            skipped.remove(len(places))
        else:
            places.append(step)
    return places if len(places) == len(outcome.observations) else None


def undeclared_autocast(
    window: WindowReference, evaluation: Evaluation, compute: Compute
) -> Diagnosis | None:
    """Return the diagnosis of a wrong gradient whose only errors are the rounding errors of
    autocast, else None.

    Args:
        window: the window whose gradient is wrong in the precision that the loop declares.
        evaluation: what the step used.
        compute: the autocast dtype that the loop's losses were computed in, or None.
    """
    # the precision comes from the loop's declaration, never from the run: one that turns on
    # autocast by mistake would widen its own bound
    name = window.reference.instance.case.dtype
    if compute is None or UNIT_ROUNDOFF[compute] <= UNIT_ROUNDOFF[name]:
        return None
    if not _is_right_at(
        window, evaluation, evaluation.parameters if window.moved else None, compute
    ):
        return None
    return Diagnosis(
        "low-precision",
        f"the loop computes its losses under torch.autocast in {compute} in a {name} run: the"
        f" gradient has rounding errors of {compute}, and no other error",
    )


def _is_right_at(
    window: WindowReference,
    evaluation: Evaluation,
    parameters: dict[str, torch.Tensor] | None,
    compute: Compute,
) -> bool:
    """Whether a gradient is right at other parameters, or in the precision of another autocast."""
    reference = window.reference
    there = reference.window(window.index, parameters, compute)
    try:
        return there.compare(reference.flat(evaluation.gradients)).ratio <= 1
    # the plain gradient is not finite there, so it cannot be what the step used
    except CannotJudgeError:
        return False


ROUNDINGS = 8.0
"""Multiple of the gradient's bound that is allowed the difference of two sums: of up to twenty calls by default."""


def closure_without_reset(
    window: WindowReference, outcome: Outcome, evaluation: Evaluation
) -> Diagnosis | None:
    """Return the diagnosis of a gradient that still contains that of the closure's call before it,
    else None.

    L-BFGS calls its closure several times in a step.

    Args:
        window: the window, at the parameters of this call.
        outcome: what the loop did.
        evaluation: the call whose gradient is wrong.
    """
    # within a step alone: between steps a stale gradient is that of another window
    calls = chain.from_iterable(pairwise(each.evaluations) for each in outcome.observations)
    before = next((first for first, second in calls if second is evaluation), None)
    # a hook that edits the gradients of a call leaves an evaluation at the same parameters
    if before is None or before.parameters is evaluation.parameters:
        return None
    flat = window.reference.flat
    # without what the call before left, it must be this call's gradient
    if window.compare(flat(evaluation.gradients) - flat(before.gradients)).ratio > ROUNDINGS:
        return None
    if window.compare(flat(before.gradients)).ratio <= ROUNDINGS:
        return None  # where the gradient stays the same, a factor of 2 does that as well
    return Diagnosis(
        "stale-window",
        "the optimizer calls the closure several times in a step, and the gradient of each call"
        " contains those of the calls before it",
    )


DIVERGED = "the parameters have diverged under the optimizer"
"""Why gradients are not judged whose finiteness depends on the order of operations."""
FAR = 16.0
"""Factor of the largest initial value from which on a gradient may overflow in one order of operations alone."""


def is_diverged(evaluation: Evaluation) -> bool:
    """Whether a real optimizer has taken the parameters where products of a few of them overflow.

    From there on what is finite depends on the order of operations, and a sound loop diverges like
    any other.
    """
    values = evaluation.parameters.values()
    # products of four of them overflow, and a model of a few layers has such products
    return any(
        bool((p.abs() > torch.finfo(p.dtype).max ** 0.25).any() or p.isnan().any()) for p in values
    )


def ended_in_divergence(case: Case, outcome: Outcome) -> bool:
    """Whether a loop raised, or took too few steps, at parameters that have diverged under a real
    optimizer.

    A check of the loss and a gradient scaler then do what they are for. The steps that were taken
    are judged. A loop that the time limit stopped has done neither.
    """
    # without an optimizer no parameter moves, so no loop can diverge
    if case.optimizer is None or outcome.structure or outcome.timed_out:
        return False
    if outcome.raised is None and len(outcome.observations) >= case.plan.steps:
        return False
    last = outcome.observations[-1].after if outcome.observations else outcome.parameters
    return is_diverged(Evaluation({}, last))


def is_start(evaluation: Evaluation, outcome: Outcome) -> bool:
    """Whether no parameter has moved yet, so that the window is one of those that are kept."""
    # identity is enough: the observer keeps the same tensor as long as its values stay
    return all(value is outcome.start[name] for name, value in evaluation.parameters.items())


def is_far(reference: Reference, evaluation: Evaluation) -> bool:
    """Whether some parameter is far larger than all were at first, so that the order of operations
    may overflow.
    """
    # at least 1, since a model that starts at zeros has no scale of its own
    first = max(
        [1.0, *(float(np.abs(value).max()) for value in reference.values64.values() if value.size)]
    )
    return any(bool((p.abs() > FAR * first).any()) for p in evaluation.parameters.values())


BY_CHANCE = "normalized"
"""The optimizer of drawn cases where the user asked for none."""


def zeros_that_move(case: Case, observation: Observation) -> dict[str, float]:
    """Return the parameters that a step moved on a gradient of zeros, and would not move on None,
    with the distance.

    The loop contract allows both, so that this is no violation. It is explained, since training
    differs.

    Args:
        case: the case that the loop trained.
        observation: the step.
    """
    # the drawn optimizer is nobody's choice, so what it does with zeros concerns nobody
    if case.optimizer in (None, BY_CHANCE) or observation.is_computed:
        return {}
    zeros = [
        n
        for n, gradient in observation.gradients.items()
        if gradient is not None and not gradient.any()
    ]
    distances = {
        name: largest_error(observation.after[name], observation.parameters[name]) for name in zeros
    }
    return {name: distance for name, distance in distances.items() if distance}


def explain_zeros(case: Case, moved: dict[str, float], window: WindowReference) -> str | None:
    """Return a sentence about the first of these parameters that no item of the window reaches, or
    None.
    """
    # a parameter that some item reaches has zeros from torch's backward too
    name = next((name for name in moved if name not in window.reached), None)
    return name and (
        f"no item of window {window.index} reaches {name}. Its gradient was zeros and not None, so"
        f" {case.optimizer} stepped on it and moved it by {moved[name]:.2g}, by weight decay,"
        f" momentum or averages. With None, as after set_to_none=True, {case.optimizer} leaves the"
        " parameter and its state alone"
    )


def none_in_place_of_zeros(
    window: WindowReference, evaluation: Evaluation, autocast: Compute
) -> str | None:
    """Return a parameter whose gradient is None, though some micro-batch with valid targets reaches
    it, or None.
    """
    absent = [
        name for name, g in evaluation.gradients.items() if g is None and name in window.reached
    ]
    if not absent:
        return None
    instance = window.reference.instance
    cuts = [instance.case.plan.items(j) for j in window.members]
    # items whose targets are all ignored reach parameters as well, but a loop may leave their
    # micro-batch out
    counted = [items for items in cuts if float(instance.count(instance.batch(items)))]
    # a rounding error may decide which expert of a mixture gets an item, so the run's own precision
    # is asked, too
    for dtype, compute in dict.fromkeys(((torch.float64, None), (instance.dtype, autocast))):
        model = window.model(dtype)
        with autocast_context(instance.device, compute):
            each = [gradients_of(instance, model, items, dtype=dtype) for items in counted]
        absent = [name for name in absent if any(found[name] is not None for found in each)]
    return next(iter(absent), None)


def stale_parameters(
    window: WindowReference, outcome: Outcome, evaluation: Evaluation, autocast: Compute
) -> Diagnosis | None:
    """Return the diagnosis of a wrong gradient that is right at parameters of an earlier step, else
    None.
    """
    step = next(
        k for k, o in enumerate(outcome.observations) if any(e is evaluation for e in o.evaluations)
    )
    # the latest first: where two of them fit, the lag is the shorter
    for k in reversed(range(step)):
        parameters = outcome.observations[k].evaluations[0].parameters
        if all(parameters[name] is value for name, value in evaluation.parameters.items()):
            continue
        if not _is_right_at(window, evaluation, parameters, autocast):
            continue
        when = (
            "initial parameters"
            if k == 0
            else f"parameters before the step {step - k} steps earlier"
        )
        return Diagnosis(
            "stale-parameters",
            f"the gradient is right at the {when} and wrong at those that the step changes",
        )
    return None


class Trajectory:
    """The parameters of a run, judged in the order in which they change: before a step, at it,
    after the last one.
    """

    def __init__(
        self, case: Case, outcome: Outcome, assumes: Collection[str], *, jax: bool = False
    ) -> None:
        """Start before the first step.

        Args:
            case: what the loop trained.
            outcome: what it did.
            assumes: what the loop assumes. Where it edits parameters between steps, what a step
                does to those that it finds, and the optimizer's state, are judged all the same.
            jax: whether it is one of JAX.
        """
        self._case = case
        self._outcome = outcome
        self.jax = jax
        self._edited = EDITS_PARAMETERS in assumes
        self._settings = EDITS_SETTINGS not in assumes
        # that of a loop of JAX may have no counterpart in torch, and nothing is computed again
        self._make = None if case.optimizer is None else OPTIMIZERS.get(case.optimizer)
        self._previous = outcome.beginning

    def before(self, step: int) -> Violation | None:
        """Return what changed parameters or state between the previous step and this one, or None."""
        observation = self._outcome.observations[step]
        # what the loop did between the steps is its own; the state of the optimizer is compared all
        # the same
        if self._edited:
            self._previous = replace(self._previous, after=observation.evaluations[0].parameters)
        # the settings of an optimizer whose step changes nothing decide nothing
        settings = self._settings and self._make is not None
        scheduled = bool(self._outcome.scheduler_steps)
        fault = fault_before(
            self._previous, observation, self._outcome.start, settings=settings, scheduled=scheduled
        )
        return None if fault is None else self._violation(fault, step)

    def at(self, step: int) -> Violation | None:
        """Return how a step changed parameters otherwise than the case's optimizer does, or None."""
        observation = self._outcome.observations[step]
        fault = fault_of_step(self._make, self._previous, observation)
        self._previous = observation
        return None if fault is None else self._violation(fault, step)

    def end(self) -> Violation | None:
        """Return what changed parameters after the last step, or None."""
        fault = fault_between(self._previous, self._outcome.parameters, self._outcome.start)
        return None if fault is None or self._edited else self._violation(fault, None)

    def _violation(self, fault: ParameterFault, step: int | None) -> Violation:
        epoch, window = (None, None) if step is None else divmod(step, len(self._case.plan.windows))
        return Violation(
            "parameters",
            fault.diagnosis,
            Diagnosis(fault.diagnosis, fault.sentence).explanation(jax=self.jax),
            self._case,
            parameter=fault.parameter,
            epoch=epoch,
            window=window,
            error=fault.error,
            allowed=None if fault.error is None else fault.allowed,
        )


UNNAMED = Diagnosis("", "")
"""In place of a diagnosis for which the loop would have to run again."""


DUPLICATES = Diagnosis(
    "dropped-micro-batch",
    "the loop is right where all items differ, and wrong under the same plan where items repeat: it"
    " takes what is equal to another for a duplicate",
    causes=("duplicates",),
)


def takes_duplicates(window: WindowReference, runner: LoopRunner) -> bool:
    """Return whether a loop whose gradient is wrong is right on the same case with items that all
    differ.

    Weights of equal micro-batches cannot be told apart, so a name that is read off them is a guess.
    """
    instance = window.reference.instance
    case = instance.case.replace(distinct_items=0)
    if case == instance.case:
        return False
    reference, _ = reference_of(case, instance.users_problem)
    outcome = None if reference is None else runner.run(reference.instance)
    if reference is None or outcome is None:
        return False
    trajectory = Trajectory(case, outcome, (EDITS_PARAMETERS, EDITS_SETTINGS))
    verdict = RunJudge(
        reference,
        outcome,
        trajectory,
        None,
        None,
    ).verdict()
    return verdict.holds and not verdict.skipped


def _compare(
    case: Case, autocast: Compute, expected: Vector, seen: Vector, *, missing: bool
) -> Comparison:
    """Compare the gradient of a step with the right one, within what rounding allows of one product
    per item.
    """
    terms = case.plan.accumulation_steps
    if case.dtype == "float64":
        allowed = quick_bound(expected, terms)
    else:
        unit = coarsest(case.dtype, autocast)
        assert unit is not None
        allowed = accumulation_bound(np.abs(expected), terms, unit)
    compared = finite_or_right(seen, expected)
    layout = Layout((PARAMETER,), ((case.plan.total_items,),))
    return Comparison(
        layout, expected, compared, allowed, frozenset([PARAMETER] if missing else [])
    )


SCALER_SKIPPED = (
    "a gradient scaler skipped the step of a window whose gradient is not finite, or out of range"
)
"""Why a step of the plan was not taken, where it need not be."""
OF_A_LATER_CALL = "this is call {} of the closure in one step, and no earlier one is found wrong"
NOT_FINITE = (
    "the reference gradient at the parameters that the optimizer has reached is NaN or infinite"
)
"""Why gradients are not judged that no correct loop has finite."""


def _finding(window: WindowReference, comparison: Comparison, *, moved: bool) -> str | None:
    """Return why the reference itself cannot be relied on, or None."""
    # at the initial parameters `check_run` asks JAX, of all windows at once
    found = disagreement(window) if moved else None
    if found is None and comparison.ratio > 1:
        found = accumulation_fault(window) or precision_fault(window)
    return found


def _missing(evaluation: Evaluation) -> frozenset[str]:
    return frozenset(name for name, g in evaluation.gradients.items() if g is None)


@dataclass(frozen=True)
class _Finding:
    """A fault of torch or JAX."""

    text: str


@dataclass(frozen=True)
class RunJudge:
    """Judges what a loop did in one run, within the precision that it declares.

    Attributes:
        reference: the references of the case.
        outcome: what the loop did.
        trajectory: the judge of the parameters, before the first step.
        runner: runs the loop again to name its fault; None while shrinking.
        autocast: dtype in which the loop declares that it computes its losses, or None.
    """

    reference: Reference
    outcome: Outcome
    trajectory: Trajectory
    runner: LoopRunner | None
    autocast: Compute

    @property
    def case(self) -> Case:
        """What the loop trained."""
        return self.reference.instance.case

    def verdict(self) -> Verdict:
        """Return the verdict on the run."""
        reference = self.reference
        outcome = self.outcome
        case = self.case
        if ended_in_divergence(case, outcome):
            taken = [*range(len(outcome.observations))]
            return self._steps(taken, missing=DIVERGED)
        if outcome.process:
            sentence = (
                "the loop changed torch for the whole process, the reference included:"
                f" {'; '.join(outcome.process)}"
            )
            return Verdict(case, self._of_model(Diagnosis("changed-torch", sentence)))
        if outcome.raised is not None:
            # where even the plain large batch fails in the case's dtype, this raises
            # CannotJudgeError: no loop's fault
            if not is_probe(case):
                reference.window(0, compute=self.autocast).bound.expect_computable()
            trace = tuple(outcome.trace.rstrip().splitlines())
            explanation = f"the loop failed: {outcome.raised}"
            diagnosis = "deadlock" if outcome.mismatched else "raised"
            if outcome.timed_out:
                diagnosis = "deadlock" if outcome.deadlock else "timed-out"
            return Verdict(
                case,
                Violation(
                    "raised",
                    diagnosis,
                    explanation,
                    case,
                    details=trace,
                ),
            )
        if outcome.structure:
            sentence = f"the loop changed the structure of the parameters: {outcome.structure}"
            return Verdict(case, self._of_model(Diagnosis("changed-model", sentence)))
        # a probe's right gradient is known without a model
        if is_probe(case):
            violation, ratio = self._on_probe()
            return Verdict(
                case, violation or self._of_parameters(), ratio=ratio, windows=case.plan.steps
            )
        places = steps_of_plan(case.plan, outcome, self._may_skip)
        if places is None:
            return Verdict(case, self._of_step_count())
        return self._steps(places)

    def _may_skip(self, window: int, taken: int) -> bool:
        """Whether a gradient scaler may skip a window after so many steps, at the parameters that
        they leave.
        """
        parameters = self.outcome.observations[taken - 1].after if taken else None
        found = self.reference.window(window, parameters, self.autocast)
        if self.runner and np.isfinite(found.expected).all():
            found.confirm()  # that the loop has no reason to skip it is part of a verdict
        return not np.isfinite(found.expected).all() or found.bound.is_out_of_range()

    def _of_step_count(self) -> Violation:
        if self.runner:
            named = explain_steps(self.reference.instance, self.outcome, self.runner)
        else:
            named = step_pattern(self.case.plan, self.outcome)
        return Violation(
            "step-count",
            named.name,
            self._explanation(named),
            self.case,
        )

    def _of_parameters(self) -> Violation | None:
        """Return what changed parameters on a weight probe, or None."""
        for step in range(len(self.outcome.observations)):
            if violation := self.trajectory.before(step) or self.trajectory.at(step):
                return violation
        return self.trajectory.end()

    def _steps(self, places: list[int], *, missing: str = SCALER_SKIPPED) -> Verdict:
        """Judge step by step: the parameters before a step, then its gradients, then the parameters
        after it.

        Args:
            places: for each step of the loop its index in the plan.
            missing: why the loop did not take the other steps of the plan.
        """
        case = self.case
        trajectory = self.trajectory
        ratio = 0.0
        judged = 0
        skipped = Counter({missing: case.plan.steps - len(places)})
        zeros: str | None = None
        for step, observation in enumerate(self.outcome.observations):
            # the order is that of the causes: parameters that were changed before a step explain
            # its gradient
            if violation := trajectory.before(step):
                return Verdict(case, violation, ratio=ratio)
            for call, evaluation in enumerate(observation.evaluations):
                found = self._gradients(places[step], evaluation)
                if isinstance(found, Violation):
                    if call and self.runner:
                        found = replace(
                            found,
                            explanation=with_note(
                                found.explanation, OF_A_LATER_CALL.format(call + 1)
                            ),
                        )
                    return Verdict(case, found, ratio=ratio)
                if isinstance(found, _Finding):
                    return Verdict(case, finding=found.text)
                if isinstance(found, str):
                    skipped[found] += 1
                else:
                    judged = judged + 1
                    ratio = max(ratio, found)
            if violation := trajectory.at(step):
                return Verdict(case, violation, ratio=ratio)
            if self.runner and zeros is None and (moved := zeros_that_move(case, observation)):
                index = places[step] % len(case.plan.windows)
                window = self.reference.window(index, observation.parameters, self.autocast)
                zeros = explain_zeros(case, moved, window)
        skipped = +skipped  # without zeros
        unjudged = None if judged else next(iter(skipped))
        return Verdict(
            case,
            trajectory.end(),
            ratio=ratio,
            skipped=unjudged,
            windows=judged,
            windows_skipped=dict(skipped),
            moved_by_zeros=zeros,
        )

    def _gradients(self, step: int, evaluation: Evaluation) -> float | str | Violation | _Finding:
        """Return error over allowed of what a step used, or why that cannot be judged, or what is
        wrong.
        """
        reference = self.reference
        runner = self.runner
        moved = not is_start(evaluation, self.outcome)
        if moved and is_diverged(evaluation):
            return DIVERGED
        epoch, index = divmod(step, len(self.case.plan.windows))
        seen = reference.flat(evaluation.gradients)
        try:
            window = reference.window(
                index, evaluation.parameters if moved else None, self.autocast
            )
            absent = none_in_place_of_zeros(window, evaluation, self.autocast)
            # while a case shrinks, what torch computes in one batch is right: JAX would take most
            # of the time and say the same
            if runner is None and absent is None and window.bound.is_torchs(seen):
                return 0.0
            # whether a sum of such numbers overflows depends on its order
            if moved and not np.isfinite(window.expected).all() and is_far(reference, evaluation):
                return NOT_FINITE
            comparison = window.compare(seen, roughly=runner is None)
            # while a case shrinks nothing is said
            if comparison.ratio > 1 and runner is not None and window.confirm():
                comparison = window.compare(seen)
            finding = _finding(window, comparison, moved=moved)
        except CannotJudgeError as error:
            return str(error)
        if finding:
            return _Finding(finding)
        if comparison.ratio > 1:
            return self._of_wrong_gradient(
                window,
                evaluation,
                comparison,
                epoch,
                moved=moved,
            )
        if absent is None:
            return comparison.ratio
        named = none_and_not_zeros(absent)
        evidence = replace(comparison, missing=_missing(evaluation))
        place = (absent, epoch, index)
        return self._violation(
            "none-pattern",
            named,
            evidence,
            place,
            moved=moved,
        )

    def _of_wrong_gradient(
        self,
        window: WindowReference,
        evaluation: Evaluation,
        comparison: Comparison,
        epoch: int,
        *,
        moved: bool,
    ) -> str | Violation:
        """Return the violation of a wrong gradient, or that the user's problem has none that is right."""
        problem = self.reference.instance.users_problem
        # a user's loss that is no sum over items has no right gradient to accumulate
        if problem and problem.reduction != "batch":
            fault = gradient_fault(self.reference, window)
            if fault:
                return fault
        # the cheap explanations first, each of which needs a comparison and no run of the loop
        known = undeclared_autocast(window, evaluation, self.outcome.compute)
        if known is None and self.runner:
            known = closure_without_reset(window, self.outcome, evaluation)
            if known is None and moved:
                known = stale_parameters(window, self.outcome, evaluation, self.autocast)
        return self._of_gradient(window, evaluation, comparison, epoch, known)

    def _of_gradient(
        self,
        window: WindowReference,
        evaluation: Evaluation,
        comparison: Comparison,
        epoch: int,
        known: Diagnosis | None,
    ) -> Violation:
        """Return the violation of a wrong gradient.

        Args:
            window: the window whose gradient is wrong.
            evaluation: what the step used.
            comparison: the gradient compared with the window's reference.
            epoch: the epoch of the step.
            known: the diagnosis where it is known already.
        """
        layout = comparison.layout
        # the parameter with the largest error over its bound stands for the gradient
        parameter, _ = layout.place(comparison.worst.index)
        seen = evaluation.gradients[parameter]
        kind: ViolationKind = "gradient"
        e = (
            Evidence(
                comparison,
                window,
                epoch,
                self.runner,
            )
            if self.runner
            else None
        )
        if seen is None:
            kind = "none-pattern"
            named = explain_missing(parameter, e) if e else missing_gradient(parameter)
        else:
            duplicates = e is not None and self._leaves_out_duplicates(e)
            if known is None:
                known = self._name_of(comparison, window, epoch, e)
            named = known or UNNAMED
            # items that are left out fit as items of weight 0, too
            if duplicates and is_of_weights(named.name):
                named = DUPLICATES
            expected = layout.part(window.expected, parameter)
            if not bool(torch.isfinite(seen).all()) and bool(np.isfinite(expected).all()):
                kind = "non-finite"
                sentence = (
                    f"the gradient of {parameter} is not finite at the step, the right one is;"
                    f" {named.sentence}"
                )
                named = replace(named, sentence=sentence)
        evidence = replace(comparison, missing=_missing(evaluation))
        return self._violation(
            kind, named, evidence, (parameter, epoch, window.index), moved=window.moved
        )

    def _leaves_out_duplicates(self, e: Evidence) -> bool:
        if not takes_duplicates(e.window, e.runner):
            return False
        # a loop that leaves out duplicates does so however small the loss is; one that clips does
        # not. A loss that is 2**-20 times as large has no digits in float16
        if self.case.dtype == "float16" or e.small is None:
            return True
        # what names the fault has its own runs
        e.runner.runs_left += 1
        return is_linear(e.comparison.observed, e.small)

    def _name_of(
        self, comparison: Comparison, window: WindowReference, epoch: int, e: Evidence | None
    ) -> Diagnosis | None:
        known = None
        if e:
            known = explain_module_hooks(e, self.outcome.hooked) or explain_gradient(e)
        # in lower precisions the weights that the gradient determines are too coarse to be read
        # alone
        if known is None and not window.moved and self.case.dtype == "float64":
            # what the gradient alone determines, without a further run of the loop
            known = diagnose_case(
                window,
                comparison,
                epoch,
                alike=self.outcome.alike,
            )
        return known

    def _violation(
        self,
        kind: ViolationKind,
        named: Diagnosis,
        evidence: Comparison,
        place: tuple[str, int, int],
        *,
        moved: bool = False,
    ) -> Violation:
        """Return the violation of a gradient that is wrong in a parameter, an epoch and a window."""
        parameter, epoch, window = place
        return Violation(
            kind,
            named.name,
            self._explanation(named),
            self.case,
            parameter=parameter,
            epoch=epoch,
            window=window,
            error=evidence.worst.error,
            allowed=evidence.worst.allowed,
            details=named.details,
            weights=named.weights,
            moved=moved,
            refutes_weights=named.refutes_weights,
            evidence=evidence,
        )

    def _of_model(self, named: Diagnosis) -> Violation:
        return Violation(
            "parameters",
            named.name,
            self._explanation(named),
            self.case,
        )

    def _explanation(self, named: Diagnosis) -> str:
        explanation = named.explanation(jax=self.trajectory.jax)
        swallowed = self.outcome.swallowed
        if not swallowed or not named.name:
            return explanation
        times = "once" if len(swallowed) == 1 else f"{len(swallowed)} times"
        return with_note(
            explanation, f"the loss raised {times}, and the loop went on: {swallowed[0]}"
        )

    def _on_probe(self) -> tuple[Violation | None, float]:
        """Return the violation of a loop on a weight probe, and the largest error over bound where
        there is none.
        """
        case = self.case
        outcome = self.outcome
        expected = expected_gradients(case)
        places = steps_of_plan(
            case.plan, outcome, lambda window, _: not np.isfinite(expected[window]).all()
        )
        if places is None:
            return self._of_step_count(), 0.0
        gradients = gradients_of_steps(outcome)
        steps = list(expected) * case.plan.epochs  # also of those that a gradient scaler skipped
        for step, gradient in zip(places, gradients, strict=True):
            steps[step] = gradient
        ratio = 0.0
        for taken, step in enumerate(places):
            seen = gradients[taken]
            missing = outcome.observations[taken].gradients[PARAMETER] is None
            comparison = _compare(
                case, self.autocast, expected[step % len(expected)], seen, missing=missing
            )
            if comparison.ratio > 1:
                return self._wrong_on_probe(steps, step, comparison), ratio
            ratio = max(ratio, comparison.ratio)
        return None, ratio

    def _wrong_on_probe(self, steps: list[Vector], step: int, comparison: Comparison) -> Violation:
        """Return the violation of a wrong gradient on a weight probe.

        Args:
            steps: the gradient of every step of the plan; the right one for a step that a gradient
                scaler skipped.
            step: index of the wrong one in the plan.
            comparison: its gradient compared with the right one.
        """
        epoch, window = divmod(step, len(self.case.plan.windows))
        e = self.runner and Evidence(
            comparison,
            self.reference.window(window),
            epoch,
            self.runner,
        )
        finite = np.isfinite(comparison.expected)
        kind: ViolationKind = (
            "gradient" if np.isfinite(comparison.observed[finite]).all() else "non-finite"
        )
        if PARAMETER in comparison.missing:
            kind = "none-pattern"
            named = missing_gradient(PARAMETER) if finite.all() else NOT_IN_GRADIENT
        else:
            hooks = explain_module_hooks(e, self.outcome.hooked) if e else None
            named = hooks or (explain_probe(e, steps) if e else UNNAMED)
        if e:
            named = e.confirmed(named)
        return self._violation(kind, named, comparison, (PARAMETER, epoch, window))
