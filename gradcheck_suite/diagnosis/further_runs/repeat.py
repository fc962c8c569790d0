"""Whether a loop hands its step the same gradient when it runs again on the same case.

A fault that is gone in the next run also seems to depend on the gradient's size: the run with a small loss lacks it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.comparison import Comparison, Vector

NOT_REPEATABLE = Diagnosis(
    "not-repeatable",
    "run again on the same case, the loop hands its step another gradient: it keeps state from one run to the next (a "
    "global counter, a cache, an iterator), or draws from a generator that torch's seed does not set; start anew in "
    "every run",
)


def confirmed_by_repeating(
    found: Diagnosis,
    runner: LoopRunner,
    instance: Instance,
    comparison: Comparison,
    step: Callable[[Outcome], Vector | None],
) -> Diagnosis:
    """Return a diagnosis, or `not-repeatable` where one of the remaining runs gives another gradient.

    Args:
        found: the diagnosis.
        runner: of the loop.
        instance: the case.
        comparison: of the wrong gradient with the right one.
        step: returns the gradient of the step in question of a run, (P,); None where the run has no such step.
    """
    for outcome in runner.repeat(instance):
        if outcome.skipped:
            return found  # a gradient scaler took fewer steps than there are windows
        again = step(outcome)
        if again is None or not is_same(again, comparison):
            return NOT_REPEATABLE
    return found


def is_same(again: Vector, comparison: Comparison) -> bool:
    """Return whether a run again gives the observed gradient, but for rounding."""
    seen = comparison.observed
    with np.errstate(invalid="ignore"):
        near = np.abs(again - seen) <= comparison.allowed
    return bool((near | (again == seen) | (~np.isfinite(again) & ~np.isfinite(seen))).all())
