"""Which step of the plan each step of a loop is, where a gradient scaler may have skipped some."""

from __future__ import annotations

from collections.abc import Callable

from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.plan import Plan


def steps_of_plan(plan: Plan, outcome: Outcome, may_skip: Callable[[int, int], bool]) -> list[int] | None:
    """Return for each step that a loop took its index in the plan; None where the numbers of steps do not fit.

    A `torch.amp.GradScaler` may skip the step of a window whose right gradient is infinite, NaN or out of range. That
    is what it is for, and no gradient is promised there.

    Args:
        plan: of the run.
        outcome: what the loop did.
        may_skip: (index of a window in its epoch, number of steps taken before it) -> whether its gradient is so.
    """
    if outcome.endless or len(outcome.observations) + len(outcome.skipped) < plan.steps:
        return None
    places: list[int] = []
    skipped = list(outcome.skipped)
    for step in range(plan.steps):
        if len(places) in skipped and may_skip(step % len(plan.windows), len(places)):
            skipped.remove(len(places))
        else:
            places.append(step)
    return places if len(places) == len(outcome.observations) else None
