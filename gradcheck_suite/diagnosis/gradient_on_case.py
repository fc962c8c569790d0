"""Naming a fault that depends on the model, from the violated case itself and not from a weight probe.

The case is run again in float64, with parameters that stay where they are: one run records what the losses are computed
from, and one has a loss 2**-20 times as large.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.further_runs.loss_calls import LossRecorder, explain_inputs, run_recorded
from gradcheck_suite.diagnosis.further_runs.repeat import NOT_REPEATABLE, is_same
from gradcheck_suite.diagnosis.on_probe.weights_on_probe import SIZE_DEPENDENT, not_linear
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.diagnosis.wrong_elements.elements import place_of_the_fault
from gradcheck_suite.diagnosis.wrong_elements.fitted_weights import diagnose_case
from gradcheck_suite.diagnosis.wrong_elements.sizes import explain_size, is_linear
from gradcheck_suite.execution.instance import Instance, scaled
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.weight_probe import SMALL_SCALE


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
    if not is_same(again, comparison):
        return NOT_REPEATABLE
    flat, members = window.reference.flat, window.members
    return explain_inputs(recorder, flat, members, comparison.observed, step, window.parameters)


def _read_off(found: Diagnosis, case: Case, instance: Instance, place: str) -> Diagnosis:
    """Return a diagnosis that says on which case it was read, where that is not the violated one."""
    if case == instance.case:
        return found
    return replace(found, sentence=f"{found.sentence} (read off {place.removeprefix('on ')})")


def _of_size(window: Window, comparison: Comparison, with_small_loss: Vector) -> Diagnosis | None:
    values = {name: p.detach().double() for name, p in window.model().named_parameters()}
    parameters = window.reference.flat({name: values[name] for name in comparison.layout.names})
    return explain_size(comparison.expected, comparison.observed, with_small_loss, parameters)


def _gradient_at(runner: LoopRunner, reference: Reference, instance: Instance, step: int) -> Vector | None:
    """Return the gradient at a step of one more run; None where no run is left, the loop raises or it stops before."""
    outcome = runner.run(instance)
    return None if outcome is None else gradient_of_step(outcome, reference, step)


def explain_on_case(
    runner: LoopRunner, window: Window, comparison: Comparison, epoch: int, *, is_linear_there: bool
) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case in float64 at parameters that stay where they are.

    Where no run is left to tell linearity on the case, `is_linear_there` says whether the loop was linear on the probe.
    """
    instance = window.reference.instance
    case = instance.case.replace(dtype="float64", optimizer=None)
    step = epoch * len(case.plan.windows) + window.index
    reference, moved, place = window.reference, window, "on this very case"
    if case != instance.case:
        reference = REFERENCES.get(case, instance.users_problem)
        place = "on the same case in float64" if instance.case.dtype != "float64" else "on the same case at its start"
        window = reference.window(window.index)
    recorder, observed = recorded(runner, reference, step)
    if case != instance.case:
        if observed is None:
            return None
        at_its_start = window.compare(observed)
        if at_its_start.ratio <= 1:
            if not moved.moved or instance.case.dtype != "float64":
                return None
            recorder, observed = recorded(runner, moved.reference, step, comparison.observed)
            return explain_run(recorder, observed, moved, comparison, step)
        comparison = at_its_start
    if not np.isfinite(comparison.observed).all():
        return None
    if found := explain_run(recorder, observed, window, comparison, step):
        return _read_off(found, case, instance, place)
    found = diagnose_case(window, comparison, epoch, alike=runner.alike)
    small = scaled(reference.instance, SMALL_SCALE)
    trust_probe = is_linear_there and not runner.runs_left
    again = None if trust_probe else _gradient_at(runner, reference, small, step)
    if again is None and not trust_probe:
        return None
    if again is not None and not is_linear(comparison.observed, again):
        # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
        if found is None or recorder.called:
            found = _of_size(window, comparison, again)
        said = f"{place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalizing) or on chance (noise)"
        found = found or not_linear(f"{said}; it is {place_of_the_fault(comparison)}")
    return found and _read_off(found, case, instance, place)
