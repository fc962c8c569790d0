"""check(loop, case) -> Verdict: run the loop, hold every gradient that reached its optimizer against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from gradcheck_suite.catalogue import is_accumulable
from gradcheck_suite.diagnosis.fitted_weights import diagnose_case
from gradcheck_suite.diagnosis.gradient import explain_gradient
from gradcheck_suite.diagnosis.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.step_count import explain_steps, step_pattern
from gradcheck_suite.diagnosis.weights import Diagnosis
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.instance import generated_instance, user_instance
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.execution.tracebacks import users_line
from gradcheck_suite.numerics.comparison import Comparison
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.agreement import disagreement, precision_fault
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem, autocast_of
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT
from gradcheck_suite.schema.results import Verdict, Violation, ViolationKind
from gradcheck_suite.schema.weight_probe import is_probe
from gradcheck_suite.verification.batch_dependence import AS_A_BATCH, batch_dependence
from gradcheck_suite.verification.parameters import Trajectory, stale_parameters
from gradcheck_suite.verification.probe_check import judge_probe
from gradcheck_suite.verification.separability import objective_fault
from gradcheck_suite.verification.steps_of_plan import steps_of_plan
from gradcheck_suite.verification.undeclared_autocast import undeclared_autocast

DIVERGED = "the parameters have diverged under the optimizer"
"""Why gradients are not judged whose finiteness depends on the order of operations."""
FAR = 16.0
"""Factor of the largest initial value from which on a gradient may overflow in one order of operations alone."""
SCALER_SKIPPED = "a gradient scaler skipped the step of a window whose gradient is not finite"
"""Why a step of the plan was not taken, where it need not be."""
NOT_FINITE = "the reference gradient at the parameters that the optimizer has reached is NaN or infinite"
"""Why gradients are not judged that no correct loop has finite."""


@dataclass(frozen=True)
class _Finding:
    """A fault of torch or JAX."""

    text: str


UNNAMED = Diagnosis("", "")
"""In place of a diagnosis for which the loop would have to run again."""


def check(
    loop: Loop,
    case: Case,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    shrinking: bool = False,
    autocast: str | None = None,
    assumes: Iterable[str] = (),
) -> Verdict:
    """Run a loop on a case and judge it.

    Args:
        loop: the subject.
        case: what it trains.
        problem: the user's problem that `case.problem` names, if it is not a generated one.
        time_limit_s: seconds after which the loop is stopped and counts as `raised`.
        shrinking: whether the kind of a violation suffices, as while Hypothesis shrinks. The loop then runs once, and
            a violation has a diagnosis only if its own gradient or number of steps determines one. JAX does not
            compute gradients that are right, and fewer draws measure rounding, so `allowed` may be larger.
        autocast: dtype in which the loop may compute its losses under `torch.autocast`; None for what it declares.
        assumes: what the loop assumes beside what it declares itself; its fault is named within that.

    Raises:
        UsageError: the case cannot be built, or the user's problem fails before any loop runs.
        CannotRunHere: the loop raised it, because it cannot train the user's problem.
    """
    try:
        reference, fault = _reference(case, problem)
        if reference is None:
            return Verdict(case, fault)
        asked = not shrinking and not is_probe(case)
        if asked:
            reference.start()
        outcome = run_loop(loop, reference.instance, time_limit_s=time_limit_s)
        if asked and reference.finding:
            return Verdict(case, finding=reference.finding)
        if outcome.refused and problem is not None:
            # the user's problem is the same in every case
            raise CannotRunHere(outcome.refused)
        if outcome.refused:
            return Verdict(case, skipped=outcome.refused)
        runner = None if shrinking else LoopRunner(loop, time_limit_s=time_limit_s, assumes=assumes)
        verdict = _judge(reference, outcome, runner, autocast or autocast_of(loop))
        if verdict.violation is not None and not is_probe(case) and reference.finding:
            return Verdict(case, finding=reference.finding)
        return verdict
    except CannotJudgeError as error:
        return Verdict(case, skipped=str(error))


def has_finite_gradients(case: Case, problem: Problem | None) -> bool:
    """Return whether the reference gradient of every window of a case is finite, at the initial parameters."""
    reference = REFERENCES.get(case, problem)
    return all(_is_finite(reference, window) for window in range(len(case.plan.windows)))


def _not_accumulable(case: Case, explanation: str | None) -> Violation | None:
    return Violation("not-accumulable", "not-accumulable", explanation, case) if explanation else None


def _gradient_fault(reference: Reference, window: Window) -> Violation | None:
    """Return why a problem that passes the forward-only check is not accumulable, or None where it is.

    The forward-only check compares one value, with a tolerance for float32 inside a model. So before a loop is blamed,
    torch's own accumulation in float64 must give the large batch's gradient.
    """
    comparison = window.compare(window.accumulated())
    difference = comparison.worst
    if difference.ratio <= 1:
        return None
    parameter, _ = reference.layout.place(difference.index)
    instance = reference.instance
    explanation = (
        "the objective is not a sum over items, so no plain accumulation can equal the large batch and no loop is to "
        f"blame: {batch_dependence(instance, window.model())}. {AS_A_BATCH}. The gradients of {parameter} in window "
        f"{window.index}, of the large batch and as the sum of the micro-batches', differ by "
        f"{error_text(difference.error, difference.allowed)}"
    )
    found = Violation("not-accumulable", "not-accumulable", explanation, instance.case)
    return replace(found, parameter=parameter, epoch=0, window=window.index, evidence=comparison)


def _cross_sample(case: Case) -> tuple[Reference | None, Violation | None]:
    """Return what `_reference` does, for a generated problem with a kind that is not separable over samples."""
    try:
        fault = objective_fault(generated_instance(case))
    except (RuntimeError, ValueError) as error:
        # batch normalisation refuses an epoch of one item, or one without valid targets
        raise CannotJudgeError(f"the plain large batch fails: {error}") from error
    if fault:
        return None, _not_accumulable(case, fault)
    reference = REFERENCES.get(case, None)
    for index in range(len(case.plan.windows)):
        if found := _gradient_fault(reference, reference.window(index)):
            return None, found
    # on this case's items it makes no difference, and a loop can be judged
    return reference, None


def _reference(case: Case, problem: Problem | None) -> tuple[Reference | None, Violation | None]:
    """Return the case's reference, and why the problem is not accumulable, where that is so."""
    if problem is None:
        if case.spec is not None and not is_accumulable(case.spec):
            return _cross_sample(case)
        return REFERENCES.get(case, problem), None
    try:
        instance = user_instance(case, problem)
        if fault := _not_accumulable(case, objective_fault(instance)):
            return None, fault
        reference = REFERENCES.get(case, problem)
        for window in range(len(case.plan.windows)):
            reference.window(window)
    except (UsageError, CannotJudgeError):
        raise
    except (Exception, SystemExit) as error:
        # a user's own code, which may raise anything
        fewest, most = min(case.plan.micro_batches), case.plan.total_items
        items = f"{most} item{'s' * (most > 1)}"
        batches = f"batches of {fewest} to {items}" if fewest < most else f"one batch of {items}"
        raise UsageError(
            f"the problem {case.problem} failed before any loop ran, on {batches}: "
            f"{type(error).__name__}: {error} ({users_line(error)})"
        ) from error
    return reference, None


