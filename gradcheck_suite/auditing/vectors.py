"""Samples of gradients once they are arrays, and how two of them compare.

Must import neither torch nor JAX: the judge reads the samples of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ELEMENTS = 16
PROJECTIONS = 8
Vector = npt.NDArray[np.float64]
"""The elements, then the projections where they were taken."""


def size(vector: Vector) -> float:
    """Return the largest absolute value of a sample."""
    return float(np.abs(vector).max()) if len(vector) else 0.0


def is_finite(vector: Vector) -> bool:
    """Return whether a sample has neither NaN nor infinity."""
    return bool(np.isfinite(vector).all())


def alike(one: Vector, other: Vector) -> tuple[Vector, Vector]:
    """Return two samples cut to the part that both have."""
    length = min(len(one), len(other))
    return one[:length], other[:length]


# a gradient may be infinite, and what the program prints stays what it was
_quiet = np.errstate(invalid="ignore", over="ignore")


@_quiet
def distance(one: Vector, other: Vector) -> float:
    """Return the largest difference of two samples relative to the size of the other, not finite
    where they are not.

    Elements and projections are compared each on a scale of their own: the square root of the
    number of elements lies between them. Elements that are all 0 have the scale of the projections.
    """
    one, other = alike(one, other)
    whole = size(other) or 1.0
    parts = (slice(ELEMENTS), slice(ELEMENTS, None))
    return float(
        np.max([size(one[part] - other[part]) / (size(other[part]) or whole) for part in parts])
    )


def is_mostly(now: Vector, then: Vector) -> bool:
    """Return whether most of some elements that are not 0 are equal to the bit: what differs are
    some of them.
    """
    counted = (now != 0) | (then != 0)
    return bool(2 * np.count_nonzero((now == then) & counted) > np.count_nonzero(counted))


@_quiet
def factor(now: Vector, then: Vector, tolerance: float) -> float | None:
    """Return f where `now` is f times `then`, else None.

    Elements that most others, which are the same to the bit, contradict have no part in f.
    """
    now, then = alike(now, then)
    square = float((then * then).sum())
    if not square or not math.isfinite(square):
        return None
    found = (
        1.0 if is_mostly(now[:ELEMENTS], then[:ELEMENTS]) else float((now * then).sum()) / square
    )
    return found if distance(found * then, now) <= tolerance else None


@dataclass(frozen=True)
class MaskedElements:
    """Which elements of a `.grad` a program has changed, as masks.

    Attributes:
        zeroed: those that it has set to 0.
        left: those that are what they were, and not 0.
        other: those that it has changed to something else.
    """

    zeroed: Any
    left: Any
    other: Any

    @staticmethod
    def of(then: Any, now: Any) -> MaskedElements:
        """Compare elements of a `.grad`, arrays or tensors, with what they were before."""
        is_changed = now != then
        return MaskedElements(
            zeroed=is_changed & (now == 0),
            left=~is_changed & (now != 0),
            other=is_changed & (now != 0),
        )

    @property
    def is_mask(self) -> bool:
        """Whether some were set to 0, and the others are what they were."""
        return bool(self.zeroed.any() and self.left.any() and not self.other.any())
