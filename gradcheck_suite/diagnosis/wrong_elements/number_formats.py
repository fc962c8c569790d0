"""Which narrow format, or how many levels, the elements of a gradient were rounded to."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.patterns import FORMATS
from gradcheck_suite.diagnosis.wrong_elements.moved_elements import Array

LEVELS = (3, 7, 15, 31, 63, 127, 255, 32767)
"""Largest whole numbers of the formats that gradients are quantised to."""


def levels_of(expected: Array, observed: Array) -> int | None:
    """Return the number of steps from 0 to the largest element that all elements lie on, where they are near enough."""
    largest = np.abs(observed).max()
    if np.count_nonzero(observed) < 3 or len(np.unique(np.abs(observed))) < 2:
        return None
    for levels in LEVELS:
        steps = observed / largest * levels
        if (np.abs(steps - np.round(steps)) < 1e-9 * levels).all():
            return levels if (np.abs(observed - expected) <= largest / levels).all() else None
    return None


def relative_error(expected: Array, observed: Array) -> float:
    """Return the largest error over the largest expected element."""
    size = np.abs(expected).max()
    return float(np.abs(observed - expected).max() / size) if size else float("inf")


def format_of(expected: Array, observed: Array) -> str | None:
    """Return the narrow format that all elements are numbers of, where the gradient is right to its precision."""
    for form, digits in FORMATS.items():
        mantissa, _ = np.frexp(observed)
        scaled = mantissa * 2.0**digits
        if (scaled == np.round(scaled)).all() and relative_error(expected, observed) <= 8 * 2.0**-digits:
            return form
    return None