def _judge(reference: Reference, outcome: Outcome, runner: LoopRunner | None, autocast: Compute) -> Verdict:
    """Judge what a loop did, within the precision that it declares; name its fault where there is a runner."""
    case = reference.instance.case
    if _ended_in_divergence(case, outcome):
        taken = [*range(len(outcome.observations))]
        return _judge_steps(reference, outcome, taken, runner, autocast, missing=DIVERGED)
    if outcome.raised is not None:
        # where even the plain large batch fails in the case's dtype, this raises CannotJudgeError: no loop's fault
        if not is_probe(case):
            reference.window(0, compute=autocast).bound.expect_computable()
        trace = tuple(outcome.trace.rstrip().splitlines())
        explanation = f"the loop failed: {outcome.raised}"
        diagnosis = "timed-out" if outcome.timed_out else "raised"
        return Verdict(case, Violation("raised", diagnosis, explanation, case, details=trace))
    if outcome.structure:
        explanation = f"the loop changed the model's parameters: {outcome.structure}"
        return Verdict(case, Violation("parameters", "changed-model", explanation, case))
    if is_probe(case):
        violation, ratio = judge_probe(reference.instance, outcome, runner, autocast)
        return Verdict(case, violation or _parameters_violation(case, outcome), ratio=ratio, windows=case.plan.steps)
    places = steps_of_plan(case.plan, outcome, lambda window: _is_finite(reference, window))
    if places is None:
        named = explain_steps(reference.instance, outcome, runner) if runner else step_pattern(case.plan, outcome)
        return Verdict(case, Violation("step-count", named.name, named.sentence, case))
    return _judge_steps(reference, outcome, places, runner, autocast)


