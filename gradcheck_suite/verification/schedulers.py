"""A learning rate scheduler that is stepped at each micro-batch: its schedule ends K times too early."""

from __future__ import annotations

from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import SCHEDULES_MICRO_BATCHES
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.schema.weight_probe import is_probe


def scheduler_fault(case: Case, outcome: Outcome, rank: int) -> Violation | None:
    """Return the violation of a loop that steps a scheduler once per micro-batch and the optimizer once per window.

    Once per window and once per epoch are both right, and any other number may be meant. Several ranks may step it
    as many times per window as there are ranks, as Accelerate does. Weight probes are left out.

    Args:
        case: the case.
        outcome: of a rank.
        rank: which one.
    """
    plan = case.plan
    micro_batches = (plan.ranks or (len(plan.micro_batches),))[rank] * plan.epochs
    right = (plan.steps, plan.steps * plan.world_size)
    if is_probe(case) or micro_batches in right or micro_batches not in outcome.scheduler_steps:
        return None
    return Violation(
        "step-count",
        "scheduler-per-micro-batch",
        f"a learning rate scheduler was stepped {micro_batches} times, once per micro-batch, and the optimizer "
        f"{plan.steps} times, once per window: step the scheduler where the optimizer steps; if its schedule is meant "
        f"to advance once per micro-batch, assume {SCHEDULES_MICRO_BATCHES}",
        case,
    )
