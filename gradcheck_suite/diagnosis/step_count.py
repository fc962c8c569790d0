"""Naming the fault of a loop that stepped too seldom or too often, by at most one further run of it.

The run is on the weight read-out probe, whose steps show which micro-batches each of them was about.
"""

from __future__ import annotations

import torch

from gradcheck_suite.diagnosis.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.probe_weights import WeightProbe
from gradcheck_suite.diagnosis.weights import Diagnosis
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.records.description import counted
from gradcheck_suite.schema.plan import Plan

Steps = list[Vector]
SKIPPED_BY_SCALER = (
    "; a GradScaler skips the step of a window whose gradients overflow float16: where the loop has one, give it a "
    "smaller init_scale"
)


def explain_steps(instance: Instance, outcome: Outcome, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a loop that stepped too seldom or too often; `wrong-step-count` where no known one fits.

    Args:
        instance: what the loop trained.
        outcome: what it did.
        runner: of the loop.
    """
    plan, taken = instance.case.plan, len(outcome.observations)
    times = f"{taken} or more times" if outcome.endless else counted(taken, "time")
    asked = (
        f"optimizer.step() was called {times}, expected {plan.steps} "
        f"({counted(plan.epochs, 'epoch')} of {counted(len(plan.windows), 'window')})"
    )
    if outcome.endless:
        return Diagnosis("endless", f"{asked}; the loop was stopped there")
    known = _from_probe(instance, outcome, runner) or _from_counts(plan, outcome)
    if known is None:
        return Diagnosis("wrong-step-count", asked + (SKIPPED_BY_SCALER if _may_skip(instance, outcome) else ""))
    name, said = known
    return Diagnosis(name, asked + said)


def step_pattern(plan: Plan, outcome: Outcome) -> Diagnosis:
    """Return what the number of steps alone suggests, without a sentence and without a further run of the loop."""
    taken, micro = len(outcome.observations), plan.epochs * len(plan.micro_batches)
    whole = plan.epochs * (len(plan.micro_batches) // plan.accumulation_steps)
    if outcome.endless:
        return Diagnosis("endless", "")
    if plan.has_short_window and taken == whole:
        return Diagnosis("tail-dropped", "")
    if plan.has_short_window and taken == micro // plan.accumulation_steps:
        return Diagnosis("windows-across-epochs", "")
    known = _from_counts(plan, outcome)
    return Diagnosis(known[0] if known else "wrong-step-count", "")


def _from_probe(instance: Instance, outcome: Outcome, runner: LoopRunner) -> tuple[str, str] | None:
    """Return the name and the account of a fault that shows in the steps on a probe, or None.

    Steps too few may come from a short last window: the probe has one, and a second epoch that it may leak into.
    """
    plan, taken = instance.case.plan, len(outcome.observations)
    if taken == 0 and not plan.has_short_window:
        return None
    too_few = taken < plan.steps and plan.has_short_window
    k = plan.accumulation_steps if too_few else 1
    micro_batches = (1,) * (k + 1 if too_few else 3)
    epochs = max(2, plan.epochs) if too_few else plan.epochs
    steps = WeightProbe(Plan(micro_batches, k, epochs), instance.problem.reduction).observed_weights(runner)
    if steps is None:
        return None
    if too_few:
        if plan.epochs > 1 and _runs_on(steps, k):
            return (
                "windows-across-epochs",
                f": windows run on from one epoch into the next, {k} micro-batches each; step at the "
                "end of every epoch and start the next one's windows anew",
            )
        whole = len(plan.micro_batches) // k
        if taken == plan.epochs * whole and (tail := _tail_fault(steps, k, epochs)):
            name, consequence = tail
            return (
                name,
                f": the short last window (micro-batches {list(plan.windows[-1])}) is never stepped{consequence}",
            )
    passes = _passes(steps, k, len(micro_batches))
    if taken and passes not in (None, epochs) and not _may_skip(instance, outcome):
        return "wrong-epochs", f": it makes {passes} pass(es); pass over run.loader run.epochs times"
    return None


def _from_counts(plan: Plan, outcome: Outcome) -> tuple[str, str] | None:
    """Return the name and the account of a fault that the number of steps tells, or None."""
    if not outcome.observations:
        moved = any(not torch.equal(value, outcome.start[name]) for name, value in outcome.parameters.items())
        return "never-stepped", ": run.optimizer was never stepped" + (
            ", yet the parameters moved, so something else was; step run.optimizer, or wrap it" if moved else ""
        )
    if len(outcome.observations) == plan.epochs * len(plan.micro_batches):
        return "step-per-micro-batch", ": it stepped once per micro-batch"
    return None


def _may_skip(instance: Instance, outcome: Outcome) -> bool:
    """Whether a GradScaler may have skipped steps: there are too few, and float16 takes part."""
    too_few = len(outcome.observations) < instance.case.plan.steps
    return too_few and "float16" in (instance.case.dtype, outcome.compute)


def _runs_on(steps: Steps, k: int) -> bool:
    """Whether the second window of K is the short one of K + 1 micro-batches and K - 1 of the next epoch."""
    return len(steps) > 1 and bool(steps[1][k] != 0 and steps[1][: k - 1].all() and steps[1][k - 1] == 0)


def _tail_fault(steps: Steps, k: int, epochs: int) -> tuple[str, str] | None:
    """Say what becomes of a short last window of one micro-batch after a whole one of K."""
    if len(steps) < 2:
        return None
    # the second step is the second epoch's first window, unless the loop steps the short window after all
    first, tail = steps[1][:k].any(), steps[1][k] != 0
    if first and tail:
        return "tail-leak", ", and its gradient leaks into the next epoch's first window"
    return ("tail-dropped", ": its items never train anything") if len(steps) == epochs and not tail else None


def _passes(steps: Steps, k: int, micro_batches: int) -> int | None:
    """Return how often the loop passes over the loader; None where its steps are not the windows in turn."""
    windows = [slice(first, first + k) for first in range(0, micro_batches, k)]
    if len(steps) % len(windows):
        return None
    in_turn = all(weights[windows[i % len(windows)]].all() for i, weights in enumerate(steps))
    return len(steps) // len(windows) if in_turn else None
