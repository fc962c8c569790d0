"""Naming the fault of a loop that stepped too seldom or too often, by further runs of it.

Two runs are on weight probes, whose steps show which micro-batches each of them was about: one under the
loop's own plan, one under the plan that separates faults which look alike. The others repeat the case, or the probe
where the loop takes another number of steps there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.further_runs.non_finite_losses import SKIPPED, run_with_finite_losses
from gradcheck_suite.diagnosis.further_runs.repeat import NOT_REPEATABLE
from gradcheck_suite.diagnosis.on_probe.probe_weights import WeightProbe
from gradcheck_suite.diagnosis.on_probe.separating_probe import separating_probe
from gradcheck_suite.diagnosis.on_probe.step_patterns import Held, fitting_faults, held_by_steps, shown
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.records.columns import counted
from gradcheck_suite.schema.plan import Plan

SKIPPED_BY_SCALER = (
    "a GradScaler skips the step of a window whose gradients overflow: where the loop has one, give it a smaller "
    "init_scale; otherwise look for a guard that skips large or small gradients"
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
    for again in runner.repeat(instance, 1):
        if len(again.observations) != taken:
            return NOT_REPEATABLE
    found = _explained(instance, outcome, runner, asked)
    for again in runner.repeat(instance):
        if len(again.observations) != taken:
            return NOT_REPEATABLE
    return found


def _explained(instance: Instance, outcome: Outcome, runner: LoopRunner, asked: str) -> Diagnosis:
    plan, taken = instance.case.plan, len(outcome.observations)
    finite = run_with_finite_losses(runner, instance)
    if finite is not None and len(finite.observations) == plan.steps:
        return replace(SKIPPED, sentence=f"{asked}: {SKIPPED.sentence}")
    probe = WeightProbe(plan.replace(masked=()), "sum" if instance.problem.reduction == "sum" else "mean")
    own = _held(probe, runner)
    if own is None:
        known = _from_counts(plan, outcome)
        return Diagnosis(known or "wrong-step-count", asked + (_never(outcome) if known == "never-stepped" else ""))
    if len(own) == plan.steps:
        return _by_values(asked, plan, taken)
    if len(own) != taken:
        if _held(probe, runner) not in (own, None):
            return NOT_REPEATABLE
        asked += f"; on the weight probe, under the same plan, it takes {len(own)}"
    faults = _separated(probe, own, runner)
    if "never-stepped" in faults:
        faults["never-stepped"] = _never(outcome)
    if _may_skip(instance, outcome) and not faults.keys() - {"dropped-window", "never-stepped"}:
        faults["skipped-steps"] = f"; {SKIPPED_BY_SCALER}"
    whole_run = [*range(len(plan.micro_batches))] * plan.epochs
    if not faults and own and all(own) and [j for step in own for j in sorted(step)] == whole_run:
        faults["wrong-windows"] = "; each micro-batch is in one step, but the steps are at other places"
    name = " or ".join(faults) or "wrong-step-count"
    details = f"; the steps held micro-batches {shown(own)}" if own and len(own) == taken else ""
    return Diagnosis(name, asked + "".join(faults.values()) + details)


def step_pattern(plan: Plan, outcome: Outcome) -> Diagnosis:
    """Return what the number of steps alone suggests, without a sentence and without a further run of the loop."""
    if outcome.endless:
        return Diagnosis("endless", "")
    return Diagnosis(_from_counts(plan, outcome) or "wrong-step-count", "")


def _held(probe: WeightProbe, runner: LoopRunner) -> Held | None:
    steps = probe.observed_weights(runner)
    return None if steps is None else held_by_steps(probe.plan, steps)


def _separated(probe: WeightProbe, own: Held, runner: LoopRunner) -> dict[str, str]:
    """Return name -> account of the faults that fit the steps under both plans; of one alone where none fits both."""
    faults = fitting_faults(probe.plan, own)
    separating = separating_probe(probe, runner.assumes)
    other = _held(separating, runner)
    if other is None or len(other) == separating.plan.steps:
        return faults
    on_other = fitting_faults(separating.plan, other)
    both = {name: account for name, account in faults.items() if name in on_other}
    first = next(iter(both or on_other), None)
    if first is None:
        # what fits under a small plan alone is a coincidence
        return {}
    k, windows = separating.plan.accumulation_steps, len(separating.plan.windows)
    elsewhere = f"; under a plan of {windows} windows with accumulation_steps = {k}{on_other[first]}"
    return {first: faults.get(first, elsewhere)}


def _by_values(asked: str, plan: Plan, taken: int) -> Diagnosis:
    """Return the diagnosis of a loop that takes the right number of steps on the probe."""
    said = f"{asked}; on the weight probe, under the same plan, it takes the right number"
    if taken < plan.steps:
        return Diagnosis(
            "skipped-steps", f"{said}, so it skips steps by the values of gradients or losses: {SKIPPED_BY_SCALER}"
        )
    return Diagnosis("wrong-step-count", f"{said}, so the number depends on the values of gradients or losses")


def _from_counts(plan: Plan, outcome: Outcome) -> str | None:
    """Return the name of the fault that the number of steps suggests, or None."""
    taken, micro = len(outcome.observations), plan.epochs * len(plan.micro_batches)
    if not taken:
        return "never-stepped"
    if plan.ranks:
        return None
    if taken == micro:
        return "step-per-micro-batch"
    if plan.has_short_window and taken == plan.epochs * (len(plan.micro_batches) // plan.accumulation_steps):
        return "tail-dropped"
    if plan.has_short_window and taken == micro // plan.accumulation_steps:
        return "windows-across-epochs"
    return None


def _may_skip(instance: Instance, outcome: Outcome) -> bool:
    """Whether a GradScaler may have skipped steps on the probe, too: there are too few, and float16 takes part."""
    too_few = len(outcome.observations) < instance.case.plan.steps
    return too_few and "float16" in (instance.case.dtype, outcome.compute)


def _never(outcome: Outcome) -> str:
    moved = any(not torch.equal(value, outcome.start[name]) for name, value in outcome.parameters.items())
    return ": run.optimizer was never stepped" + (
        ", yet the parameters moved, so something else was; step run.optimizer, or wrap it" if moved else ""
    )
