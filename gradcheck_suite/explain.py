"""Saying what a violation shows: the weights a loop gave, read by the probe on the same plan, and the numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcheck_suite.contract import Loop
from gradcheck_suite.numerics.compare import Difference
from gradcheck_suite.numerics.reading import Diagnosis, Weights, diagnose
from gradcheck_suite.observer import Observation
from gradcheck_suite.plan import Plan
from gradcheck_suite.probe import probe_case
from gradcheck_suite.records import Violation
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.subject import Outcome, run_loop
from gradcheck_suite.trial import generated_trial

_SHOWN = 4


def _probe_steps(loop: Loop, plan: Plan, reduction: str) -> list[npt.NDArray[np.float64]]:
    """Return, for each step the loop takes on the probe, the weight it gave each item."""
    trial = generated_trial(probe_case(plan, reduction))  # type: ignore[arg-type]
    outcome = run_loop(loop, trial)
    if outcome.raised is not None:
        return []
    none = np.zeros(plan.total_items)
    seen = [observation.gradients["0.weight"] for observation in outcome.observations]
    return [none if g is None else g.numpy() for g in seen]


def _per_micro_batch(items: npt.NDArray[np.float64], plan: Plan) -> npt.NDArray[np.float64] | None:
    """Return each micro-batch's weight, or None where its items were weighted unequally."""
    parts = [items[plan.items(j).start : plan.items(j).stop] for j in range(len(plan.micro_batches))]
    if any(np.ptp(part) > 1e-9 * np.abs(part).max(initial=0.0) for part in parts):
        return None
    return np.array([part[0] for part in parts])


def _weights(observed: npt.NDArray[np.float64], plan: Plan, epoch: int, window: int, reduction: str) -> Weights:
    return Weights(
        observed=observed,
        counts=tuple(float(n) for n in plan.micro_batches),
        window=plan.windows[window],
        accumulation_steps=plan.accumulation_steps,
        epoch=epoch,
        reduction=reduction,
    )


def _read(loop: Loop, plan: Plan, reduction: str, step: int) -> tuple[Diagnosis, tuple[str, ...]] | None:
    """Read a step's weights off the probe; None where the loop treats the probe's items rightly."""
    steps = _probe_steps(loop, plan, reduction)
    if step >= len(steps) or not np.isfinite(steps[step]).all():
        return None
    epoch, window = divmod(step, len(plan.windows))
    observed = _per_micro_batch(steps[step], plan)
    if observed is None:
        return None
    weights = _weights(observed, plan, epoch, window, reduction)
    right = np.array([weights.expected if j in weights.window else 0.0 for j in range(len(observed))])
    if np.allclose(observed, right, rtol=1e-9, atol=1e-12):
        return None
    lines = ["weight of each item, by micro-batch (index, items, expected, observed):"]
    lines += [f"  {j:>3} {n:>4} {right[j]:>12.6g} {observed[j]:>12.6g}" for j, n in enumerate(plan.micro_batches)]
    return diagnose(weights), tuple(lines)


def explain_gradient(
    loop: Loop,
    reference: Reference,
    window: Window,
    observation: Observation,
    difference: Difference,
    epoch: int,
) -> tuple[str, str, tuple[str, ...]]:
    """Return the diagnosis, an explanation and lines of detail for a wrong gradient."""
    plan, reduction = reference.trial.case.plan, reference.trial.problem.reduction
    layout = reference.layout
    parameter, where = layout.place(difference.index)
    expected = layout.part(window.expected, parameter)
    observed = layout.part(reference.flat(observation.gradients), parameter)
    numbers = (
        f"{difference.count} of {len(window.expected)} elements of the gradient differ; the worst is "
        f"{parameter}{list(where)}: expected {expected[where]:.9g}, observed {observed[where]:.9g}, "
        f"off by {difference.error:.3g} where rounding allows {difference.allowed:.3g}",
    )
    reading = _read(loop, plan, reduction, epoch * len(plan.windows) + window.index)
    if reading is None:
        return (
            "not-linear",
            f"{parameter}.grad is wrong, and not by the weights of its items: on the read-out probe they are right, "
            "so look at what depends on the gradient's values or on the model (clipping, hooks, buffers, casts)",
            numbers,
        )
    diagnosis, table = reading
    return diagnosis.name, diagnosis.sentence, numbers + table


def explain_steps(loop: Loop, reference: Reference, outcome: Outcome) -> Violation:
    """Return the violation of a loop that stepped too seldom or too often."""
    case = reference.trial.case
    plan, taken = case.plan, len(outcome.observations)
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
    elif taken == 0:
        diagnosis = "never-stepped"
        explanation += ": run.optimizer was never stepped"
    elif taken == plan.epochs * micro:
        diagnosis = "step-per-micro-batch"
        explanation += ": it stepped once per micro-batch"
    elif plan.has_short_window and taken == plan.epochs * full:
        diagnosis, tail = _tail_fault(reference, outcome, full)
        explanation += tail
    return Violation("step-count", diagnosis, explanation, case)


def _tail_fault(reference: Reference, outcome: Outcome, full: int) -> tuple[str, str]:
    plan = reference.trial.case.plan
    members = list(plan.windows[-1])
    text = f": the short last window (micro-batches {members}) is never stepped"
    if plan.epochs > 1 and full and full < len(outcome.observations):
        first = outcome.observations[full]
        difference = reference.window(0, first.parameters or None).compare(reference.flat(first.gradients))
        if difference.ratio > 1:
            return "tail-leak", text + ", and its gradient leaks into the next epoch's first window"
    return "tail-dropped", text
