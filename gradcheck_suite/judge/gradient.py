"""The name of the fault of a wrong gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.core.comparison import Comparison, Vector
from gradcheck_suite.core.faults import is_of_weights
from gradcheck_suite.core.text import error_text
from gradcheck_suite.judge.elements import (
    combined_elements,
    diagnose_elements,
    where_wrong,
    wrong_and_right,
    wrong_reduction,
)
from gradcheck_suite.judge.fitted_weights import is_explained, of_one_sign, stolen_buffer
from gradcheck_suite.judge.probe import WeightProbe, probes_of
from gradcheck_suite.judge.probe_faults import SIZE_DEPENDENT, explain_weights
from gradcheck_suite.judge.reruns import SKIPPED, Evidence, gradient_of_step, run_recorded, run_with_finite_losses
from gradcheck_suite.judge.sizes import Sizes, diagnose_sizes, is_linear
from gradcheck_suite.judge.weights import WHILE_RIGHT, Diagnosis, missing_gradient, not_linear, poisoned_by
from gradcheck_suite.reference.large_batch import REFERENCES
from gradcheck_suite.run.instance import Instance

# Naming a fault that depends on the model, from the violated case itself and not from a weight probe.


def explain_on_case(e: Evidence, *, is_linear_there: bool) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case in float64 at parameters that stay where they are.

    Where no run is left to tell linearity on the case, `is_linear_there` says whether the loop was linear on the probe.
    """
    case = e.instance.case.replace(dtype="float64", optimizer=None)
    if case == e.instance.case:
        return _at_rest(e, "this very case", is_linear_there=is_linear_there)
    window = REFERENCES.get(case, e.instance.users_problem).window(e.window.index)
    recorder, outcome = run_recorded(e.runner, window.reference.instance)
    seen = None if outcome is None else gradient_of_step(outcome, window.reference, e.step)
    if seen is None:
        return None
    there = replace(e, comparison=window.compare(seen), window=window, known_calls=(recorder, seen))
    if there.comparison.ratio <= 1:
        if not e.window.moved or e.instance.case.dtype != "float64":
            return None
        return e.of_inputs
    place = "the same case in float64" if e.instance.case.dtype != "float64" else "the same case at its start"
    found = _at_rest(there, place, is_linear_there=is_linear_there)
    return found and replace(found, sentence=f"{found.sentence} (read off {place})")


def _at_rest(e: Evidence, place: str, *, is_linear_there: bool) -> Diagnosis | None:
    """Name a fault from evidence in float64 at parameters that stay where they are; `place` says of which case."""
    if not np.isfinite(e.comparison.observed).all():
        return None
    if found := e.of_inputs:
        return found
    found = e.of_weights
    if is_linear_there and not e.runner.runs_left:
        return found
    if e.small is None:
        return None
    if is_linear(e.comparison.observed, e.small):
        return found
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
    if found is None or e.calls[0].called:
        found = diagnose_sizes(Sizes(e.comparison.expected, e.comparison.observed, e.small, parameters=e.parameters))
    sentence = f"on {place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalizing) or on chance (noise)"
    return found or not_linear(f"{sentence}; it is {e.place}")


# Naming the fault of a wrong gradient, from the evidence and up to three further runs of the loop, as a rule.


RIGHT_ON_PROBE = (
    "on the weight probe the items' weights are right, so the fault depends on the values of the gradient or "
    "of the batch, or on the model"
)
UNNAMED = ("not-linear", "unequal-items", "unrecognised-weights")
"""Diagnoses that say less than what the case itself may show."""
NOT_BY_VALUES = frozenset(
    (
        "no-gradient",
        "reset-inside-window",
        "first-only",
        "dropped-micro-batch",
        "repeated-micro-batch",
        "not-reduced",
    )
)
"""Diagnoses that the probe, where it is right, shows to depend on values or on the model."""
OF_ELEMENTS = frozenset(
    (
        "projected-gradient",
        "misplaced-gradient",
        "partial-gradient",
        "low-precision",
    )
)
"""Diagnoses of the case itself that no weights of micro-batches give."""


