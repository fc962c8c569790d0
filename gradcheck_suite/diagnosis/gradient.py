"""Naming the fault of a wrong gradient, from the evidence and at most three further runs of the loop.

The first run is on the weight read-out probe, under the same plan. Where the weights are wrong, a second one is on the
probe that separates faults which look alike, with a loss 2**-20 times as large; where no fault explains both, a third
one with the small loss under the first plan tells whether the weights depend on the gradient's size. Where the weights
are right, or the loop cannot run on the probe, the case itself is read, in float64 and with parameters that stay where
they are: that takes one run if the case is not like that already, and one with the small loss. A diagnosis that rests
on the difference of two runs is held against two more of the case itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.diagnosis.elements import as_rounded_gradient, diagnose_elements, place_of_the_fault
from gradcheck_suite.diagnosis.fitted_weights import diagnose_case, stolen_buffer
from gradcheck_suite.diagnosis.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.probe_weights import WeightProbe, probes_of
from gradcheck_suite.diagnosis.repeat import unless_gone
from gradcheck_suite.diagnosis.sizes import explain_size, is_linear
from gradcheck_suite.diagnosis.weights import Diagnosis
from gradcheck_suite.diagnosis.weights_on_probe import SIZE_DEPENDENT, explain_weights, not_linear
from gradcheck_suite.execution.instance import Instance, scaled
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.weight_probe import SMALL_SCALE

RIGHT_ON_PROBE = (
    "on the read-out probe the items' weights are right, so look at what depends on the gradient's values "
    "or on the model"
)
UNNAMED = ("not-linear", "unequal-items", "unrecognised-weights")
"""Diagnoses that say less than what the case itself may show."""


def explain_gradient(comparison: Comparison, window: Window, epoch: int, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a wrong gradient; `not-linear` where no weights of micro-batches explain it.

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
    step = epoch * len(instance.case.plan.windows) + window.index
    on_probe = _by_probes(runner, instance, step)
    diagnosis = on_probe or not_linear(f"{RIGHT_ON_PROBE}: it is {place_of_the_fault(comparison)}")
    if diagnosis.name in UNNAMED:
        diagnosis = (
            stolen_buffer(instance)
            or _on_case(runner, window, comparison, epoch, is_linear_there=on_probe is None)
            or diagnosis
        )
    if diagnosis.name == "rounded-weights":
        diagnosis = as_rounded_gradient(comparison) or diagnosis
    if diagnosis.name == "no-gradient" and on_probe is None:
        diagnosis = replace(diagnosis, sentence=f"{diagnosis.sentence}; but {RIGHT_ON_PROBE}")
    diagnosis = unless_gone(diagnosis, runner, instance, comparison, lambda run: _of_step(run, window.reference, step))
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
    return Diagnosis(
        "poisoned-by-earlier-window",
        f"the reference gradient of window {sources[0]} is NaN or infinite, and the reset left that behind in this "
        "window: it scaled the gradients and did not clear them; reset with zero_() or None, since 0 * NaN is NaN",
    )


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


# The weight read-out probe


def _by_probes(runner: LoopRunner, instance: Instance, step: int) -> Diagnosis | None:
    """Name the fault from the weights of a step on the probe; None where they are right.

    The probe in which micro-batches without valid targets count nothing comes first: it shows every fault but those of
    such micro-batches' own weights.
    """
    found = (_on_probe(runner, probe, step) for probe in reversed(list(probes_of(instance))))
    return next((diagnosis for diagnosis in found if diagnosis is not None), None)


def _on_probe(runner: LoopRunner, probe: WeightProbe, step: int) -> Diagnosis | None:
    """Return what the weights of a step on a probe show, or None where they are right."""
    steps = probe.observed_weights(runner)
    if steps is None:
        return not_linear("the weight read-out probe cannot be used: the loop raised on it")
    if step >= len(steps):
        return not_linear(f"the weight read-out probe cannot be used: the loop took {len(steps)} step(s) on it")
    items, right = steps[step], probe.right_weights(step % len(probe.plan.windows))
    if not np.isfinite(items).all():
        return not_linear("on the read-out probe, whose gradients are all 1, it is not even finite")
    if np.allclose(items, right, rtol=probe.tolerance, atol=0):
        return None
    return explain_weights(probe, steps, step, runner)


# The case itself


def _on_case(
    runner: LoopRunner, window: Window, comparison: Comparison, epoch: int, *, is_linear_there: bool
) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case in float64 at parameters that stay where they are.

    Where no run is left to tell linearity on the case, `is_linear_there` says whether the loop was linear on the probe.
    """
    instance = window.reference.instance
    case = instance.case.replace(dtype="float64", optimizer=None)
    step = epoch * len(case.plan.windows) + window.index
    if case == instance.case:
        reference, place = window.reference, "on this very case"
    else:
        reference = REFERENCES.get(case, instance.users_problem)
        place = "on the same case in float64" if instance.case.dtype != "float64" else "on the same case at its start"
        observed = _gradient_at(runner, reference, reference.instance, step)
        if observed is None:
            return None
        window = reference.window(window.index)
        comparison = window.compare(observed)
        if comparison.ratio <= 1:
            return None
    if not np.isfinite(comparison.observed).all():
        return None
    found = diagnose_case(window, comparison, epoch)
    small = scaled(reference.instance, SMALL_SCALE)
    trust_probe = is_linear_there and not runner.runs_left
    again = None if trust_probe else _gradient_at(runner, reference, small, step)
    if again is None and not trust_probe:
        return None
    if again is not None and not is_linear(comparison.observed, again):
        # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
        elsewhere = np.array_equal(again, comparison.observed)
        if found is None or not elsewhere or np.isclose(np.linalg.norm(again), 1.0, rtol=1e-12):
            found = _of_size(window, comparison, again)
        said = f"{place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalising) or on chance (noise)"
        found = found or not_linear(f"{said}; it is {place_of_the_fault(comparison)}")
    if found is None or case == instance.case:
        return found
    return replace(found, sentence=f"{found.sentence} (read off {place.removeprefix('on ')})")


def _of_size(window: Window, comparison: Comparison, with_small_loss: Vector) -> Diagnosis | None:
    values = {name: p.detach().double() for name, p in window.model().named_parameters()}
    parameters = window.reference.flat({name: values[name] for name in comparison.layout.names})
    return explain_size(comparison.expected, comparison.observed, with_small_loss, parameters)


def _gradient_at(runner: LoopRunner, reference: Reference, instance: Instance, step: int) -> Vector | None:
    """Return the gradient at a step of one more run; None where no run is left, the loop raises or it stops before."""
    outcome = runner.run(instance)
    return None if outcome is None else _of_step(outcome, reference, step)


def _of_step(outcome: Outcome, reference: Reference, step: int) -> Vector | None:
    if outcome.raised is not None or step >= len(outcome.observations):
        return None
    return reference.flat(outcome.observations[step].gradients)
