"""Comparing vectors of gradients, element by element, against what rounding allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """The place of each parameter's elements in a flat vector of all parameters.

    Attributes:
        names: the parameters' names, in the order of the vector.
        shapes: the parameters' shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [int(np.prod(shape, dtype=int)) for shape in self.shapes]

    @property
    def offsets(self) -> list[int]:
        """Index of each parameter's first element."""
        return [0, *np.cumsum(self.sizes)[:-1].tolist()]

    def place(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Return the parameter and the index within it of a flat index."""
        which = int(np.searchsorted(self.offsets, index, side="right")) - 1
        where = np.unravel_index(index - self.offsets[which], self.shapes[which])
        return self.names[which], tuple(int(i) for i in where)

    def elements(self, name: str) -> slice:
        """Return the slice of one parameter's elements."""
        which = self.names.index(name)
        return slice(self.offsets[which], self.offsets[which] + self.sizes[which])

    def part(self, vector: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        """Return one parameter's elements, in its shape."""
        return vector[self.elements(name)].reshape(self.shapes[self.names.index(name)])

    def spread(self, vector: Vector) -> Vector:
        """Return, at every element, the largest value among the elements of the same parameter."""
        if not len(vector):
            return vector
        offsets = [o for o, size in zip(self.offsets, self.sizes, strict=True) if size]
        return np.repeat(np.maximum.reduceat(vector, offsets), [s for s in self.sizes if s])


@dataclass(frozen=True)
class Difference:
    """The worst difference between two vectors.

    Attributes:
        index: flat index of the element with the largest error over allowed.
        error: |observed - expected| there; infinite where exactly one of them is NaN.
        allowed: the bound there.
        count: number of elements whose error exceeds the bound.
    """

    index: int
    error: float
    allowed: float
    count: int

    @property
    def ratio(self) -> float:
        """Error over allowed; above 1 is a difference that rounding does not explain."""
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else float("inf")


def elementwise_error(observed: Any, expected: Any) -> Any:
    """Return |observed - expected|: 0 for equal infinities and for two NaN, infinite where one alone is NaN.

    Args:
        observed: an array of numpy or a tensor of torch, floating.
        expected: an array or tensor of the same kind and shape.
    """
    error = abs(observed - expected)
    error[error != error] = float("inf")  # only NaN differs from itself
    error[observed == expected] = 0.0
    error[(observed != observed) & (expected != expected)] = 0.0
    return error


def worst_difference(observed: Vector, expected: Vector, allowed: Vector) -> Difference:
    """Compare two vectors. Equal infinities, and two NaN at the same place, have an error of 0.

    Args:
        observed: (P,).
        expected: (P,).
        allowed: (P,), at least 0: the bound of each element.
    """
    if not len(observed):
        return Difference(0, 0.0, 0.0, 0)
    with np.errstate(invalid="ignore"):
        error = elementwise_error(observed, expected)
    with np.errstate(divide="ignore"):
        ratio = np.divide(error, allowed, out=np.zeros_like(error), where=error > 0)
    index = int(np.argmax(ratio))
    return Difference(index, float(error[index]), float(allowed[index]), int(np.count_nonzero(error > allowed)))


@dataclass(frozen=True, eq=False)
class Comparison:
    """An observed gradient, the expected one and the bound: the evidence for a verdict.

    Attributes:
        layout: the layout of the three vectors.
        expected: (P,) float64: the reference gradient, parameters flattened in layout order.
        observed: (P,) float64: the loop's gradient, zeros where it is None.
        allowed: (P,) float64: the bound on |observed - expected| that was applied.
        missing: names of the parameters whose observed gradient is None.
    """

    layout: Layout
    expected: Vector
    observed: Vector
    allowed: Vector
    missing: frozenset[str] = frozenset()

    @cached_property
    def worst(self) -> Difference:
        """The difference at the element with the largest error over allowed."""
        return worst_difference(self.observed, self.expected, self.allowed)

    @property
    def ratio(self) -> float:
        """The largest error over allowed; above 1 is a difference that rounding does not explain."""
        return self.worst.ratio

    def seen(self, name: str) -> npt.NDArray[np.float64] | None:
        """Return a parameter's observed gradient in its shape, or None where it is None."""
        return None if name in self.missing else self.layout.part(self.observed, name)
