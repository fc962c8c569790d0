"""Saying what a violation shows: the weights a loop gave, read by the probe on the same plan, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.case_reading import read_case, stolen_buffer
from gradcheck_suite.contract import Batch, Loop, Problem
from gradcheck_suite.numerics.compare import Difference
from gradcheck_suite.numerics.reading import Diagnosis, Weights, diagnose
from gradcheck_suite.observer import Observation
from gradcheck_suite.plan import Plan
from gradcheck_suite.probe import QUIET, probe_case
from gradcheck_suite.records import Violation
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.subject import Outcome, run_loop
from gradcheck_suite.trial import Items, Trial, generated_trial

Count = Callable[[list[int]], torch.Tensor]
"""What the mean over some items, given by their indices, divides by."""


def _probe_steps(
    loop: Loop, plan: Plan, reduction: str, *, scale: float = 1.0, count: Count | None = None
) -> list[npt.NDArray[np.float64]] | None:
    """Return, for each step the loop takes on the probe, the weight it gave each item; None where it fails there.

    Args:
        loop: the subject.
        plan: of the case that is explained.
        reduction: likewise.
        scale: the probe's loss is multiplied by it, and the weights divided.
        count: in place of the probe's own, which is the number of items.
    """
    trial = generated_trial(probe_case(plan, reduction))  # type: ignore[arg-type]
    problem = trial.problem if count is None else _counted(trial.problem, count)
    scaled = replace(problem, loss=lambda model, batch: scale * problem.loss(model, batch))
    outcome = run_loop(loop, replace(trial, problem=scaled))
    if outcome.raised is not None:
        return None
    none = np.zeros(plan.total_items)
    seen = [observation.gradients["0.weight"] for observation in outcome.observations]
    return [none if g is None else g.numpy() / scale for g in seen]


def _counted(probe: Problem, count: Count) -> Problem:
    """Return the probe with a mean that divides by another count; one of 0 counts for nothing."""

    def count_batch(batch: Batch) -> torch.Tensor:
        return count(batch["x"].reshape(-1).tolist())

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        total, divisor = model(batch).sum(), count_batch(batch)
        return total / divisor if divisor else 0 * total

    return replace(probe, loss=loss, count=count_batch)


def _count_of(trial: Trial) -> Count:
    """Return the count of a trial's items."""
    items = Items(trial.data)
    return lambda indices: trial.count(items.__getitems__(indices))


def _per_micro_batch(items: npt.NDArray[np.float64], plan: Plan) -> npt.NDArray[np.float64] | None:
    """Return each micro-batch's weight, or None where its items were weighted unequally."""
    parts = [items[plan.items(j).start : plan.items(j).stop] for j in range(len(plan.micro_batches))]
    if any(np.ptp(part) > 1e-9 * np.abs(part).max(initial=0.0) for part in parts):
        return None
    return np.array([part[0] for part in parts])


def _on_probe(loop: Loop, plan: Plan, reduction: str, step: int, count: Count | None = None) -> Weights | Diagnosis:
    """Return a step's weights on the probe, or why there are none."""
    steps = _probe_steps(loop, plan, reduction, count=count)
    if steps is None or step >= len(steps):
        return _not_linear("what the loop does with the read-out probe is no guide, since it fails there")
    items = steps[step]
    if not np.isfinite(items).all():
        return _not_linear("on the read-out probe, whose gradients are all 1, it is not even finite")
    quiet = _probe_steps(loop, plan, reduction, scale=QUIET, count=count)
    if quiet is None or step >= len(quiet) or not np.allclose(items, quiet[step], rtol=1e-9, atol=0):
        return _not_linear(
            "a loss 2**-20 times as large does not give a gradient 2**-20 times as large: "
            "something depends on the gradient's size (clipping, normalising) or on chance (noise)"
        )
    observed = _per_micro_batch(items, plan)
    if observed is None:
        return Diagnosis("unequal-items", "items of one and the same micro-batch have different weights")
    epoch, window = divmod(step, len(plan.windows))
    counts = [float(count(list(plan.items(j)))) if count else float(n) for j, n in enumerate(plan.micro_batches)]
    return Weights(
        observed=observed,
        counts=tuple(counts),
        window=plan.windows[window],
        accumulation_steps=plan.accumulation_steps,
        epoch=epoch,
        reduction=reduction,
        items=plan.micro_batches,
    )


def _right(weights: Weights) -> npt.NDArray[np.float64]:
    """Return the weight that each micro-batch should have."""
    counted = [j in weights.window and count > 0 for j, count in enumerate(weights.counts)]
    return np.where(counted, weights.expected, 0.0)


def _is_right(weights: Weights) -> bool:
    return bool(np.allclose(weights.observed, _right(weights), rtol=1e-9, atol=0))


def _read(loop: Loop, trial: Trial, step: int) -> tuple[Diagnosis, tuple[str, ...]]:
    """Read a step's weights off the probe, counting items first, and as the trial does where that shows nothing."""
    plan, reduction = trial.case.plan, trial.problem.reduction
    found = _on_probe(loop, plan, reduction, step)
    if isinstance(found, Weights) and _is_right(found) and reduction == "mean":
        found = _on_probe(loop, plan, reduction, step, _count_of(trial))
    if isinstance(found, Diagnosis):
        return found, ()
    if _is_right(found):
        return _not_linear(
            "on the read-out probe the items' weights are right, so look at what depends on the gradient's values "
            "or on the model (clipping, hooks, buffers, casts)"
        ), ()
    lines = ["weight of each item, by micro-batch (index, count, expected, observed):"]
    rows = zip(found.counts, _right(found), found.observed, strict=True)
    lines += [f"  {j:>3} {n:>4g} {right:>12.6g} {seen:>12.6g}" for j, (n, right, seen) in enumerate(rows)]
    return diagnose(found), tuple(lines)


