"""Whether arrays of two frameworks are equal, in order or as sets of numbers. Imports numpy alone.

Two programs that compute the same have the same numbers in them, whatever their layouts: channels
last, fused projections, stacked layers and scans change where a number stands, not the number. So a
result of one side is looked up, number by number, among all numbers of the other. No axes are
aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
STEPS = 64
"""Length of a first axis up to which an array is also taken for as many arrays as it has parts, such as steps."""
SAME = 1e-9
"""Relative difference within which two numbers of float64 computations are taken for the same one."""
NEAR_ZERO = 1e-3
"""The same, for numbers below this part of the largest number of their array."""


def error(observed: Array, expected: Array) -> float:
    """Return the largest difference over the largest finite expected number.

    A number that is not finite equals the same one alone; any other is infinitely far from it.

    Args:
        observed: any shape.
        expected: of the same shape; otherwise the error is infinite.
    """
    if observed.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    observed = observed.astype(np.float64)
    expected = expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.asarray(np.abs(observed - expected))
    # a mask of -1e31 and one of the lowest finite number count as equal
    huge = (
        (np.abs(observed) > 1e30)
        & (np.abs(expected) > 1e30)
        & (np.isinf(observed) == np.isinf(expected))
        & (np.sign(observed) == np.sign(expected))
    )
    off[(observed == expected) | (np.isnan(observed) & np.isnan(expected)) | huge] = 0.0
    off[np.isnan(off)] = np.inf
    sizes = np.abs(expected[np.isfinite(expected) & (np.abs(expected) < 1e30)])
    largest = float(sizes.max(initial=0.0))
    return float(off.max() / largest) if largest > 0 else float(off.max())


def with_axes_aligned(observed: Array, expected: Array) -> Array:
    """Return the observed array in the expected shape: the permutation of axes that fits best, or a
    reshape.
    """
    if observed.shape == expected.shape or observed.size != expected.size:
        return observed
    if (axes := turn(observed.shape, expected.shape, observed, expected)) is not None:
        return observed.transpose(axes)
    # an axis of one element may be anywhere; another reshape would mix elements
    if [n for n in observed.shape if n != 1] == [n for n in expected.shape if n != 1]:
        return observed.reshape(expected.shape)
    return observed


def turn(
    shape: tuple[int, ...], wanted: tuple[int, ...], observed: Array, expected: Array
) -> tuple[int, ...] | None:
    """Return the axes by which an array of one shape has to be transposed to another shape, or
    None.
    """
    # six axes have 720 orders, each of which would be compared
    if shape == wanted or sorted(shape) != sorted(wanted) or len(shape) > 5:
        return None
    options = [a for a in permutations(range(len(shape))) if tuple(shape[i] for i in a) == wanted]
    return min(options, key=lambda a: error(observed.transpose(a), expected))


def telling(value: Array) -> Array:
    """Return the elements that are hardly equal by chance: finite, and no multiples of 1/4 as
    counts and masks are.
    """
    flat = value.reshape(-1)
    if flat.dtype.kind != "f":
        return np.zeros(0)
    with np.errstate(invalid="ignore"):
        size = np.abs(flat)
        keep = np.isfinite(flat) & (size < 1e8) & (size > 1e-200) & (flat * 4 != np.round(flat * 4))
    return np.asarray(flat[keep])


def variety(value: Array) -> int:
    """Return the number of different telling numbers."""
    return len(np.unique(np.round(telling(value), 9)))


class Numbers:
    """All numbers of some arrays, to look up others.

    Args:
        arrays: any shapes.
        tolerance: relative difference within which two numbers are the same.
    """

    def __init__(self, arrays: Iterable[Array], tolerance: float = SAME) -> None:
        self.arrays = list(arrays)
        self.tolerance = tolerance
        parts = [telling(a) for a in self.arrays]
        owner = np.repeat(np.arange(len(parts) + 1), [*(len(p) for p in parts), 1])
        flat = np.concatenate([*parts, [np.inf]])  # there is a number behind all others
        order = np.argsort(flat, kind="stable")
        self._flat = flat[order]
        self._owner = owner[order]
        self.whole = list(range(len(self.arrays)))
        self._sorted: dict[int, Array] = {}
        self._by_size: dict[int, list[int]] = {}

    def _span(self, wanted: Array) -> tuple[Array, Array]:
        """Return where the numbers begin that are as large as wanted ones, and how large they are
        at most.
        """
        allowed = self.tolerance * (np.abs(wanted) + NEAR_ZERO * np.abs(wanted).max(initial=0.0))
        return np.searchsorted(self._flat, wanted - allowed), wanted + allowed

    def has(self, numbers: Array) -> Array:
        """Return which numbers are here."""
        low, most = self._span(numbers)
        return np.asarray(self._flat[low] <= most)

    def holds(self, value: Array) -> bool | None:
        """Return whether every telling number of an array is here; None where it has none."""
        wanted = telling(value)
        if not len(wanted):
            return None
        # most arrays are not here, and a sample of their numbers is enough to show it
        if len(wanted) > 64 and not self.has(wanted[:: len(wanted) // 32]).all():
            return False
        return bool(self.has(wanted).all())

    def owner_of(self, value: Array) -> int | None:
        """Return the index of the array that has most of the first numbers of a value."""
        low, most = self._span(telling(value)[:16])
        high = np.searchsorted(self._flat, most, "right")
        every = list[int]()
        for start, end in zip(low, high, strict=True):
            every += set(self._owner[start:end].tolist())
        return max(sorted(set(every)), key=every.count) if every else None

    def of_size(self, size: int) -> Sequence[int]:
        """Return the indices of arrays of a size, then of parts of arrays along their first axis,
        as of a scan.

        `whole` has the index of the array that each is a part of.
        """
        if size not in self._by_size:
            floats = [
                (i, a)
                for i, a in enumerate(self.arrays)
                if a.dtype.kind == "f" and self.whole[i] == i
            ]
            found = self._by_size[size] = [i for i, a in floats if a.size == size]
            for i, a in floats:
                if a.ndim > 1 and 1 < len(a) <= STEPS and a.size == size * len(a):
                    found += range(len(self.arrays), len(self.arrays) + len(a))
                    self.whole += [i] * len(a)
                    self.arrays += list(a)
        return self._by_size[size]

    def sorted(self, index: int) -> Array:
        """Return the numbers of an array in order."""
        if index not in self._sorted:
            self._sorted[index] = np.sort(self.arrays[index].reshape(-1))
        return self._sorted[index]