def _parameters_violation(case: Case, outcome: Outcome) -> Violation | None:
    """Return what changed parameters on a weight probe, or None."""
    trajectory = Trajectory(case, outcome)
    for step in range(len(outcome.observations)):
        if violation := trajectory.before(step) or trajectory.at(step):
            return violation
    return trajectory.end()


def _is_finite(reference: Reference, window: int) -> bool:
    return bool(np.isfinite(reference.window(window).expected).all())


def _judge_steps(
    reference: Reference,
    outcome: Outcome,
    places: list[int],
    runner: LoopRunner | None,
    autocast: Compute,
    *,
    missing: str = SCALER_SKIPPED,
) -> Verdict:
    """Judge step by step: the parameters before a step, then its gradients, then the parameters after it.

    Args:
        reference: of the case.
        outcome: what the loop did.
        places: for each step of the loop its index in the plan.
        runner: runs the loop again for a diagnosis; None while shrinking.
        autocast: dtype in which the loop declares that it computes its losses, or None.
        missing: why the loop did not take the other steps of the plan.
    """
    case = reference.instance.case
    trajectory, ratio = Trajectory(case, outcome), 0.0
    judged, skipped = 0, Counter({missing: case.plan.steps - len(places)})
    for step, observation in enumerate(outcome.observations):
        if violation := trajectory.before(step):
            return Verdict(case, violation, ratio=ratio)
        for evaluation in observation.evaluations:
            found = _judge_gradients(reference, outcome, places[step], evaluation, runner, autocast)
            if isinstance(found, Violation):
                return Verdict(case, found, ratio=ratio)
            if isinstance(found, _Finding):
                return Verdict(case, finding=found.text)
            if isinstance(found, str):
                skipped[found] += 1
            else:
                judged, ratio = judged + 1, max(ratio, found)
        if violation := trajectory.at(step):
            return Verdict(case, violation, ratio=ratio)
    skipped = +skipped  # without zeros
    unjudged = None if judged else next(iter(skipped))
    return Verdict(case, trajectory.end(), ratio=ratio, skipped=unjudged, windows=judged, windows_skipped=dict(skipped))


def _judge_gradients(
    reference: Reference,
    outcome: Outcome,
    step: int,
    evaluation: Evaluation,
    runner: LoopRunner | None,
    autocast: Compute,
) -> float | str | Violation | _Finding:
    """Return error over allowed of the gradients that a step used, or why they cannot be judged, or what is wrong."""
    case = reference.instance.case
    moved = case.optimizer is not None and not _is_start(evaluation, outcome)
    if moved and _diverged(evaluation):
        return DIVERGED
    epoch, index = divmod(step, len(case.plan.windows))
    seen = reference.flat(evaluation.gradients)
    try:
        window = reference.window(index, evaluation.parameters if moved else None, autocast)
        if runner is None and window.bound.is_torchs(seen):
            return 0.0
        if moved and not np.isfinite(window.expected).all() and _is_far(reference, evaluation):
            return NOT_FINITE
        comparison = window.compare(seen, roughly=runner is None)
        if finding := _reference_fault(window, wrong=comparison.ratio > 1):
            return finding
    except CannotJudgeError as error:
        return str(error)
    if comparison.ratio <= 1:
        return comparison.ratio
    problem = reference.instance.users_problem
    if problem and problem.reduction != "batch" and (fault := _gradient_fault(reference, window)):
        return fault
    known = undeclared_autocast(window, evaluation, outcome.compute)
    if known is None and moved and runner:
        known = stale_parameters(window, outcome, evaluation, autocast)
    return _gradient_violation(window, evaluation, comparison, epoch, runner, known)


