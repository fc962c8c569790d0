"""The name of the fault of a wrong gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.catalogue.description import error_text
from gradcheck_suite.core.case import SMALL_SCALE
from gradcheck_suite.core.comparison import Comparison, Vector
from gradcheck_suite.judge.elements import (
    as_rounded_gradient,
    combined_elements,
    diagnose_elements,
    place_of_the_fault,
    where_alone,
    wrong_and_right,
    wrong_reduction,
)
from gradcheck_suite.judge.fitted_weights import diagnose_case, is_explained, of_one_sign, stolen_buffer
from gradcheck_suite.judge.probe import WeightProbe, per_micro_batch, probes_of
from gradcheck_suite.judge.probe_faults import SIZE_DEPENDENT, explain_weights
from gradcheck_suite.judge.reruns import (
    NOT_REPEATABLE,
    SKIPPED,
    LoopRunner,
    LossRecorder,
    confirmed_by_repeating,
    explain_inputs,
    repeats_gradient,
    run_recorded,
    run_with_finite_losses,
)
from gradcheck_suite.judge.sizes import Sizes, diagnose_sizes, is_linear
from gradcheck_suite.judge.weights import ALONE, Diagnosis, missing_gradient, not_linear, poisoned_by
from gradcheck_suite.reference.large_batch import REFERENCES, Reference, Window
from gradcheck_suite.run.instance import Instance, scaled
from gradcheck_suite.run.runner import Outcome

# Naming a fault that depends on the model, from the violated case itself and not from a weight probe.


def gradient_of_step(outcome: Outcome, reference: Reference, step: int, seen: Vector | None = None) -> Vector | None:
    """Return the gradient at a step of a run, (P,); None where the loop raised or stopped before.

    Where the step calls its closure several times: that of the last call, or of the one nearest to what was `seen`.
    """
    if outcome.raised is not None or step >= len(outcome.observations):
        return None
    calls = [reference.flat(evaluation.gradients) for evaluation in outcome.observations[step].evaluations]
    if seen is None:
        return calls[-1]
    with np.errstate(invalid="ignore"):
        return min(calls, key=lambda gradient: float(np.nansum(np.abs(gradient - seen))))


def recorded(
    runner: LoopRunner, reference: Reference, step: int, seen: Vector | None = None
) -> tuple[LossRecorder, Vector | None]:
    """Run the loop again and record its losses; return also `gradient_of_step`."""
    recorder, outcome = run_recorded(runner, reference.instance)
    return recorder, None if outcome is None else gradient_of_step(outcome, reference, step, seen)


def explain_run(
    recorder: LossRecorder, again: Vector | None, window: Window, comparison: Comparison, step: int
) -> Diagnosis | None:
    """Return what a recorded run shows: that the fault is gone, or that the inputs of losses are wrong; or None."""
    if again is None:
        return None
    if not repeats_gradient(again, comparison):
        return NOT_REPEATABLE
    flat, members = window.reference.flat, window.members
    return explain_inputs(recorder, flat, members, comparison.observed, step, window.parameters)


def _of_size(window: Window, comparison: Comparison, with_small_loss: Vector) -> Diagnosis | None:
    values = {name: p.detach().double() for name, p in window.model().named_parameters()}
    parameters = window.reference.flat({name: values[name] for name in comparison.layout.names})
    return diagnose_sizes(Sizes(comparison.expected, comparison.observed, with_small_loss, parameters=parameters))


def explain_on_case(
    runner: LoopRunner, window: Window, comparison: Comparison, epoch: int, *, is_linear_there: bool
) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case in float64 at parameters that stay where they are.

    Where no run is left to tell linearity on the case, `is_linear_there` says whether the loop was linear on the probe.
    """
    instance = window.reference.instance
    case = instance.case.replace(dtype="float64", optimizer=None)
    step = epoch * len(case.plan.windows) + window.index
    if case == instance.case:
        run = recorded(runner, window.reference, step)
        return _explain(runner, window, comparison, epoch, run, "this very case", is_linear_there=is_linear_there)
    there = REFERENCES.get(case, instance.users_problem).window(window.index)
    run = recorded(runner, there.reference, step)
    if run[1] is None:
        return None
    compared = there.compare(run[1])
    if compared.ratio <= 1:
        if not window.moved or instance.case.dtype != "float64":
            return None
        recorder, again = recorded(runner, window.reference, step, comparison.observed)
        return explain_run(recorder, again, window, comparison, step)
    place = "the same case in float64" if instance.case.dtype != "float64" else "the same case at its start"
    found = _explain(runner, there, compared, epoch, run, place, is_linear_there=is_linear_there)
    return found and replace(found, sentence=f"{found.sentence} (read off {place})")


