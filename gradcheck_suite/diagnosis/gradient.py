"""Saying what a wrong gradient shows: the weights a loop gave, read by the probe on the same plan, and the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.case_weights import read_case, stolen_buffer
from gradcheck_suite.diagnosis.probe_weights import Count, probe_steps
from gradcheck_suite.diagnosis.weights import Diagnosis, Weights, diagnose
from gradcheck_suite.execution.instance import Instance, Items
from gradcheck_suite.execution.observer import Observation
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.numerics.comparison import Difference
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.reference import REFERENCES, Reference, Window
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.weight_probe import SMALL_SCALE


def _count_of(instance: Instance) -> Count:
    """Return the count of an instance's items."""
    items = Items(instance.data)
    return lambda indices: instance.count(items.__getitems__(indices))


def _per_micro_batch(items: npt.NDArray[np.float64], plan: Plan) -> npt.NDArray[np.float64] | None:
    """Return each micro-batch's weight, or None where its items were weighted unequally."""
    parts = [items[plan.items(j).start : plan.items(j).stop] for j in range(len(plan.micro_batches))]
    if any(np.ptp(part) > 1e-9 * np.abs(part).max() for part in parts):
        return None
    return np.array([part[0] for part in parts])


def _on_probe(loop: Loop, plan: Plan, reduction: str, step: int, count: Count | None = None) -> Weights | Diagnosis:
    """Return a step's weights on the probe, or why there are none."""
    steps = probe_steps(loop, plan, reduction, count=count)
    if steps is None or step >= len(steps):
        return _not_linear("what the loop does with the read-out probe is no guide, since it fails there")
    items = steps[step]
    if not np.isfinite(items).all():
        return _not_linear("on the read-out probe, whose gradients are all 1, it is not even finite")
    quiet = probe_steps(loop, plan, reduction, scale=SMALL_SCALE, count=count)
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


def _read(loop: Loop, instance: Instance, step: int) -> tuple[Diagnosis, tuple[str, ...]]:
    """Read a step's weights off the probe, counting items first, and as the instance does where that shows nothing."""
    plan, reduction = instance.case.plan, instance.problem.reduction
    found = _on_probe(loop, plan, reduction, step)
    if isinstance(found, Weights) and _is_right(found) and reduction == "mean":
        found = _on_probe(loop, plan, reduction, step, _count_of(instance))
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
    plan, layout = reference.instance.case.plan, reference.layout
    parameter, where = layout.place(difference.index)
    expected = layout.part(window.expected, parameter)
    observed = layout.part(reference.flat(observation.gradients), parameter)
    numbers = (
        f"{difference.count} of {len(window.expected)} elements of the gradient differ; the worst is "
        f"{parameter}{list(where)}: expected {expected[where]:.9g}, observed {observed[where]:.9g}, "
        f"off by {error_text(difference.error, difference.allowed)}",
    )
    step = epoch * len(plan.windows) + window.index
    seen = reference.flat(observation.gradients)
    if found := _poisoned(reference, window, seen, epoch):
        return found.name, found.sentence, numbers
    diagnosis, table = _read(loop, reference.instance, step)
    if diagnosis.name == "not-linear":
        further = _read_further(loop, reference, window, seen, epoch, step)
        diagnosis = further or _read_in_float64(loop, reference, window.index, epoch, step) or diagnosis
    return diagnosis.name, diagnosis.sentence, numbers + table


def _poisoned(reference: Reference, window: Window, observed: npt.NDArray[np.float64], epoch: int) -> Diagnosis | None:
    """Say that a NaN or infinity of an earlier window is still there, where that is how it looks."""
    bad = ~np.isfinite(observed) & np.isfinite(window.expected)
    if not bad.any() or window.moved:
        return None
    earlier = range(len(reference.instance.case.plan.windows)) if epoch else range(window.index)
    sources = [i for i in earlier if not np.isfinite(reference.window(i).expected[bad]).all()]
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
    # a real optimizer would take the small losses' parameters elsewhere
    instance = replace(reference.instance, case=reference.instance.case.replace(optimizer=None))
    loud = _gradient_at(loop, reference, instance, step) if window.moved else observed
    quiet = _gradient_at(loop, reference, replace(instance, problem=_quiet(instance.problem)), step)
    if loud is None or quiet is None:
        return None
    again = quiet / SMALL_SCALE
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
    own_losses = np.array_equal(quiet, loud)
    if not own_losses and not np.allclose(again, loud, rtol=1e-9, atol=1e-9 * np.abs(loud).max()):
        return _not_linear(
            "on this very case, a loss 2**-20 times as large does not give a gradient 2**-20 times as large: "
            "something depends on the gradient's size (clipping, decay, normalising) or on chance (noise)"
        )
    return read_case(reference, window, observed, epoch)


def _gradient_at(loop: Loop, reference: Reference, instance: Instance, step: int) -> npt.NDArray[np.float64] | None:
    """Return the gradient at a step of a loop's run on an instance; None where it is no guide."""
    outcome = run_loop(loop, instance)
    # small losses underflow float16, which float64 is not turned to by autocast
    underflows = instance.case.dtype != "float64" and "float16" in (instance.case.dtype, outcome.compute)
    if underflows or step >= len(outcome.observations):
        return None
    return reference.flat(outcome.observations[step].gradients)


def _read_in_float64(loop: Loop, reference: Reference, index: int, epoch: int, step: int) -> Diagnosis | None:
    """Name a fault of lower precision from the same case in float64, where it is one too; None where it is not.

    Rounding as coarse as bfloat16's lets many weights fit.
    """
    instance = reference.instance
    if instance.case.dtype == "float64":
        return None
    case = instance.case.replace(dtype="float64")
    exact = REFERENCES.get(case, instance.problem if isinstance(case.problem, str) else None)
    outcome = run_loop(loop, exact.instance)
    if outcome.raised is not None or step >= len(outcome.observations):
        return None
    observation = outcome.observations[step]
    window = exact.window(index, observation.parameters or None, outcome.compute)
    seen = exact.flat(observation.gradients)
    found = _read_further(loop, exact, window, seen, epoch, step)
    if found is None or found.name == "not-linear":
        return None
    return Diagnosis(found.name, f"{found.sentence} (read off the same case in float64)")


def _quiet(problem: Problem) -> Problem:
    """Return the problem with its loss made small."""
    return replace(problem, loss=lambda model, batch: SMALL_SCALE * problem.loss(model, batch))
