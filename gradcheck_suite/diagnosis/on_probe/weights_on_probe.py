"""Naming a fault from the weights that a loop gives to the items of a weight probe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.further_runs.loss_calls import LossRecorder, explain_inputs, run_recorded
from gradcheck_suite.diagnosis.on_probe.probe_weights import (
    WeightProbe,
    flat_on_probe,
    gradients_of_steps,
    item_weights,
)
from gradcheck_suite.diagnosis.on_probe.separating_probe import per_micro_batch, reading, readings, separating_probe
from gradcheck_suite.diagnosis.on_probe.step_patterns import fitting_faults, held_by_steps
from gradcheck_suite.diagnosis.weight_patterns.naming import diagnose, names_nothing
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, Weights
from gradcheck_suite.diagnosis.wrong_elements.moved_elements import projection
from gradcheck_suite.diagnosis.wrong_elements.sizes import explain_size, is_linear
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.weight_probe import PARAMETER, SMALL_SCALE, probe_case

SIZE_DEPENDENT = "a loss 2**-20 times as large does not give a gradient 2**-20 times as large: something depends on"

OF_OTHER_WINDOWS = frozenset(("stale-window", "later-window", "other-window"))
"""Names that fit a number which is added to every element, too: on the probe, other windows' items have that weight."""


def explain_weights(probe: WeightProbe, steps: list[Vector], step: int, runner: LoopRunner) -> Diagnosis:
    """Name the fault of the weights of a step, by at most two further runs of the loop.

    Where a name of other windows explains them, the second one tells whether the gradient grows with the loss.

    Args:
        probe: that the weights were read on.
        steps: for each step the weight of each item, (total items,).
        step: index of the step, whose weights are wrong and finite.
        runner: of the loop.
    """
    items, window = steps[step], step % len(probe.plan.windows)
    observed = per_micro_batch(probe, items)
    table = () if observed is None else item_weights(probe, observed, window)
    weights = None if observed is None else reading(probe, step, observed, alike=runner.alike)
    separated, elsewhere = None, list[Weights]()
    projected = _lost_part(probe, items, window)
    if projected and (items.any() or weights is None):
        return projected
    if weights is not None:
        named = diagnose(weights, _others(readings(probe, steps, alike=runner.alike), step))
        # the last run tells either what separates known faults, or what the gradient's size does, which may be a factor
        known = not names_nothing(named) and "wrong-scale" not in named.names
        if known or runner.runs_left > 1:
            separated, elsewhere = _separated(runner, probe, weights, steps)
            if separated and separated.names & OF_OTHER_WINDOWS:
                # the small loss tells other windows from a number that is added, by a fourth run if need be
                runner.runs_left = max(runner.runs_left, 1)
            elif separated:
                return replace(separated, weights=table)
        if projected and not separated:
            # items that weigh the same leave nothing of a gradient without its mean, and other items something
            return Diagnosis(f"{named.name} or {projected.name}", f"{named.sentence}; or: {projected.sentence}")
        if known and not runner.runs_left:
            return replace(named, weights=table)
    recorder, outcome = run_recorded(runner, probe.instance(scale=SMALL_SCALE))
    if outcome is None or step >= len(outcome.observations):
        return separated or not_linear(
            "on the weight probe the items' weights are wrong, and the loop stops if the loss is small"
        )
    small_step = gradients_of_steps(outcome)[step]
    if not is_linear(items, small_step, probe.tolerance):
        found = explain_size(probe.right_weights(window), items, small_step, _parameters_of(probe), probe.tolerance)
        if found is None or found.name == "added-term":
            # a power of the loss adds a term as well
            found = _by_loss(probe, recorder, step, items, small_step) or found or separated
        return found or not_linear(f"{SIZE_DEPENDENT} the gradient's size (clipping, normalizing) or on chance (noise)")
    if separated:
        return replace(separated, weights=table)
    if found := probe_inputs(recorder, probe.plan.windows[window], small_step, step):
        return found
    if weights is None:
        return Diagnosis("unequal-items", "items of one and the same micro-batch have different weights")
    # the gradient grows with the loss, so a factor that is none of the run's is one all the same
    both = diagnose(weights, [*_others(readings(probe, steps, alike=runner.alike), step), *elsewhere])
    if names_nothing(both) and not elsewhere:
        return replace(diagnose(weights) if names_nothing(named) else named, weights=table)
    # a name of the first run alone is refuted by the other one
    return replace(both, weights=table)