def _explain(
    runner: LoopRunner,
    window: Window,
    comparison: Comparison,
    epoch: int,
    run: tuple[LossRecorder, Vector | None],
    place: str,
    *,
    is_linear_there: bool,
) -> Diagnosis | None:
    """Name a fault from a run in float64 at parameters that stay where they are.

    Args:
        runner: of the loop.
        window: of the case in which the gradient is wrong.
        comparison: of the gradient with the right one.
        epoch: of the step.
        run: what `recorded` returned of it.
        place: which case it is, in words.
        is_linear_there: as for `explain_on_case`.
    """
    recorder, observed = run
    step = epoch * len(window.reference.instance.case.plan.windows) + window.index
    if not np.isfinite(comparison.observed).all():
        return None
    if found := explain_run(recorder, observed, window, comparison, step):
        return found
    found = diagnose_case(window, comparison, epoch, alike=runner.alike)
    if is_linear_there and not runner.runs_left:
        return found
    outcome = runner.run(scaled(window.reference.instance, SMALL_SCALE))
    again = None if outcome is None else gradient_of_step(outcome, window.reference, step)
    if again is None:
        return None
    if is_linear(comparison.observed, again):
        return found
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
    if found is None or recorder.called:
        found = _of_size(window, comparison, again)
    said = f"on {place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalizing) or on chance (noise)"
    return found or not_linear(f"{said}; it is {place_of_the_fault(comparison)}")


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


