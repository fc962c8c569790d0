"""check(loop, case) -> Verdict: run the loop, hold every gradient that reached its optimizer against the reference."""

from __future__ import annotations

from dataclasses import replace

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
from gradcheck_suite.execution.observer import Observation
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.execution.parameters import drift, replayed
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.execution.tracebacks import users_line
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem, autocast_of
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT
from gradcheck_suite.schema.results import Verdict, Violation, ViolationKind
from gradcheck_suite.verification.batch_dependence import batch_dependence
from gradcheck_suite.verification.separability import objective_fault
from gradcheck_suite.verification.undeclared_autocast import undeclared_autocast

FEW_DRAWS = 4
"""Draws of rounding errors where it is enough to know whether a gradient is wrong. The bound that they give is 20 times
as wide as the whole number's: what lies beyond it is wrong all the more, what lies within is measured again."""
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

    Raises:
        UsageError: the case cannot be built, or the user's problem fails before any loop runs.
        CannotRunHere: the loop raised it, because it cannot train the user's problem.
    """
    try:
        reference, fault = _reference(case, problem)
        if reference is None:
            return Verdict(case, Violation("not-accumulable", "not-accumulable", str(fault), case))
        if not shrinking and reference.finding:
            return Verdict(case, finding=reference.finding)
        outcome = run_loop(loop, reference.instance, time_limit_s=time_limit_s)
        if outcome.refused and problem is not None:
            # the user's problem is the same in every case
            raise CannotRunHere(outcome.refused)
        if outcome.refused:
            return Verdict(case, skipped=outcome.refused)
        runner = None if shrinking else LoopRunner(loop, time_limit_s=time_limit_s)
        verdict = _judge(reference, outcome, runner, autocast or autocast_of(loop))
        if verdict.violation is not None and reference.finding:
            return Verdict(case, finding=reference.finding)
        return verdict
    except CannotJudgeError as error:
        return Verdict(case, skipped=str(error))


def _gradient_fault(reference: Reference, window: Window) -> str | None:
    """Return why a problem that passes the forward-only check is not accumulable, or None where it is.

    The forward-only check compares one value, with a tolerance for float32 inside a model. So before a loop is blamed,
    torch's own accumulation in float64 must give the large batch's gradient.
    """
    difference = window.compare(window.accumulated()).worst
    if difference.ratio <= 1:
        return None
    parameter, _ = reference.layout.place(difference.index)
    instance = reference.instance
    return (
        "the objective is not a sum over items, so no accumulation can equal the large batch and no loop is to blame: "
        f"{batch_dependence(instance, window.model())}. The gradients of {parameter} in window "
        f"{window.index}, of the large batch and as the sum of the micro-batches', differ by "
        f"{error_text(difference.error, difference.allowed)}"
    )


def _cross_sample(case: Case) -> tuple[Reference | None, str | None]:
    """Return what `_reference` does, for a generated problem with a kind that is not separable over samples."""
    try:
        fault = objective_fault(generated_instance(case))
    except (RuntimeError, ValueError) as error:
        # batch normalisation refuses an epoch of one item, or one without valid targets
        raise CannotJudgeError(f"the plain large batch fails: {error}") from error
    if fault:
        return None, fault
    reference = REFERENCES.get(case, None)
    for index in range(len(case.plan.windows)):
        if fault := _gradient_fault(reference, reference.window(index)):
            return None, fault
    # on this case's items it makes no difference, and a loop can be judged
    return reference, None


def _reference(case: Case, problem: Problem | None) -> tuple[Reference | None, str | None]:
    """Return the case's reference, and why the problem is not accumulable, where that is so."""
    if problem is None:
        if case.spec is not None and not is_accumulable(case.spec):
            return _cross_sample(case)
        return REFERENCES.get(case, problem), None
    try:
        instance = user_instance(case, problem)
        if fault := objective_fault(instance):
            return None, fault
        reference = REFERENCES.get(case, problem)
        for window in range(len(case.plan.windows)):
            reference.window(window)
    except (UsageError, CannotJudgeError):
        raise
    except (Exception, SystemExit) as error:
        # a user's own code, which may raise anything
        fewest, most = min(case.plan.micro_batches), case.plan.total_items
        batches = f"batches of {fewest} to {most} items" if fewest < most else f"one batch of {most} item(s)"
        raise UsageError(
            f"the problem {case.problem} failed before any loop ran, on {batches}: "
            f"{type(error).__name__}: {error} ({users_line(error)})"
        ) from error
    return reference, None