def _by_loss(
    probe: WeightProbe, recorder: LossRecorder, step: int, items: Vector, small_step: Vector
) -> Diagnosis | None:
    """Return the diagnosis of weights that the losses' values decide, or None.

    What backward hands to the losses is then all that is wrong: nothing is done to the gradient after it.
    """
    members = probe.plan.windows[step % len(probe.plan.windows)]
    calls = [call for call in recorder.calls if call.step == step and call.cotangent is not None]
    if len(calls) != len(members):
        return None
    handed = np.zeros(len(small_step))
    for j, call in zip(members, calls, strict=True):
        assert call.cotangent is not None
        share = probe.counts[j] if probe.reduction == "mean" else 1.0
        handed[probe.plan.items(j).start : probe.plan.items(j).stop] = SMALL_SCALE * float(call.cotangent) / share
    if not np.allclose(handed, small_step, rtol=1e-9, atol=0):
        return None
    first = probe.plan.items(members[0]).start
    return Diagnosis(
        "weighted-by-loss",
        "a micro-batch's weight depends on the value of its loss: that of the window's first is "
        f"{items[first]:.6g}, and {small_step[first] / SMALL_SCALE:.6g} with a loss 2**-20 times as large: look for a "
        "power or a logarithm of the loss, a focal weight, or a scale that is computed from the loss",
    )


def probe_inputs(recorder: LossRecorder, members: tuple[int, ...], seen: Vector, step: int) -> Diagnosis | None:
    """Return the diagnosis of a probe's gradient that is right for other batches than the loader's, or None."""
    empty = torch.zeros(len(seen))
    return explain_inputs(recorder, lambda gradients: flat_on_probe(gradients, empty), members, seen, step)


def not_linear(why: str) -> Diagnosis:
    """Return the diagnosis of a gradient that no known fault explains."""
    return Diagnosis("not-linear", f"the gradient is wrong, and not by weights of its micro-batches: {why}")


def _lost_part(probe: WeightProbe, items: Vector, window: int) -> Diagnosis | None:
    """Return the diagnosis of a window's right gradient without one of its parts, or None."""
    right = probe.right_weights(window)
    what = projection(right, items, probe.tolerance * float(np.abs(right).max()), _parameters_of(probe))
    return Diagnosis("projected-gradient", f"{what} has been subtracted from the gradient") if what else None


def _parameters_of(probe: WeightProbe) -> Vector:
    model = generated_instance(probe_case(probe.plan, probe.reduction, dtype=probe.dtype)).model()
    values: Vector = model.get_parameter(PARAMETER).detach().double().numpy()
    return values


def _separated(
    runner: LoopRunner, probe: WeightProbe, weights: Weights, steps: list[Vector]
) -> tuple[Diagnosis | None, list[Weights]]:
    """Return the fault that explains this run and one on the separating probe, with a small loss, or None.

    The weights of the other run come with it, where it took all its steps.
    """
    separating = separating_probe(probe, runner.assumes)
    seen = separating.observed_weights(runner, scale=SMALL_SCALE)
    if seen is None or not np.isfinite(seen).all():
        return None, []
    miscounted = len(seen) != separating.plan.steps
    other = (_whole_windows if miscounted else readings)(separating, seen, alike=runner.alike)
    named, wrong = None, bool(other) and not all(w.is_right for w in other or ())
    if other and wrong:
        step = weights.epoch * len(weights.windows) + (weights.index or 0)
        named = diagnose(weights, [*_others(readings(probe, steps, alike=runner.alike), step), *other], known_only=True)
    if named is not None and not names_nothing(named):
        return named, []
    if miscounted:
        return _by_steps(separating, seen), []
    return None, other or []


def _whole_windows(probe: WeightProbe, seen: list[Vector], *, alike: bool) -> list[Weights]:
    """Return the weights of the first steps, as long as each holds all micro-batches of its window and no other.

    A loop that miscounts its steps only later, such as at a short last window, gives the weights of its other fault
    there.
    """
    found: list[Weights] = []
    for step, items in enumerate(seen[: len(probe.plan.windows)]):
        observed = per_micro_batch(probe, items)
        if observed is None or tuple(np.flatnonzero(observed)) != tuple(probe.plan.windows[step]):
            break
        found.append(reading(probe, step, observed, alike=alike))
    return found


def _by_steps(probe: WeightProbe, seen: list[Vector]) -> Diagnosis | None:
    """Return the fault of a loop that takes the right number of steps under one plan and a wrong one under another."""
    faults = fitting_faults(probe.plan, held_by_steps(probe.plan, seen))
    for name, account in faults.items():
        if name != "never-stepped":
            said = f"under another plan the loop takes {len(seen)} steps in place of {probe.plan.steps}"
            return Diagnosis(name, f"{said}{account}")
    return None


def _others(run: list[Weights] | None, step: int) -> list[Weights]:
    """Return the weights of the other steps of a run, where they are finite."""
    return [] if run is None else [w for i, w in enumerate(run) if i != step and np.isfinite(w.observed).all()]