def explain_gradient(e: Evidence) -> Diagnosis:
    """Name the fault of a wrong gradient; `not-linear` where no weights of micro-batches explain it.

    The first run is on the weight probe, and a second one on the probe that separates faults which look alike. Where
    the weights are right, or the loop cannot run on the probe, the case itself is read, in float64: one run records
    what the losses are computed from, and one has a loss 2**-20 times as large. Runs that are left repeat the case,
    since a fault that not every run shows has no other name.
    """
    comparison, window = e.comparison, e.window
    numbers = (_worst_element(comparison),)
    for without_a_run in (_poisoned, _of_whole_window, _of_ranks):
        if found := without_a_run(e):
            return replace(found, details=numbers)
    on_probe = _by_probes(e)
    if on_probe is None and _is_right_with_finite_losses(e):
        return replace(SKIPPED, details=numbers)
    diagnosis = on_probe or not_linear(f"{RIGHT_ON_PROBE}: it is {e.place}")
    if diagnosis.name in UNNAMED:
        # the other two are given only where the probe's gradient grows with the loss
        is_linear = on_probe is None or on_probe.name != "not-linear"
        on_case = stolen_buffer(e.instance) or explain_on_case(e, is_linear_there=is_linear)
        # weights that no fault gives under two plans fit one on a small case by chance
        by_chance = diagnosis.name == "unrecognised-weights" and on_case is not None and is_of_weights(on_case.name)
        diagnosis = diagnosis if on_case is None or by_chance else on_case
        # what was read off the same case in float64 is chance where the case itself does not repeat
        e.runner.runs_left = max(e.runner.runs_left, 1)
    if on_probe is None and diagnosis.names & NOT_BY_VALUES:
        diagnosis = replace(diagnosis, sentence=f"{diagnosis.sentence}; but {RIGHT_ON_PROBE}")
    if on_probe is None:
        diagnosis = of_one_sign(diagnosis, window, comparison) or diagnosis
    if diagnosis.name in UNNAMED:
        diagnosis = combined_elements(window, comparison) or diagnosis
    diagnosis = e.confirmed(diagnosis)
    return replace(diagnosis, details=numbers + diagnosis.details)


def _worst_element(comparison: Comparison) -> str:
    worst, layout = comparison.worst, comparison.layout
    name, where = layout.place(worst.index)
    expected, observed = (layout.part(vector, name)[where] for vector in (comparison.expected, comparison.observed))
    # digits that rounding decides say nothing, unless the two numbers agree in all others
    digits = 6 if f"{expected:.6g}" != f"{observed:.6g}" else 17
    return (
        f"{worst.count} of {len(comparison.expected)} elements of the gradient differ; the worst is "
        f"{name}{list(where)}: expected {expected:.{digits}g}, observed {observed:.{digits}g}, "
        f"off by {error_text(worst.error, worst.allowed)}"
    )


