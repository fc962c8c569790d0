"""How far rounding alone may move a gradient.

Semantics are judged in float64. There the cheap bound is `QUICK` unit roundoffs of the largest entry of the window's
gradient: rounding is around one such unit and the faults the suite looks for start at 1e-6, ten orders above. Where
a model cancels large terms (a normalisation of two features, a bias before a softmax), rounding is more than that, so
before anything is blamed the noise of this very gradient is measured: the same gradient in float32 is off by
u32 times what cancels inside it, and float64 by u64 times the same.

In lower precisions a gradient is judged against the float64 one, with what rounding did to the contributions (measured,
micro-batch by micro-batch) plus the deterministic bound of recursive summation, K unit roundoffs of the sum of their
sizes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcheck_suite.numerics.compare import Layout, Vector

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
QUICK = 256.0
"""Unit roundoffs of the window's largest entry that the cheap float64 bound allows."""
MARGIN = 8.0
"""Times the measured noise: one draw of the rounding errors stands for all of them."""


def quick_bound(expected: Vector, terms: int) -> Vector:
    """Return the float64 bound that needs no further measurement.

    Args:
        expected: (P,), the window's gradient.
        terms: micro-batches added up.
    """
    finite = np.abs(expected[np.isfinite(expected)])
    largest = float(finite.max(initial=0.0))
    return np.full(expected.shape, (QUICK + terms) * UNIT_ROUNDOFF["float64"] * largest)


def measured_bound(expected: Vector, in_float32: Sequence[Vector], terms: int, layout: Layout) -> Vector:
    """Return the float64 bound from the noise that float32 shows on the same gradient.

    Args:
        expected: (P,), the window's gradient in float64.
        in_float32: the same gradient, (P,), computed in float32 at values that differ in their last bits: one draw
            of the rounding errors may be small by chance.
        terms: micro-batches added up.
        layout: of both vectors.
    """
    noise = layout.spread(np.max([_distance(draw, expected) for draw in in_float32], axis=0))
    noise = np.maximum(noise, noise.max(initial=0.0) / MARGIN)
    scale = UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]
    return quick_bound(expected, terms) + MARGIN * (1 + terms) * scale * noise


def summation_bound(sizes: Vector, items: int, layout: Layout) -> Vector:
    """Return how far float64 sums of the same items' parts, in any order and grouping, may lie apart.

    Where the parts cancel, to exactly 0 at times, the gradient itself says nothing about this.

    Args:
        sizes: (P,), the sum over items of the absolute value of each one's part.
        items: how many there are.
        layout: of the vector.
    """
    return 2 * (items + 3) * UNIT_ROUNDOFF["float64"] * layout.spread(_finite(sizes))


def low_precision_bound(
    expected: Vector,
    large_batch: Vector,
    contributions: Sequence[tuple[Vector, Vector]],
    layout: Layout,
    dtype: str,
) -> Vector:
    """Return the bound for a gradient accumulated in `dtype` against the float64 one.

    Args:
        expected: (P,), the window's gradient in float64.
        large_batch: (P,), the large-batch gradient computed in `dtype`.
        contributions: for each micro-batch its part of the window's gradient, in `dtype` and in float64.
        layout: of all the vectors.
        dtype: of parameters and accumulators.
    """
    unit, terms = UNIT_ROUNDOFF[dtype], len(contributions)
    rounding = _distance(large_batch, expected)
    own = sum((_distance(low, high) for low, high in contributions), np.zeros_like(expected))
    noise = layout.spread(np.maximum(rounding, own))
    sizes = sum((np.maximum(np.abs(low), np.abs(high)) for low, high in contributions), np.zeros_like(expected))
    largest = float(_finite(sizes).max(initial=0.0))
    summation = (terms + 3) * unit * (_finite(sizes) + layout.spread(_finite(sizes)))
    return MARGIN * noise + summation + unit * unit * largest + (terms + 3) * SMALLEST[dtype]


def _distance(a: Vector, b: Vector) -> Vector:
    """Return |a - b| where it is finite, else 0: two infinities leave no noise to measure."""
    with np.errstate(invalid="ignore"):
        return _finite(np.abs(a - b))


def _finite(vector: Vector) -> Vector:
    return np.where(np.isfinite(vector), vector, 0.0)
