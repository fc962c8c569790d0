"""Judge what a loop did in one run: its steps, the gradients that they used and the parameters that they changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.step_count import explain_steps, step_pattern
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.agreement import accumulation_fault, disagreement, precision_fault
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.results import Verdict, Violation
from gradcheck_suite.schema.weight_probe import is_probe
from gradcheck_suite.verification.accumulable import gradient_fault
from gradcheck_suite.verification.closure_calls import closure_without_reset
from gradcheck_suite.verification.divergence import DIVERGED, ended_in_divergence, is_diverged, is_far, is_start
from gradcheck_suite.verification.gradient_violation import gradient_violation
from gradcheck_suite.verification.moved_by_zeros import explain_zeros, moved_while_frozen, zeros_that_move
from gradcheck_suite.verification.parameters import Trajectory, stale_parameters
from gradcheck_suite.verification.probe_check import judge_probe
from gradcheck_suite.verification.steps_of_plan import steps_of_plan
from gradcheck_suite.verification.undeclared_autocast import undeclared_autocast

SCALER_SKIPPED = "a gradient scaler skipped the step of a window whose gradient is not finite, or out of range"
"""Why a step of the plan was not taken, where it need not be."""
NOT_FINITE = "the reference gradient at the parameters that the optimizer has reached is NaN or infinite"
"""Why gradients are not judged that no correct loop has finite."""


@dataclass(frozen=True)
class _Finding:
    """A fault of torch or JAX."""

    text: str


def judge_run(
    reference: Reference, outcome: Outcome, trajectory: Trajectory, runner: LoopRunner | None, autocast: Compute
) -> Verdict:
    """Judge what a loop did, within the precision that it declares; name its fault where there is a runner."""
    case = reference.instance.case
    if ended_in_divergence(case, outcome):
        taken = [*range(len(outcome.observations))]
        return _judge_steps(reference, outcome, trajectory, taken, runner, autocast, missing=DIVERGED)
    if outcome.raised is not None:
        # where even the plain large batch fails in the case's dtype, this raises CannotJudgeError: no loop's fault
        if not is_probe(case):
            reference.window(0, compute=autocast).bound.expect_computable()
        trace = tuple(outcome.trace.rstrip().splitlines())
        explanation = f"the loop failed: {outcome.raised}"
        diagnosis = "mismatched-collectives" if outcome.mismatched else "raised"
        if outcome.timed_out:
            diagnosis = "deadlock" if outcome.deadlock else "timed-out"
        return Verdict(case, Violation("raised", diagnosis, explanation, case, details=trace))
    if outcome.structure:
        explanation = f"the loop changed the model's parameters: {outcome.structure}{moved_while_frozen(case, outcome)}"
        return Verdict(case, Violation("parameters", "changed-model", explanation, case))
    if is_probe(case):
        violation, ratio = judge_probe(reference.instance, outcome, runner, autocast)
        return Verdict(
            case, violation or _parameters_violation(trajectory, outcome), ratio=ratio, windows=case.plan.steps
        )
    places = steps_of_plan(case.plan, outcome, lambda *step: _may_skip(reference, outcome, autocast, *step))
    if places is None:
        named = explain_steps(reference.instance, outcome, runner) if runner else step_pattern(case.plan, outcome)
        return Verdict(case, Violation("step-count", named.name, named.sentence, case))
    return _judge_steps(reference, outcome, trajectory, places, runner, autocast)


def _parameters_violation(trajectory: Trajectory, outcome: Outcome) -> Violation | None:
    """Return what changed parameters on a weight probe, or None."""
    for step in range(len(outcome.observations)):
        if violation := trajectory.before(step) or trajectory.at(step):
            return violation
    return trajectory.end()


def _may_skip(reference: Reference, outcome: Outcome, autocast: Compute, window: int, taken: int) -> bool:
    """Whether a gradient scaler may skip a window after so many steps, at the parameters that they leave."""
    found = reference.window(window, outcome.observations[taken - 1].after if taken else None, autocast)
    return not np.isfinite(found.expected).all() or found.bound.is_out_of_range()


def _judge_steps(
    reference: Reference,
    outcome: Outcome,
    trajectory: Trajectory,
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
        trajectory: of the parameters, before the first step.
        places: for each step of the loop its index in the plan.
        runner: runs the loop again for a diagnosis; None while shrinking.
        autocast: dtype in which the loop declares that it computes its losses, or None.
        missing: why the loop did not take the other steps of the plan.
    """
    case = reference.instance.case
    ratio, judged, skipped = 0.0, 0, Counter({missing: case.plan.steps - len(places)})
    zeros: str | None = None
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
        if runner and zeros is None and (moved := zeros_that_move(case, observation)):
            index = places[step] % len(case.plan.windows)
            zeros = explain_zeros(case, observation, moved, reference.window(index, observation.parameters, autocast))
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
    moved = not is_start(evaluation, outcome)
    if moved and is_diverged(evaluation):
        return DIVERGED
    epoch, index = divmod(step, len(case.plan.windows))
    seen = reference.flat(evaluation.gradients)
    try:
        window = reference.window(index, evaluation.parameters if moved else None, autocast)
        if runner is None and window.bound.is_torchs(seen):
            return 0.0
        if moved and not np.isfinite(window.expected).all() and is_far(reference, evaluation):
            return NOT_FINITE
        comparison = window.compare(seen, roughly=runner is None)
        if finding := _reference_fault(window, wrong=comparison.ratio > 1):
            return _Finding(finding)
    except CannotJudgeError as error:
        return str(error)
    if comparison.ratio <= 1:
        return comparison.ratio
    problem = reference.instance.users_problem
    if problem and problem.reduction != "batch" and (fault := gradient_fault(reference, window)):
        return fault
    known = undeclared_autocast(window, evaluation, outcome.compute)
    if known is None and runner:
        known = closure_without_reset(window, outcome, evaluation)
    if known is None and moved and runner:
        known = stale_parameters(window, outcome, evaluation, autocast)
    return gradient_violation(window, evaluation, comparison, epoch, runner, known, alike=outcome.alike)


def _reference_fault(window: Window, *, wrong: bool) -> str | None:
    """Say where the references themselves are wrong, if they are, so that no loop is to blame.

    Before the loop ran, torch and JAX were compared at the initial parameters. Torch's accumulation in float64, and
    torch in a lower precision, are looked at where a gradient is wrong.

    Args:
        window: whose references.
        wrong: whether the loop's gradient differs from them.
    """
    if (wrong or window.moved) and (finding := disagreement(window)):
        return finding
    return (accumulation_fault(window) or precision_fault(window)) if wrong else None
