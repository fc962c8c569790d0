"""Saying why a loop stepped too seldom or too often."""

from __future__ import annotations

import torch

from gradcheck_suite.diagnosis.probe_weights import probe_steps
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.schema.contract import Loop
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Violation


def explain_steps(loop: Loop, reference: Reference, outcome: Outcome) -> Violation:
    """Return the violation of a loop that stepped too seldom or too often."""
    case = reference.instance.case
    plan, taken, reduction = case.plan, len(outcome.observations), reference.instance.problem.reduction
    full, micro = len(plan.micro_batches) // plan.accumulation_steps, len(plan.micro_batches)
    times = f"{taken} or more times" if outcome.endless else f"{taken} times"
    explanation = (
        f"optimizer.step() was called {times}, where {plan.epochs} epoch(s) of {len(plan.windows)} window(s) "
        f"ask for {plan.steps}"
    )
    diagnosis = "wrong-step-count"
    if outcome.endless:
        diagnosis = "endless"
        explanation += "; the loop was stopped there"
    elif plan.has_short_window and plan.epochs > 1 and _runs_on(loop, plan, reduction):
        diagnosis = "windows-across-epochs"
        explanation += (
            f": windows run on from one epoch into the next, {plan.accumulation_steps} micro-batches each; step at the "
            "end of every epoch and start the next one's windows anew"
        )
    elif plan.has_short_window and taken == plan.epochs * full and (tail := _tail_fault(loop, plan, reduction)):
        diagnosis, cure = tail
        explanation += f": the short last window (micro-batches {list(plan.windows[-1])}) is never stepped{cure}"
    elif taken == 0:
        diagnosis = "never-stepped"
        moved = any(not torch.equal(value, outcome.start[name]) for name, value in outcome.parameters.items())
        explanation += ": run.optimizer was never stepped" + (
            ", yet the parameters moved, so something else was; step run.optimizer, or wrap it" if moved else ""
        )
    elif (passes := _passes(loop, plan.epochs, reduction)) not in (None, plan.epochs):
        diagnosis = "wrong-epochs"
        explanation += f": it makes {passes} pass(es); pass over run.loader run.epochs times"
    elif taken == plan.epochs * micro:
        diagnosis = "step-per-micro-batch"
        explanation += ": it stepped once per micro-batch"
    elif taken < plan.steps and "float16" in (case.dtype, outcome.compute):
        explanation += (
            "; a GradScaler skips the step of a window whose gradients overflow float16: where the loop has one, give "
            "it a smaller init_scale"
        )
    return Violation("step-count", diagnosis, explanation, case)


def _passes(loop: Loop, epochs: int, reduction: str) -> int | None:
    """Return how often the loop passes over the loader, seen where every micro-batch is a window; None if unclear."""
    micro_batches = (1, 1, 1)
    seen = probe_steps(loop, Plan(micro_batches, 1, epochs), reduction)
    if seen is None or len(seen) % len(micro_batches):
        return None
    in_turn = all(weights[step % len(micro_batches)] for step, weights in enumerate(seen))
    return len(seen) // len(micro_batches) if in_turn else None


def _runs_on(loop: Loop, plan: Plan, reduction: str) -> bool:
    """Whether the loop's second window of K is the short one of K + 1 micro-batches and K - 1 of the next epoch."""
    k = plan.accumulation_steps
    seen = probe_steps(loop, Plan((1,) * (k + 1), k, 2), reduction)
    if seen is None or len(seen) < 2:
        return False
    return bool(seen[1][k] != 0 and seen[1][: k - 1].all() and seen[1][k - 1] == 0)


def _tail_fault(loop: Loop, plan: Plan, reduction: str) -> tuple[str, str] | None:
    """Say what becomes of a short last window, seen on one micro-batch more than a window and two epochs."""
    k = plan.accumulation_steps
    seen = probe_steps(loop, Plan((1,) * (k + 1), k, 2), reduction)
    if seen is None or len(seen) < 2:
        return None
    # the second step is the second epoch's first window, unless the loop steps the tail after all
    first, tail = seen[1][:k].any(), seen[1][k] != 0
    if first and tail:
        return "tail-leak", ", and its gradient leaks into the next epoch's first window"
    return ("tail-dropped", ": its items never train anything") if len(seen) == 2 and not tail else None