def explain_gradient(comparison: Comparison, window: Window, epoch: int, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a wrong gradient; `not-linear` where no weights of micro-batches explain it.

    The first run is on the weight probe, and a second one on the probe that separates faults which look alike. Where
    the weights are right, or the loop cannot run on the probe, the case itself is read, in float64: one run records
    what the losses are computed from, and one has a loss 2**-20 times as large. Runs that are left repeat the case,
    since a fault that not every run shows has no other name.

    Args:
        comparison: of the gradient with the right one.
        window: whose gradient it is.
        epoch: of the step.
        runner: of the loop.
    """
    numbers = (_worst_element(comparison),)
    if found := _poisoned(window, comparison, epoch):
        return replace(found, details=numbers)
    instance = window.reference.instance
    if instance.problem.reduction == "batch":
        return replace(_of_whole_window(window, comparison), details=numbers)
    over_ranks = bool(instance.case.plan.ranks)
    if over_ranks and (found := wrong_reduction(window, comparison, runner.rank, alike=runner.alike)):
        return replace(found, details=numbers)
    step = epoch * len(instance.case.plan.windows) + window.index
    on_probe = _by_probes(runner, window, comparison, step)
    if on_probe is None and _is_right_with_finite_losses(runner, window, comparison, step):
        return replace(SKIPPED, details=numbers)
    diagnosis = on_probe or not_linear(f"{RIGHT_ON_PROBE}: it is {place_of_the_fault(comparison)}")
    if diagnosis.name in UNNAMED:
        # the other two are given only where the probe's gradient grows with the loss
        is_linear = on_probe is None or on_probe.name != "not-linear"
        on_case = stolen_buffer(instance) or explain_on_case(
            runner, window, comparison, epoch, is_linear_there=is_linear
        )
        # weights that no fault gives under two plans fit one on a small case by chance
        by_chance = diagnosis.name == "unrecognised-weights" and on_case is not None and on_case.is_of_weights
        diagnosis = diagnosis if on_case is None or by_chance else on_case
    if "low-precision" in diagnosis.names:
        diagnosis = as_rounded_gradient(comparison) or diagnosis
    if on_probe is None and diagnosis.names & NOT_BY_VALUES:
        diagnosis = replace(diagnosis, sentence=f"{diagnosis.sentence}; but {RIGHT_ON_PROBE}")
    if on_probe is None:
        diagnosis = of_one_sign(diagnosis, window, comparison) or diagnosis
    if diagnosis.name in UNNAMED:
        diagnosis = combined_elements(window, comparison) or diagnosis
    diagnosis = _confirmed(diagnosis, runner, window, comparison, step)
    return replace(diagnosis, details=numbers + diagnosis.details)


def _confirmed(found: Diagnosis, runner: LoopRunner, window: Window, comparison: Comparison, step: int) -> Diagnosis:
    """Return a diagnosis, or `not-repeatable` where a run again has another gradient at the step."""
    reference = window.reference

    def gradient(outcome: Outcome) -> Vector | None:
        return gradient_of_step(outcome, reference, step, comparison.observed)

    return confirmed_by_repeating(found, runner, reference.instance, comparison, gradient)


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


def _poisoned(window: Window, comparison: Comparison, epoch: int) -> Diagnosis | None:
    """Return the diagnosis of a NaN or infinity that an earlier window left behind, or None."""
    bad = ~np.isfinite(comparison.observed) & np.isfinite(comparison.expected)
    if not bad.any() or window.moved:
        return None
    reference = window.reference
    earlier = range(len(reference.instance.case.plan.windows)) if epoch else range(window.index)
    sources = [i for i in earlier if not np.isfinite(reference.window(i).expected[bad]).all()]
    if not sources:
        return None
    return poisoned_by(sources[0])


def _of_whole_window(window: Window, comparison: Comparison) -> Diagnosis:
    """Name the fault of a wrong gradient of an objective that is a function of the whole window."""
    if len(window.members) > 1 and np.isfinite(comparison.observed).all():
        parts, plan = window.contributions(), window.reference.instance.case.plan
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
                    "of the whole window: compute it for the window's items together, or cache what its items share "
                    "(GradCache)",
                )
    return diagnose_elements(comparison, {}) or not_linear(
        f"it is {place_of_the_fault(comparison)}; the objective is a function of the whole window, so weights of "
        "micro-batches cannot be read off it"
    )


def _by_probes(runner: LoopRunner, window: Window, comparison: Comparison, step: int) -> Diagnosis | None:
    """Name the fault from the weights of a step on the probe; None where they are right.

    The probe in which micro-batches without valid targets have count 0 comes first: it shows every fault but those of
    such micro-batches' own weights. Where every item has the same count, the probe that counts items comes first: it
    shows every fault but those of counts that are not the number of items.
    """
    *probes, last = reversed(list(probes_of(window.reference.instance)))
    for probe in probes:
        if found := _on_probe(runner, probe, step, window, comparison, or_another=probe.count is None):
            return found
        # the second probe of items that all count the same, and not 1, is not one of the runs that other cases have
        runner.runs_left += probe.count is None
    return _on_probe(runner, last, step, window, comparison)


def _of_summed_losses(probe: WeightProbe, weights: Vector, instance: Instance) -> Vector:
    """Return the weights that a probe shows as weights of an instance, whose items may count more or less."""
    if probe.reduction == "sum":
        return weights
    plan = instance.case.plan
    counts = [float(instance.count(instance.batch(plan.items(j)))) for j in range(len(weights))]
    return weights * np.array([seen / own if own else 1.0 for seen, own in zip(probe.counts, counts, strict=True)])


def _on_probe(
    runner: LoopRunner,
    probe: WeightProbe,
    step: int,
    window: Window,
    comparison: Comparison,
    *,
    or_another: bool = False,
) -> Diagnosis | None:
    """Return what the weights of a step on a probe show, or None where they are right.

    With `or_another`, return None also where they do not explain the gradient of the case: what is counted may differ.
    """
    steps = probe.observed_weights(runner)
    if steps is None and window.reference.instance.case.dtype == "float32":
        # a loop may run in its own precision alone
        runner.runs_left += 1
        probe = replace(probe, dtype="float32")
        steps = probe.observed_weights(runner)
    if steps is None:
        return not_linear("the weight probe cannot be used: the loop raised on it")
    if step >= len(steps):
        return not_linear(f"the weight probe cannot be used: the loop took {len(steps)} step(s) on it")
    items, right = steps[step], probe.right_weights(step % len(probe.plan.windows))
    if not np.isfinite(items).all():
        return not_linear("on the weight probe, whose gradients are all 1, it is not even finite")
    if np.allclose(items, right, rtol=probe.tolerance, atol=0):
        return None
    weights = per_micro_batch(probe, items)
    if weights is not None:
        weights = _of_summed_losses(probe, weights, window.reference.instance)
    if weights is not None and not is_explained(window, comparison, weights):
        if or_another:
            return None
        if found := combined_elements(window, comparison):
            return found
        # chance, other inputs, or a second fault
        recorder, again = recorded(runner, window.reference, step, comparison.observed)
        if found := explain_run(recorder, again, window, comparison, step):
            return found
        here = diagnose_case(window, comparison, step // len(probe.plan.windows), alike=runner.alike)
        # a loop that takes its losses from elsewhere than run.loss has other ones on the probe
        if here is not None and (ALONE in here.sentence or here.names & OF_ELEMENTS or not recorder.called):
            return here
        wrong, others = wrong_and_right(comparison)
        if others and is_explained(window, comparison, weights, only=wrong):
            found = explain_weights(probe, steps, step, runner)
            return replace(found, sentence=f"{where_alone(comparison)}{found.sentence}")
    return explain_weights(probe, steps, step, runner)


def _is_right_with_finite_losses(runner: LoopRunner, window: Window, comparison: Comparison, step: int) -> bool:
    """Return whether a step's gradient is right once losses that are not finite are made finite."""
    if wrong_and_right(comparison)[1]:
        return False  # a micro-batch that is left out is missing in every parameter
    outcome = run_with_finite_losses(runner, window.reference.instance)
    again = None if outcome is None else gradient_of_step(outcome, window.reference, step)
    return again is not None and bool((np.abs(again - comparison.expected) <= comparison.allowed).all())


def explain_missing(
    parameter: str, comparison: Comparison, window: Window, epoch: int, runner: LoopRunner
) -> Diagnosis:
    """Name the fault of a gradient that is None at the step.

    Args:
        parameter: whose gradient.
        comparison: of the gradient with the right one.
        window: whose gradient it is.
        epoch: of the step.
        runner: of the loop.
    """
    step = epoch * len(window.reference.instance.case.plan.windows) + window.index
    if _is_right_with_finite_losses(runner, window, comparison, step):
        return SKIPPED
    return _confirmed(missing_gradient(parameter), runner, window, comparison, step)
