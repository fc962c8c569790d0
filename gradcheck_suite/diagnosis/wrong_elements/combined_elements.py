"""Naming a gradient each element of which is combined from those of the micro-batches otherwise than by their sum.

On the weight probe every element is in one micro-batch alone, so a maximum over micro-batches looks right
there, and a median or an agreement of signs looks like a missing gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.references.window import Window

Rows = npt.NDArray[np.float64]


def _where(parts: Rows, chosen: npt.NDArray[np.intp]) -> Vector:
    found: Vector = np.take_along_axis(parts, chosen[None], axis=0)[0]
    return found


def _agreeing(parts: Rows) -> Vector:
    total: Vector = parts.sum(axis=0)
    return np.where(np.abs(np.sign(parts).sum(axis=0)) == len(parts), total, 0.0)


def _over_those_reached(parts: Rows) -> Vector:
    found: Vector = parts.sum(axis=0) / np.maximum(1, np.count_nonzero(parts, axis=0))
    return found


def _signal_to_noise(parts: Rows) -> Vector:
    squares = (parts**2).sum(axis=0)
    found: Vector = parts.sum(axis=0) ** 3 / np.where(squares, squares, 1.0)
    return found


COMBINATIONS: dict[str, Callable[[Rows], Vector]] = {
    "the largest of those of the micro-batches": lambda parts: parts.max(axis=0),
    "the smallest of those of the micro-batches": lambda parts: parts.min(axis=0),
    "that of the micro-batch in which it is largest in absolute value": lambda parts: _where(
        parts, np.abs(parts).argmax(axis=0)
    ),
    "that of the micro-batch in which it is smallest in absolute value": lambda parts: _where(
        parts, np.abs(parts).argmin(axis=0)
    ),
    "the median of those of the micro-batches": lambda parts: np.median(parts, axis=0),
    "the lower median of those of the micro-batches": lambda parts: np.sort(parts, axis=0)[(len(parts) - 1) // 2],
    "the root of the sum of the squares of those of the micro-batches": lambda parts: np.sqrt((parts**2).sum(axis=0)),
    "the micro-batches' sum where their signs agree, and 0 elsewhere": _agreeing,
    "the micro-batches' sum over the number of those in which it is not 0": _over_those_reached,
    "the micro-batches' sum times its square over the sum of their squares": _signal_to_noise,
}
"""What an element may be in place of the micro-batches' sum, from (micro-batches, P) their parts of the gradient."""


def combined_elements(window: Window, comparison: Comparison) -> Diagnosis | None:
    """Return the diagnosis of elements that are another function of the micro-batches' than their sum, or None.

    Args:
        window: whose gradient is wrong.
        comparison: of that gradient with the right one.
    """
    instance, count = window.reference.instance, len(window.members)
    if count < 2 or window.moved or instance.case.dtype != "float64" or instance.problem.reduction == "batch":
        return None
    parts = np.stack(window.float64_bound.contributions)
    if not np.isfinite(parts).all() or not np.isfinite(comparison.observed).all():
        return None
    # parts of which rounding decides the sign are no evidence
    noise = 64 * np.finfo(np.float64).eps * np.abs(parts).max(axis=0)
    parts = np.where(np.abs(parts) <= noise, 0.0, parts)
    allowed = 8 * (comparison.allowed + count * noise)
    for said, combine in COMBINATIONS.items():
        found = combine(parts)
        for factor, times in ((1.0, ""), (count, f", times their number, {count}"), (1 / count, ", over their number")):
            if found.any() and (np.abs(factor * found - comparison.observed) <= allowed).all():
                return Diagnosis(
                    "not-summed",
                    f"each element of the gradient is {said}{times}: add up the micro-batches' gradients, since any "
                    "other function of them is not the gradient of the large batch",
                )
    return None