def _poisoned(e: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a NaN or infinity that an earlier window left behind, or None."""
    bad = ~np.isfinite(e.comparison.observed) & np.isfinite(e.comparison.expected)
    if not bad.any() or e.window.moved:
        return None
    earlier = range(len(e.instance.case.plan.windows)) if e.epoch else range(e.window.index)
    sources = (i for i in earlier if not np.isfinite(e.window.reference.window(i).expected[bad]).all())
    source = next(sources, None)
    return None if source is None else poisoned_by(source)


def _of_ranks(e: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is another combination of the ranks' own than their sum, or None."""
    if not e.instance.case.plan.ranks:
        return None
    return wrong_reduction(e.window, e.comparison, e.runner.rank, alike=e.runner.alike)


def _of_whole_window(e: Evidence) -> Diagnosis | None:
    """Name the fault of a wrong gradient of an objective that is a function of the whole window; else None."""
    if e.instance.problem.reduction != "batch":
        return None
    window, comparison = e.window, e.comparison
    if len(window.members) > 1 and np.isfinite(comparison.observed).all():
        parts, plan = window.contributions(), e.instance.case.plan
        counts = np.array([float(plan.micro_batches[j]) for j in window.members])
        for shares, how in (
            (np.ones(len(parts)), "the sum"),
            (np.ones(len(parts)) / len(parts), "the mean"),
            (counts / counts.sum(), "the mean, weighted by items,"),
        ):
            if (np.abs(shares @ np.stack(parts) - comparison.observed) <= 4 * comparison.allowed).all():
                return Diagnosis(
                    "plain-accumulation",
                    f"the gradient is {how} of those of the micro-batches' own losses, and the objective is a function "
                    "of the whole window",
                )
    return diagnose_elements(comparison, {}) or not_linear(
        f"it is {e.place}; the objective is a function of the whole window, so weights of micro-batches cannot be read "
        "off it"
    )


def _by_probes(e: Evidence) -> Diagnosis | None:
    """Name the fault from the weights of a step on the probe; None where they are right.

    The probe in which micro-batches without valid targets have count 0 comes first: it shows every fault but those of
    such micro-batches' own weights. Where every item has the same count, the probe that counts items comes first: it
    shows every fault but those of counts that are not the number of items.
    """
    *probes, last = reversed(list(probes_of(e.instance)))
    for probe in probes:
        if found := _on_probe(e, probe, or_another=probe.count is None):
            return found
        # the second probe of items that all count the same, and not 1, is not one of the runs that other cases have
        e.runner.runs_left += probe.count is None
    return _on_probe(e, last)


def _of_summed_losses(probe: WeightProbe, weights: Vector, instance: Instance) -> Vector:
    """Return the weights that a probe shows as weights of an instance, whose items may count more or less."""
    if probe.reduction == "sum":
        return weights
    plan = instance.case.plan
    counts = [float(instance.count(instance.batch(plan.items(j)))) for j in range(len(weights))]
    return weights * np.array([seen / own if own else 1.0 for seen, own in zip(probe.counts, counts, strict=True)])


def _on_probe(e: Evidence, probe: WeightProbe, *, or_another: bool = False) -> Diagnosis | None:
    """Return what the weights of a step on a probe show, or None where they are right.

    With `or_another`, return None also where they do not explain the gradient of the case: what is counted may differ.
    """
    runner, window, comparison, step = e.runner, e.window, e.comparison, e.step
    run = probe.observed(runner)
    if run is None and e.instance.case.dtype == "float32":
        # a loop may run in its own precision alone
        runner.runs_left += 1
        probe = replace(probe, dtype="float32")
        run = probe.observed(runner)
    if run is None:
        return not_linear("the weight probe cannot be used: the loop raised on it")
    if step >= len(run.steps):
        return not_linear(f"the weight probe cannot be used: the loop took {len(run.steps)} step(s) on it")
    items, right = run.steps[step], probe.right_weights(step % len(probe.plan.windows))
    if not np.isfinite(items).all():
        return not_linear("on the weight probe, whose item gradients are all 1, the loop's gradient is NaN or infinite")
    if np.allclose(items, right, rtol=probe.tolerance, atol=0):
        return None
    read = run.weights(step)
    weights = None if read is None else _of_summed_losses(probe, read.observed, e.instance)
    if weights is None or is_explained(window, comparison, weights):
        return explain_weights(run, step, runner)
    if or_another:
        return None
    # chance, other inputs, or a second fault
    if found := combined_elements(window, comparison) or e.of_inputs:
        return found
    here = e.of_weights
    # a loop that takes its losses from elsewhere than run.loss has other ones on the probe
    if here is not None and (WHILE_RIGHT in here.sentence or here.names & OF_ELEMENTS or not e.calls[0].called):
        return here
    found = explain_weights(run, step, runner)
    wrong, others = wrong_and_right(comparison)
    if others and is_explained(window, comparison, weights, only=wrong):
        return replace(found, sentence=f"{where_wrong(comparison)}{found.sentence}")
    return found


def _is_right_with_finite_losses(e: Evidence) -> bool:
    """Return whether a step's gradient is right once losses that are not finite are made finite."""
    if wrong_and_right(e.comparison)[1]:
        return False  # a micro-batch that is left out is missing in every parameter
    outcome = run_with_finite_losses(e.runner, e.instance)
    rerun = None if outcome is None else gradient_of_step(outcome, e.window.reference, e.step)
    return rerun is not None and bool((np.abs(rerun - e.comparison.expected) <= e.comparison.allowed).all())


def explain_missing(parameter: str, e: Evidence) -> Diagnosis:
    """Name the fault of a parameter's gradient that is None at the step."""
    return SKIPPED if _is_right_with_finite_losses(e) else e.confirmed(missing_gradient(parameter))
