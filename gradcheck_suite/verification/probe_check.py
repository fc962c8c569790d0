"""Judging a loop on a weight probe, whose right gradient follows from the plan and needs no reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.further_runs.repeat import confirmed_by_repeating
from gradcheck_suite.diagnosis.on_probe.probe_faults import NOT_IN_GRADIENT, explain_probe, explain_skips, other_windows
from gradcheck_suite.diagnosis.on_probe.probe_weights import (
    expected_gradients,
    gradients_of_steps,
    held_by,
    may_be_non_finite,
    ranges_text,
)
from gradcheck_suite.diagnosis.step_count import explain_steps, step_pattern
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, missing_gradient
from gradcheck_suite.execution.autocast import Compute, coarsest
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.bounds import accumulation_bound, quick_bound
from gradcheck_suite.numerics.comparison import Comparison, Layout, Vector
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.schema.weight_probe import PARAMETER
from gradcheck_suite.verification.steps_of_plan import steps_of_plan

MOST_STEPS = 6
"""Steps whose micro-batches are listed."""


def judge_probe(
    instance: Instance, outcome: Outcome, runner: LoopRunner | None, autocast: Compute
) -> tuple[Violation | None, float]:
    """Return the violation of a loop on a weight probe, and the largest error over bound where there is none.

    Args:
        instance: the probe.
        outcome: what the loop did; it neither raised nor changed the model's parameters.
        runner: of the loop; without one the violation has no diagnosis.
        autocast: dtype in which the loop declares that it computes its losses, or None.
    """
    case = instance.case
    expected = expected_gradients(case)
    places = steps_of_plan(case.plan, outcome, lambda window, _: not np.isfinite(expected[window]).all())
    if places is None:
        return _step_violation(instance, outcome, runner), 0.0
    gradients = gradients_of_steps(outcome)
    steps: list[Vector | None] = [None] * case.plan.steps
    for step, gradient in zip(places, gradients, strict=True):
        steps[step] = gradient
    ratio = 0.0
    for taken, step in enumerate(places):
        seen, missing = gradients[taken], outcome.observations[taken].gradients[PARAMETER] is None
        comparison = _compare(case, autocast, expected[step % len(expected)], seen, missing=missing)
        if comparison.ratio > 1:
            violation = _gradient_violation(case, steps, step, comparison, runner)
            return _confirmed_by_repeating(violation, instance, comparison, taken, runner), ratio
        ratio = max(ratio, comparison.ratio)
    return None, ratio


def _compare(case: Case, autocast: Compute, expected: Vector, seen: Vector, *, missing: bool) -> Comparison:
    """Compare the gradient of a step with the right one, within what rounding allows of one product per item."""
    terms = case.plan.accumulation_steps
    if case.dtype == "float64":
        allowed = quick_bound(expected, terms)
    else:
        unit = coarsest(case.dtype, autocast)
        assert unit is not None
        allowed = accumulation_bound(np.abs(expected), terms, unit)
    compared = np.where(may_be_non_finite(expected) & ~np.isfinite(seen), expected, seen)
    layout = Layout((PARAMETER,), ((case.plan.total_items,),))
    return Comparison(layout, expected, compared, allowed, frozenset([PARAMETER] if missing else []))


def _step_violation(instance: Instance, outcome: Outcome, runner: LoopRunner | None) -> Violation:
    case = instance.case
    if runner is None:
        named = step_pattern(case.plan, outcome)
    else:
        named = explain_skips(case, outcome, runner) or explain_steps(instance, outcome, runner)
        if named.name == "wrong-step-count":
            named = other_windows(case, gradients_of_steps(outcome)) or replace(named, details=_held(case, outcome))
    return Violation("step-count", named.name, named.sentence, case, details=named.details)


def _held(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """Return a line for each step around the first that holds other micro-batches than its window."""
    plan = case.plan
    held = [held_by(plan, items) for items in gradients_of_steps(outcome)]
    right = list(plan.windows) * plan.epochs
    first = next((s for s, step in enumerate(held) if s >= len(right) or tuple(step) != right[s]), len(held))
    shown = range(max(0, first - 1), min(len(held), first + MOST_STEPS - 1))
    lines = [f"  step {step}: {ranges_text(held[step]) or 'none'}" for step in shown]
    return ("micro-batches that each step's gradient holds:", *lines) if lines else ()


def _confirmed_by_repeating(
    violation: Violation, instance: Instance, comparison: Comparison, taken: int, runner: LoopRunner | None
) -> Violation:
    """Return a violation with the diagnosis `not-repeatable` where the loop does not show it in each of two more runs.

    Args:
        violation: of a gradient.
        instance: the probe.
        comparison: of the wrong gradient.
        taken: index of its step among those of the run.
        runner: of the loop; None while shrinking.
    """
    if runner is None:
        return violation

    def gradient(outcome: Outcome) -> Vector | None:
        steps = gradients_of_steps(outcome)
        return steps[taken] if outcome.raised is None and taken < len(steps) else None

    found = Diagnosis(violation.diagnosis, violation.explanation, violation.details, violation.weights)
    named = confirmed_by_repeating(found, runner, instance, comparison, gradient)
    return replace(
        violation,
        diagnosis=named.name,
        explanation=named.sentence,
        details=named.details,
        weights=named.weights,
    )


def _gradient_violation(
    case: Case, steps: list[Vector | None], step: int, comparison: Comparison, runner: LoopRunner | None
) -> Violation:
    epoch, window = divmod(step, len(case.plan.windows))
    worst = comparison.worst
    finite = np.isfinite(comparison.expected)
    kind = "gradient" if np.isfinite(comparison.observed[finite]).all() else "non-finite"
    if PARAMETER in comparison.missing:
        kind = "none-pattern"
        named = missing_gradient(PARAMETER) if finite.all() else NOT_IN_GRADIENT
    else:
        named = explain_probe(case, steps, step, runner) if runner else Diagnosis("", "")
    return Violation(
        "none-pattern" if kind == "none-pattern" else "non-finite" if kind == "non-finite" else "gradient",
        named.name,
        named.sentence,
        case,
        parameter=PARAMETER,
        epoch=epoch,
        window=window,
        error=worst.error,
        allowed=worst.allowed,
        details=named.details,
        weights=named.weights,
        evidence=comparison,
    )
