"""A step that calls its closure several times, as L-BFGS does, where the closure does not reset the gradients."""

from __future__ import annotations

from itertools import pairwise

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.window import Window

ROUNDINGS = 8.0
"""Multiple of the gradient's bound that is allowed the difference of two sums: of up to twenty calls by default."""


def closure_without_reset(window: Window, outcome: Outcome, evaluation: Evaluation) -> Diagnosis | None:
    """Return the diagnosis of a wrong gradient that is right but for that of the call of the closure before it.

    Args:
        window: at the parameters of this call.
        outcome: what the loop did.
        evaluation: the call whose gradient is wrong.
    """
    calls = (pair for observation in outcome.observations for pair in pairwise(observation.evaluations))
    before = next((first for first, second in calls if second is evaluation), None)
    # a hook that edits the gradients of a call leaves an evaluation at the same parameters
    if before is None or before.parameters is evaluation.parameters:
        return None
    flat = window.reference.flat
    if window.compare(flat(evaluation.gradients) - flat(before.gradients)).ratio > ROUNDINGS:
        return None
    return Diagnosis(
        "stale-window",
        "the optimizer calls the closure several times in a step, and the gradient of each call contains those of the "
        "calls before it: reset at the start of the closure, not before the step",
    )
