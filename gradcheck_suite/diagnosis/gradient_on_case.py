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
    again = _gradient_at(runner, window.reference, scaled(window.reference.instance, SMALL_SCALE), step)
    if again is None:
        return None
    if is_linear(comparison.observed, again):
        return found
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made small
    if found is None or recorder.called:
        found = _of_size(window, comparison, again)
    said = f"on {place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalizing) or on chance (noise)"
    return found or not_linear(f"{said}; it is {place_of_the_fault(comparison)}")