def _reference_fault(window: Window, *, wrong: bool) -> _Finding | None:
    """Return where the references themselves are wrong, so that no loop is to blame.

    Before the loop ran, torch and JAX were compared at the initial parameters. Torch in a lower precision is looked at
    where a gradient is wrong.
    """
    if (wrong or window.moved) and (finding := disagreement(window)):
        return _Finding(finding)
    if wrong and (finding := precision_fault(window)):
        return _Finding(finding)
    return None


def _diverged(evaluation: Evaluation) -> bool:
    """Whether a real optimizer has taken the parameters where products of a few of them overflow.

    From there on what is finite depends on the order of operations, and a sound loop diverges like any other.
    """
    values = evaluation.parameters.values()
    return any(bool((p.abs() > torch.finfo(p.dtype).max ** 0.25).any() or p.isnan().any()) for p in values)


def _ended_in_divergence(case: Case, outcome: Outcome) -> bool:
    """Whether a loop raised, or took too few steps, at parameters that have diverged under a real optimizer.

    A check of the loss and a gradient scaler then do what they are for. The steps that were taken are judged.
    """
    stopped = outcome.raised is not None and not outcome.timed_out
    if case.optimizer is None or outcome.structure or not (stopped or len(outcome.observations) < case.plan.steps):
        return False
    last = outcome.observations[-1].after if outcome.observations else outcome.parameters
    return _diverged(Evaluation({}, last))


def _is_start(evaluation: Evaluation, outcome: Outcome) -> bool:
    """Whether no parameter has moved yet, so that the window is one of those that are kept."""
    return all(value is outcome.start[name] for name, value in evaluation.parameters.items())


def _is_far(reference: Reference, evaluation: Evaluation) -> bool:
    """Whether some parameter is far larger than all were at first, so that the order of operations may overflow."""
    first = max((float(np.abs(value).max(initial=0.0)) for value in reference.values64.values()), default=0.0)
    return any(bool((p.abs() > FAR * max(1.0, first)).any()) for p in evaluation.parameters.values())


def _fitted(window: Window, comparison: Comparison, epoch: int) -> Diagnosis:
    """Return the diagnosis that a wrong gradient alone determines, without a further run of the loop."""
    if window.moved or window.reference.instance.case.dtype != "float64":
        return UNNAMED
    return diagnose_case(window, comparison, epoch) or UNNAMED


def _gradient_violation(
    window: Window,
    evaluation: Evaluation,
    comparison: Comparison,
    epoch: int,
    runner: LoopRunner | None,
    known: Diagnosis | None,
) -> Violation:
    """Return the violation of a wrong gradient.

    Args:
        window: in which the gradient is wrong.
        evaluation: what the step used.
        comparison: of the gradient with the window's.
        epoch: of the step.
        runner: runs the loop again for a diagnosis; None while shrinking.
        known: the diagnosis where it is known already.
    """
    layout, worst = comparison.layout, comparison.worst
    parameter, _ = layout.place(worst.index)
    seen = evaluation.gradients[parameter]
    kind: ViolationKind = "gradient"
    if seen is None:
        kind = "none-pattern"
        named = Diagnosis(
            "missing-gradient", f"{parameter}.grad is None at the step, but the window's items reach {parameter}"
        )
    else:
        if runner and known is None:
            known = explain_gradient(comparison, window, epoch, runner)
        named = known or _fitted(window, comparison, epoch)
        expected = layout.part(window.expected, parameter)
        if not bool(torch.isfinite(seen).all()) and bool(np.isfinite(expected).all()):
            kind = "non-finite"
            said = f"{parameter}.grad is not finite at the step, the right gradient is; {named.sentence}"
            named = replace(named, sentence=said)
    return Violation(
        kind,
        named.name,
        named.sentence,
        window.reference.instance.case,
        parameter=parameter,
        epoch=epoch,
        window=window.index,
        error=worst.error,
        allowed=worst.allowed,
        details=named.details,
        evidence=replace(comparison, missing=frozenset(n for n, g in evaluation.gradients.items() if g is None)),
    )