def _not_linear(why: str) -> Diagnosis:
    return Diagnosis("not-linear", f"the gradient is wrong, and not by weights of its micro-batches: {why}")


def explain_gradient(
    loop: Loop,
    reference: Reference,
    window: Window,
    observation: Observation,
    difference: Difference,
    epoch: int,
) -> tuple[str, str, tuple[str, ...]]:
    """Return the diagnosis, an explanation and lines of detail for a wrong gradient."""
    plan, layout = reference.trial.case.plan, reference.layout
    parameter, where = layout.place(difference.index)
    expected = layout.part(window.expected, parameter)
    observed = layout.part(reference.flat(observation.gradients), parameter)
    numbers = (
        f"{difference.count} of {len(window.expected)} elements of the gradient differ; the worst is "
        f"{parameter}{list(where)}: expected {expected[where]:.9g}, observed {observed[where]:.9g}, "
        f"off by {difference.error:.3g} where rounding allows {difference.allowed:.3g}",
    )
    step = epoch * len(plan.windows) + window.index
    seen = reference.flat(observation.gradients)
    if found := _poisoned(reference, window, seen, epoch):
        return found.name, found.sentence, numbers
    diagnosis, table = _read(loop, reference.trial, step)
    if diagnosis.name == "not-linear":
        diagnosis = _read_further(loop, reference, window, seen, epoch, step) or diagnosis
    return diagnosis.name, diagnosis.sentence, numbers + table


def _poisoned(reference: Reference, window: Window, observed: npt.NDArray[np.float64], epoch: int) -> Diagnosis | None:
    """Say that a NaN or infinity of an earlier window is still there, where that is how it looks."""
    bad = ~np.isfinite(observed) & np.isfinite(window.expected)
    if not bad.any() or window.moved:
        return None
    earlier = range(len(reference.trial.case.plan.windows)) if epoch else range(window.index)
    sources = [i for i in earlier if i != window.index and not np.isfinite(reference.window(i).expected[bad]).all()]
    if not sources:
        return None
    return Diagnosis(
        "poisoned-by-earlier-window",
        f"window {sources[0]}'s gradient is rightly not finite, and this one's is not because of it: what was there "
        "was scaled, not cleared; reset with zero_() or None, since 0 * NaN is NaN",
    )


def _read_further(
    loop: Loop, reference: Reference, window: Window, observed: npt.NDArray[np.float64], epoch: int, step: int
) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case itself; None where it gives nothing away."""
    if found := stolen_buffer(reference):
        return found
    if not np.isfinite(observed).all():
        return None
    trial = reference.trial
    quiet = run_loop(loop, replace(trial, problem=_quiet(trial.problem)))
    if step >= len(quiet.observations):
        return None
    again = reference.flat(quiet.observations[step].gradients) / QUIET
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
    own_losses = np.array_equal(again * QUIET, observed)
    if not own_losses and not np.allclose(again, observed, rtol=1e-9, atol=1e-9 * np.abs(observed).max(initial=0.0)):
        return _not_linear(
            "on this very case, a loss 2**-20 times as large does not give a gradient 2**-20 times as large: "
            "something depends on the gradient's size (clipping, decay, normalising) or on chance (noise)"
        )
    return read_case(reference, window, observed, epoch)


def _quiet(problem: Problem) -> Problem:
    """Return the problem with its loss made small."""
    return replace(problem, loss=lambda model, batch: QUIET * problem.loss(model, batch))


def explain_steps(loop: Loop, reference: Reference, outcome: Outcome) -> Violation:
    """Return the violation of a loop that stepped too seldom or too often."""
    case = reference.trial.case
    plan, taken, reduction = case.plan, len(outcome.observations), reference.trial.problem.reduction
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
    seen = _probe_steps(loop, Plan(micro_batches, 1, epochs), reduction)
    return None if seen is None or len(seen) % len(micro_batches) else len(seen) // len(micro_batches)


def _runs_on(loop: Loop, plan: Plan, reduction: str) -> bool:
    """Whether the loop's second window of K is the short one of K + 1 micro-batches and K - 1 of the next epoch."""
    k = plan.accumulation_steps
    seen = _probe_steps(loop, Plan((1,) * (k + 1), k, 2), reduction)
    if seen is None or len(seen) < 2:
        return False
    return bool(seen[1][k] != 0 and seen[1][: k - 1].all() and seen[1][k - 1] == 0)


def _tail_fault(loop: Loop, plan: Plan, reduction: str) -> tuple[str, str] | None:
    """Say what becomes of a short last window, seen on one micro-batch more than a window and two epochs."""
    k = plan.accumulation_steps
    seen = _probe_steps(loop, Plan((1,) * (k + 1), k, 2), reduction)
    if seen is None or len(seen) < 2:
        return None
    # the second step is the second epoch's first window, unless the loop steps the tail after all
    first, tail = seen[1][:k].any(), seen[1][k] != 0
    if first and tail:
        return "tail-leak", ", and its gradient leaks into the next epoch's first window"
    return ("tail-dropped", ": its items never train anything") if len(seen) == 2 and not tail else None
