"""Work that belongs to a step, done at each micro-batch: a learning rate schedule, the update of a gradient scaler.

The gradients may be right all the same: a schedule only ends K times too early, and a scaler that is disabled, as on a
CPU, does nothing.
"""

from __future__ import annotations

from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import SCHEDULES_MICRO_BATCHES
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.schema.weight_probe import is_probe


def step_calls_fault(case: Case, outcome: Outcome, rank: int, *, schedules: bool) -> Violation | None:
    """Return the violation of a loop that calls a scheduler or scaler once per micro-batch, the optimizer per window.

    Once per window and once per epoch are both right, and any other number may be meant. Several ranks may step a
    scheduler as many times per window as there are ranks, as Accelerate does. Weight probes are left out.

    Args:
        case: the case.
        outcome: of a rank.
        rank: which one.
        schedules: whether the loop assumes that its schedule counts micro-batches.
    """
    plan = case.plan
    micro_batches = (plan.ranks or (len(plan.micro_batches),))[rank]
    windows = len(plan.windows)
    if is_probe(case) or micro_batches in (windows, windows * plan.world_size):
        return None

    def calls(counts: dict[int, int]) -> str | None:
        """Say how often something was called where it was once per micro-batch, in all epochs or in one."""
        total = sum(counts.values())
        if total == micro_batches * plan.epochs:
            return f"{total} times, once per micro-batch, and the optimizer {plan.steps} times, once per window"
        if len(counts) == plan.epochs and (found := [e for e, n in counts.items() if n == micro_batches]):
            return (
                f"{micro_batches} times in epoch {found[0]}, once per micro-batch, and the optimizer {windows} times, "
                "once per window"
            )
        return None

    for counts in outcome.scheduler_steps:
        if not schedules and (said := calls(counts)):
            return Violation(
                "step-count",
                "scheduler-per-micro-batch",
                f"a learning rate scheduler was stepped {said}: step the scheduler where the optimizer steps; if its "
                f"schedule is meant to advance once per micro-batch, assume {SCHEDULES_MICRO_BATCHES}",
                case,
            )
    for method, counts in outcome.scaler_calls:
        if said := calls(counts):
            return Violation(
                "step-count",
                "scaler-per-micro-batch",
                f"GradScaler.{method} was called {said}: unscale, step and update once per window, after its last "
                "backward. A scaler that is disabled, as without CUDA, hides what this does to the gradient",
                case,
            )
    return None
