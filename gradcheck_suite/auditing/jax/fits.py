"""The gradient at a step as a weighted sum of gradients, by least squares on their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcheck_suite.auditing.jax.marks import segments

Vector = npt.NDArray[np.float64]
EPS = float(np.finfo(np.float32).eps)
"""Unit of rounding of the numbers that samples are made of."""
SPARE = 2
"""Elements beyond the number of coefficients without which any gradient would fit."""
FLOOR = 1e-5
"""Of the largest element: smaller ones are compared on this scale. A gradient that is 0 but for rounding, as of the
key's bias in attention, is another one in another program."""


@dataclass(frozen=True)
class LinearCombination:
    """A gradient as a sum of others.

    Attributes:
        coefficients: (columns,).
        errors: (columns,), of the coefficients.
        is_exact: whether no more than rounding is left over.
        off: what is left over, relative to the largest element of its leaf.
        is_degenerate: whether other coefficients fit as well.
        is_told: whether there are enough elements for a fit to mean something.
    """

    coefficients: Vector
    errors: Vector
    is_exact: bool
    off: float
    is_degenerate: bool = False
    is_told: bool = True

    @property
    def found(self) -> list[float]:
        """The coefficients; 0 for what rounding does not tell from it."""
        pairs = zip(self.coefficients, self.errors, strict=True)
        return [0.0 if abs(c) <= error else float(c) for c, error in pairs]

    @property
    def tolerance(self) -> float:
        """The largest relative error of a coefficient that is not 0."""
        pairs = zip(self.found, self.errors, strict=True)
        return max(2e-5, *(4 * float(error / abs(c)) for c, error in pairs if c), 0.0)


def fit(
    shapes: Sequence[tuple[int, ...]],
    columns: Sequence[Vector],
    target: Vector,
    *,
    relative: float,
    noise: Vector | None = None,
) -> LinearCombination:
    """Fit a sum of gradients to another one.

    Args:
        shapes: of the leaves that were sampled.
        columns: the gradients, (samples,) each.
        target: (samples,).
        relative: the difference that rounding explains in the dtype of the gradients.
        noise: (samples,), by how much each element of the target is off; None where it is not known
            to be off at all. The noise of a projection, which adds up that of all elements, is not
            known: these are left out then.
    """
    matrix = np.stack(columns, 1)
    scale, keep = _scales(
        shapes,
        matrix,
        target,
        with_projections=noise is None,
    )
    keep &= np.isfinite(matrix).all(1) & np.isfinite(target)
    number = matrix.shape[1]
    # columns of zeros give zeros: nothing explains any other target
    if not keep.any() or not matrix[keep].any():
        nothing = np.zeros(number)
        return LinearCombination(
            nothing,
            nothing,
            not target.any(),
            0.0,
        )
    # samples are float32, so that each is off by a unit of rounding even where nothing else is
    blur = (0.0 if noise is None else noise) + EPS * np.abs(target[keep]).max() * np.ones(
        len(scale)
    )
    # each leaf is compared on its own scale: gradients of a bias and of an embedding may differ by
    # orders of magnitude, and the larger one alone would decide
    a = matrix[keep] / scale[keep, None]
    b = target[keep] / scale[keep]
    blur = blur[keep] / scale[keep]
    say = 1 / (1 + blur / relative)  # what rounding blurs counts for less
    a = a * say[:, None]
    b = b * say
    blur = blur * say
    # `rcond` is relative to the largest singular value: without columns of one length, a small
    # gradient beside a large one would be cut off as if it were a combination of others
    size = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    solution, _, _, singular = np.linalg.lstsq(a / size, b, rcond=1e-6)
    found = solution / size
    # what is rounded is each term of the sum, and terms that cancel are larger than their sum
    rounding = relative * ((np.abs(a) * np.abs(found)).sum(1).max() + np.abs(b).max())
    rounding += float(blur.max())
    # only what the noise of the target does not explain is left over
    left = np.maximum(np.abs(a @ found - b) - 4 * blur, 0)
    # an error of the samples moves a coefficient by at most its size over the smallest singular
    # value; directions that `rcond` has cut off have no coefficient
    smallest = singular[singular > 1e-6 * singular[0]].min()
    errors = rounding / 8 * np.sqrt(len(b)) / smallest / size
    # with fewer samples than columns a fit leaves nothing over; where it does, it has failed
    tells = len(b) >= number or np.allclose(left, 0, atol=rounding)
    off = float(left.max())
    return LinearCombination(
        found,
        np.maximum(errors, 1e-6 * np.abs(found).max()),
        is_exact=bool(off <= max(rounding, relative) and tells),
        off=off,
        is_degenerate=bool(len(singular) < number or singular[-1] < 1e-5 * singular[0]),
        is_told=len(b) >= number + SPARE,
    )


def _scales(
    shapes: Sequence[tuple[int, ...]],
    matrix: npt.NDArray[np.float64],
    target: Vector,
    *,
    with_projections: bool,
) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """Return the scale of each sample, that of its leaf, and which samples are looked at."""
    scale = np.ones(len(target))
    keep = np.ones(len(target), bool)
    for elements, *projections in segments(shapes):
        for part in (elements, *projections):
            values = np.hstack([matrix[part], target[part, None]])
            scale[part] = np.abs(values[np.isfinite(values)]).max(initial=0.0)
        for part in projections:
            keep[part] = with_projections
    largest = scale.max(initial=0.0)
    # in leaves whose gradients are nothing beside the largest, there is rounding alone
    keep &= scale > 1e-12 * max(largest, 1e-300)
    return np.maximum(scale, max(FLOOR * largest, 1e-300)), keep


def near(a: Any, b: Any, tolerance: float) -> bool:
    """Return whether numbers differ by no more than a share of the larger ones."""
    allowed = tolerance * np.maximum(np.abs(a), np.abs(b))
    return bool(np.all(np.abs(np.asarray(a) - b) <= allowed))