def _judge(reference: Reference, outcome: Outcome, runner: LoopRunner | None, autocast: Compute) -> Verdict:
    """Judge what a loop did, within the precision that it declares; name its fault where there is a runner."""
    shrinking = runner is None
    case = reference.instance.case
    if outcome.raised is not None:
        # where even the plain large batch fails in the case's dtype, comparing raises CannotJudgeError: no loop's fault
        first = reference.window(0, compute=autocast)
        first.compare(first.expected)
        trace = tuple(outcome.trace.rstrip().splitlines())
        explanation = f"the loop failed: {outcome.raised}"
        diagnosis = "timed-out" if outcome.timed_out else "raised"
        return Verdict(case, Violation("raised", diagnosis, explanation, case, details=trace))
    if outcome.structure:
        explanation = f"the loop changed the model's parameters: {outcome.structure}"
        return Verdict(case, Violation("parameters", "changed-model", explanation, case))
    if outcome.endless or len(outcome.observations) != case.plan.steps:
        named = explain_steps(reference.instance, outcome, runner) if runner else step_pattern(case.plan, outcome)
        return Verdict(case, Violation("step-count", named.name, named.sentence, case))
    ratio, per_epoch = 0.0, len(case.plan.windows)
    for step, observation in enumerate(outcome.observations):
        epoch, index = divmod(step, per_epoch)
        if _diverged(observation):
            return Verdict(case, ratio=ratio)
        window = reference.window(index, observation.parameters or None, autocast)
        seen = reference.flat(observation.gradients)
        if shrinking and window.bound.is_torchs(seen):
            continue
        if observation.parameters and not np.isfinite(window.expected).all():
            return Verdict(case, ratio=ratio)
        comparison = _compare(window, seen, shrinking=shrinking)
        if comparison.ratio > 1:
            if reference.instance.users_problem and (fault := _gradient_fault(reference, window)):
                return Verdict(case, Violation("not-accumulable", "not-accumulable", fault, case))
            known = undeclared_autocast(window, observation, outcome.compute)
            return Verdict(case, _gradient_violation(window, observation, comparison, epoch, runner, known))
        ratio = max(ratio, comparison.ratio)
    violation = _parameters_violation(reference, outcome)
    return Verdict(case, violation, ratio=ratio)


def _compare(window: Window, observed: Vector, *, shrinking: bool) -> Comparison:
    if shrinking and (roughly := window.compare(observed, draws=FEW_DRAWS)).ratio > 1:
        return roughly
    return window.compare(observed)


def _diverged(observation: Observation) -> bool:
    """Whether a real optimizer has taken the parameters where products of a few of them overflow.

    From there on what is finite depends on the order of operations, and a sound loop diverges like any other.
    """
    values = observation.parameters.values()
    return any(bool((p.abs() > torch.finfo(p.dtype).max ** 0.25).any() or p.isnan().any()) for p in values)


def _fitted(window: Window, comparison: Comparison, epoch: int) -> Diagnosis:
    """Return the diagnosis that a wrong gradient alone determines, without a further run of the loop."""
    if window.moved or window.reference.instance.case.dtype != "float64":
        return UNNAMED
    return diagnose_case(window, comparison, epoch) or UNNAMED


def _gradient_violation(
    window: Window,
    observation: Observation,
    comparison: Comparison,
    epoch: int,
    runner: LoopRunner | None,
    known: Diagnosis | None,
) -> Violation:
    """Return the violation of a wrong gradient.

    Args:
        window: in which the gradient is wrong.
        observation: the step.
        comparison: of the gradient with the window's.
        epoch: of the step.
        runner: runs the loop again for a diagnosis; None while shrinking.
        known: the diagnosis where it is known already.
    """
    layout, worst = comparison.layout, comparison.worst
    parameter, _ = layout.place(worst.index)
    seen = observation.gradients[parameter]
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
        evidence=replace(comparison, missing=frozenset(n for n, g in observation.gradients.items() if g is None)),
    )


def _parameters_violation(reference: Reference, outcome: Outcome) -> Violation | None:
    """Hold the parameters against a replay: the same optimizer, stepped on the gradients that were observed."""
    case = reference.instance.case
    expected = outcome.start
    if case.optimizer is not None:
        expected = replayed(OPTIMIZERS[case.optimizer], outcome.start, outcome.observations)
    if _diverged(Observation({}, expected if case.optimizer else {})):
        return None
    for name, value in outcome.parameters.items():
        error, allowed = drift(value, expected[name], case.plan.steps)
        if not error <= allowed:
            explanation = (
                f"{name} ends up elsewhere than {case.optimizer or 'a step that changes nothing'} takes it "
                "on the very gradients that were observed: something else than the step changed it"
            )
            return Violation(
                "parameters",
                "parameter-drift",
                explanation,
                case,
                parameter=name,
                error=error,
                allowed=allowed,
            )
    return None
