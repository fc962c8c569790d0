"""Fitting weights to a wrong gradient: least squares on the gradients of the case's own micro-batches.

The read-out probe shows what a loop does to weights in general. Where it shows nothing (a fault that depends on the
model: one parameter, a hook, a buffer) or cannot run (a trainer that takes one kind of model), the weights are fitted
to the case itself, to all elements and then parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.diagnosis.aliasing import find_stolen_buffers
from gradcheck_suite.diagnosis.weights import Diagnosis, Weights, diagnose, named_factor
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.numerics.least_squares import fit_weights
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.references.window import Window

Rows = npt.NDArray[np.float64]
_NO_NAME = ("unrecognised-weights", "rounded-weights")
_ANY_FACTOR = ("wrong-scale", "mean-of-means", "rescaled-accumulator")
"""What any one number may look like: named only where more elements agree on the weights than there are weights."""


def diagnose_case(window: Window, comparison: Comparison, epoch: int) -> Diagnosis | None:
    """Name the fault whose weights fit a wrong float64 gradient; None where no weights are determined or named.

    Args:
        window: whose gradient is wrong, of a case in float64 whose optimizer leaves the parameters as they are.
        comparison: of that gradient with the right one.
        epoch: of the step.
    """
    if not np.isfinite(comparison.observed).all():
        return None
    gradients = _summed_gradients(window)
    if not np.isfinite(gradients).all():
        return None
    whole = _diagnosed(window, epoch, gradients, comparison.observed, comparison.allowed)
    return whole or _of_some_parameters(window, comparison, epoch, gradients)


def _of_some_parameters(window: Window, comparison: Comparison, epoch: int, gradients: Rows) -> Diagnosis | None:
    """Name the one fault of all wrong parameters, where some parameter is right."""
    layout, observed, allowed = comparison.layout, comparison.observed, comparison.allowed
    within = np.abs(observed - comparison.expected) <= allowed
    right = [name for name in layout.names if layout.part(within, name).all()]
    wrong = [name for name in layout.names if name not in right]
    found = []
    for name in wrong:
        elements = layout.elements(name)
        found.append(_diagnosed(window, epoch, gradients[:, elements], observed[elements], allowed[elements]))
    if not right or not found or found[0] is None or len({diagnosis and diagnosis.name for diagnosis in found}) != 1:
        return None
    said = f"in {_listed(wrong)} alone, while {_listed(right)} is right: {found[0].sentence}"
    return Diagnosis(found[0].name, said)


def stolen_buffer(instance: Instance) -> Diagnosis | None:
    """Return the diagnosis of a model whose backward returns a buffer that it uses again, or None."""
    batches = [instance.batch(instance.case.plan.items(j)) for j in range(len(instance.case.plan.micro_batches))]
    try:
        found = find_stolen_buffers(instance.model(), instance.problem.loss, (2 * batches)[: max(2, len(batches))])
    except (RuntimeError, NotImplementedError):
        return None
    return Diagnosis("stolen-buffer", found[0].explanation) if found else None


def _summed_gradients(window: Window) -> Rows:
    """Return (B, P): the gradient of each micro-batch's summed loss, at the parameters of the window."""
    instance, model = window.reference.instance, window.model()
    rows = [
        window.reference.flat(
            gradients_of(instance, model, instance.case.plan.items(j), summed=True, dtype=torch.float64)
        )
        for j in range(len(instance.case.plan.micro_batches))
    ]
    return np.stack(rows)


def _diagnosed(window: Window, epoch: int, gradients: Rows, observed: Vector, allowed: Vector) -> Diagnosis | None:
    """Fit this window's micro-batches, then all of the epoch's; name the fault where the weights are determined."""
    instance = window.reference.instance
    plan = instance.case.plan
    inside = list(window.members)
    everything = list(range(len(plan.micro_batches)))
    for members in (inside, everything):
        fit = fit_weights(observed, gradients[members], allowed)
        if not (fit.exact and fit.determined):
            continue
        values = np.zeros(len(plan.micro_batches))
        values[members] = fit.weights
        counts = [float(instance.count(instance.batch(plan.items(j)))) for j in everything]
        reached = [bool(row.any()) for row in gradients]
        weights = Weights(
            observed=_cleaned(values),
            counts=tuple(n if there else 0.0 for n, there in zip(counts, reached, strict=True)),
            window=tuple(inside),
            accumulation_steps=plan.accumulation_steps,
            epoch=epoch,
            reduction=instance.problem.reduction,
            items=plan.micro_batches,
            total=sum(counts[j] for j in inside),
        )
        diagnosis = diagnose(weights)
        read = [j for j in members if reached[j]]
        spare = np.count_nonzero(gradients[members].any(axis=0)) > len(read)
        # two of the window's weights that fit one pattern are no coincidence; one may be anything, and so may others'
        telling = spare or (
            members is inside and (len(read) > 1 or diagnosis.name not in _ANY_FACTOR or _is_named(weights, read))
        )
        return diagnosis if telling and diagnosis.name not in _NO_NAME else None
    return None


def _is_named(weights: Weights, read: Sequence[int]) -> bool:
    """Whether the only micro-batch that is read is right up to a factor that the run itself has."""
    (only,) = read
    return bool(named_factor(float(weights.observed[only] / weights.expected), weights))


def _cleaned(weights: Rows) -> Rows:
    """Return weights with those that are 0 but for rounding set to 0."""
    return np.where(np.abs(weights) < 1e-9 * np.abs(weights).max(), 0.0, weights)


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:3])
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
