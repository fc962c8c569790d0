"""Reading a wrong gradient on the very case that showed it: least squares on its micro-batches' own gradients.

The read-out probe says what a loop does to weights in general. Where it shows nothing (a fault that depends on the
model: one parameter, a hook, a buffer) or cannot run (a trainer that takes one kind of model), the case itself is
read, as a whole and then parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.diagnosis.aliasing import find_stolen_buffers
from gradcheck_suite.diagnosis.weights import Diagnosis, Weights, diagnose, named_factor
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.numerics.least_squares import fit_weights
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.references.torch_reference import gradients_of

Rows = npt.NDArray[np.float64]
_NO_NAME = ("unrecognised-weights", "rounded-weights")
_ANY_FACTOR = ("wrong-scale", "mean-of-means", "rescaled-accumulator")
"""What any one number may look like: named only where more elements agree on the weights than there are weights."""


def read_case(reference: Reference, window: Window, observed: Vector, epoch: int) -> Diagnosis | None:
    """Name the fault from the case itself, or return None where it gives nothing away.

    Args:
        reference: of the case.
        window: whose gradient is wrong.
        observed: (P,), that gradient.
        epoch: of the step.
    """
    if not np.isfinite(observed).all() or reference.instance.case.dtype != "float64":
        return None
    allowed = window.allowed()
    gradients = _summed_gradients(reference, window)
    if not np.isfinite(gradients).all():
        return None
    whole = _diagnosed(reference, window, observed, gradients, allowed, epoch, slice(None))
    if whole is not None:
        return whole
    layout, names, found = reference.layout, [], []
    right = []
    for name in layout.names:
        start = layout.offsets[layout.names.index(name)]
        part = slice(start, start + layout.sizes[layout.names.index(name)])
        if (np.abs(observed[part] - window.expected[part]) <= allowed[part]).all():
            right.append(name)
            continue
        diagnosis = _diagnosed(reference, window, observed[part], gradients[:, part], allowed[part], epoch, part)
        if diagnosis is None:
            return None
        names.append(name)
        found.append(diagnosis)
    if not right or len({diagnosis.name for diagnosis in found}) != 1:
        return None
    first, *_ = found
    return Diagnosis(first.name, f"in {_listed(names)} alone, while {_listed(right)} is right: {first.sentence}")


def stolen_buffer(reference: Reference) -> Diagnosis | None:
    """Say that a backward hands out a buffer which it uses again, where the case's model does so."""
    instance = reference.instance
    batches = [instance.batch(instance.case.plan.items(j)) for j in range(len(instance.case.plan.micro_batches))]
    try:
        found = find_stolen_buffers(instance.model(), instance.problem.loss, (2 * batches)[: max(2, len(batches))])
    except (RuntimeError, NotImplementedError):
        return None
    return Diagnosis("stolen-buffer", found[0].explanation) if found else None


def _summed_gradients(reference: Reference, window: Window) -> Rows:
    """Return (B, P): the gradient of each micro-batch's summed loss, at the parameters of the window."""
    instance = reference.instance
    model = window.model()
    rows = [
        reference.flat(gradients_of(instance, model, instance.case.plan.items(j), summed=True, dtype=torch.float64))
        for j in range(len(instance.case.plan.micro_batches))
    ]
    return np.stack(rows)


def _diagnosed(
    reference: Reference,
    window: Window,
    observed: Vector,
    gradients: Rows,
    allowed: Vector,
    epoch: int,
    part: slice,
) -> Diagnosis | None:
    """Fit this window's micro-batches, then all of the epoch's; name the fault where the weights are determined."""
    instance, plan = reference.instance, reference.instance.case.plan
    inside = list(window.members)
    everything = list(range(len(plan.micro_batches)))
    # with moved parameters, another window's gradients were taken elsewhere and are not at hand
    for members in (inside,) if window.moved else (inside, everything):
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
