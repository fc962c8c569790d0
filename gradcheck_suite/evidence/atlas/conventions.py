"""The derivative that a framework chose at a point, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcheck_suite.evidence.atlas.point import Point, number

Gradient = tuple[npt.NDArray[np.float64], ...]
_NEAR = 1e-4
"""Relative distance within which a gradient counts as one of the candidates; they are far apart, rounding is not."""


def convention(point: Point, of_torch: Gradient, of_jax: Gradient, *, agree: bool) -> str:
    """Return which derivative torch and JAX choose, and why they differ by definition where the point says so."""
    torch_choice, jax_choice = _choice(point, of_torch), _choice(point, of_jax)
    if agree:
        return f"both: {torch_choice}"
    words = f"both: {torch_choice}" if torch_choice == jax_choice else f"torch: {torch_choice}; JAX: {jax_choice}"
    if torch_choice == jax_choice:
        words = f"{words}, but the numbers differ"
    return f"{words} ({point.note})" if point.note else words


def _choice(point: Point, gradient: Gradient) -> str:
    if point.sides is not None:
        return _side(float(gradient[0][0]), *point.sides)
    if point.tied:
        return _share(gradient[0][list(point.tied)])
    return "gradient " + ", ".join(_numbers(part) for part in gradient)


def _side(found: float, left: float, right: float) -> str:
    """Return which of the one-sided derivatives a derivative is."""
    if math.isnan(found):
        return "NaN"
    if _near(left, right):
        return f"the derivative, {number(left)}" if _near(found, left) else f"{number(found)}, not {number(left)}"
    candidates = {
        "the left derivative": left,
        "the right derivative": right,
        "the mean of both sides": (left + right) / 2,
        "zero": 0.0,
    }
    named = [name for name, value in candidates.items() if _near(found, value)]
    return f"{named[0]}, {number(found)}" if named else f"{number(found)}, neither side"


def _share(parts: npt.NDArray[np.float64]) -> str:
    """Return how the gradient is shared among tied elements."""
    if np.isnan(parts).any():
        return "NaN"
    if not parts.any():
        return "zero to every tied element"
    nonzero = np.flatnonzero(parts)
    if len(nonzero) == 1:
        place = {0: "first", 1: "2nd", 2: "3rd"}.get(int(nonzero[0]), f"{nonzero[0] + 1}th")
        place = "last" if nonzero[0] == len(parts) - 1 else place
        return f"all to the {place} of the tied elements"
    if np.allclose(parts, parts[0], rtol=_NEAR):
        return "the whole gradient to each tied element" if _near(float(parts[0]), 1.0) else "split evenly among ties"
    return "shares " + _numbers(parts)


def _numbers(parts: Sequence[float] | npt.NDArray[np.float64]) -> str:
    finite = [abs(part) for part in parts if math.isfinite(part)]
    smallest = 1e-6 * max(finite, default=0.0)
    listed = [number(0.0 if abs(part) <= smallest else float(part)) for part in parts]
    return listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"


def _near(x: float, y: float) -> bool:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x == y or (math.isnan(x) and math.isnan(y))
    return abs(x - y) <= _NEAR * max(abs(x), abs(y))
