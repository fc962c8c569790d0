"""How far rounding alone may move a gradient, element by element.

A window's gradient is a sum of K contributions c_j, one per micro-batch, computed and added up in some precision with
unit roundoff u. A sound loop's result is then at most

    |acc - g64| <= rounding + growth(K + 4, u) * sum_j |c_j| + student_factor(D) * noise + underflow

away from the float64 gradient. `rounding` is what the precision does to this very gradient at these very values: the
large batch and the sum of the contributions, computed in it, against float64. Adding contributions up in any order
multiplies each by K - 1 factors (1 + d), |d| <= u, and there are a few more (`FURTHER_ROUNDINGS`): `growth` bounds
their product. A loop that scales its losses in another way rounds otherwise inside the backward pass: `noise` is what
such roundings come to here, measured on D draws of them. `underflow` is the spacing of the smallest numbers, about
which relative errors say nothing.

In float64 the same holds, with a resolution below which nothing is looked for (`QUICK`), and with `summation_bound` in
place of `growth`, which tells apart the items of a micro-batch too.

No constant here was fitted to make tests pass: each has its derivation beside it, and `gradcheck-suite calibrate`
counts what false alarms they leave and how small a fault they show.

Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 4.2; N. J. Higham and
T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019), theorem 2.4;
D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997), for measuring rounding by drawing it.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from gradcheck_suite.numerics.comparison import Layout, Vector

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}

FALSE_ALARM = 1e-9
"""The probability that one element of a sound gradient exceeds a bound that rests on chance. A campaign of 100,000
checks compares about 1e7 elements: this leaves 0.01 expected alarms, and none where the deterministic part suffices."""

DRAWS = 16
"""Draws of the rounding errors. The factor that makes up for their small number is 32 for 8 draws, 12.6 for 16, 8.5
for 32 and 6.1 for infinitely many: from 16 to 32 the bound falls by a third and the time doubles."""

FURTHER_ROUNDINGS = 5
"""Roundings that meet a contribution beside the K - 1 additions: count over total, times the loss, cast to the dtype of
the backward pass, the contribution itself as it is stored, and a division or a cast of the sum at the end."""

QUICK = 256.0
"""Unit roundoffs of the window's largest entry below which nothing is looked for in float64. No false alarm rests on
it, since what exceeds it is measured. It is a choice of resolution, 2**-45 or 3e-14 of the largest entry: faults start
at 1e-6 (one item in a million), and the few roundings of a sum of a hundred items stay below, so that few windows
need the measurement."""


def growth(factors: int, dtype: str) -> float:
    """Return g such that a product of `factors` terms (1 + d), |d| <= u, lies within 1 +- g.

    Deterministic, (1 + u)**n - 1. For float64 and float32 also the probabilistic exp(l * sqrt(n) * u + n * u**2 /
    (1 - u)) - 1 of Higham and Mary, whose probability of failure is 2 * exp(-(l * (1 - u))**2 / 2): l = 6.54 for
    `FALSE_ALARM`, so that it is the smaller one from 43 factors on. It takes the errors to be independent and of mean
    zero. A bfloat16 or float16 sum stagnates (256 + 1 = 256, time after time): its errors have all one sign, and only
    the deterministic bound holds.
    """
    unit = UNIT_ROUNDOFF[dtype]
    sure = math.expm1(factors * math.log1p(unit))
    if dtype not in ("float64", "float32"):
        return sure
    spread = math.sqrt(2 * math.log(2 / FALSE_ALARM)) / (1 - unit)
    return min(sure, math.expm1(spread * math.sqrt(factors) * unit + factors * unit**2 / (1 - unit)))


def student_tail(value: float, draws: int) -> float:
    """Return the probability that |t| of Student's distribution with `draws` degrees of freedom, even, is larger.

    Source: Abramowitz and Stegun, 26.7.4.
    """
    assert draws % 2 == 0
    angle = math.atan2(value, math.sqrt(draws))
    term = total = 1.0
    for k in range(2, draws, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return 1 - math.sin(angle) * total


@cache
def student_factor(draws: int = DRAWS) -> float:
    """Return how many times the root mean square of some draws another draw may be, but with `FALSE_ALARM`.

    An element's error is a sum of many small and independent roundings, so about normal, of unknown size. A normal
    variable over the root mean square of D others of its kind has Student's distribution with D degrees of freedom.
    """
    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, draws) > FALSE_ALARM else (low, middle)
    return high


def quick_bound(expected: Vector, terms: int) -> Vector:
    """Return the float64 bound that needs no measurement: a resolution, and the additions of the micro-batches.

    Args:
        expected: (P,), the window's gradient.
        terms: micro-batches added up.
    """
    finite = np.abs(expected[np.isfinite(expected)])
    largest = float(finite.max(initial=0.0))
    return np.full(expected.shape, (QUICK + terms) * UNIT_ROUNDOFF["float64"] * largest)


def summation_bound(sizes: Vector, items: int, layout: Layout) -> Vector:
    """Return how far float64 sums of the same items' parts, in any order and grouping, may lie apart.

    Two sums, each within `growth` of the exact one. Where the parts cancel, to exactly 0 at times, the gradient itself
    says nothing about this, and the sizes do.

    Args:
        sizes: (P,), the sum over items of the absolute value of each one's part.
        items: how many there are.
        layout: of the vector; a parameter's elements share the bound of its largest.
    """
    return 2 * growth(items - 1 + FURTHER_ROUNDINGS, "float64") * layout.spread(_finite(sizes))


def noise_bound(mean_square: Vector, draws: int = DRAWS) -> Vector:
    """Return how far the roundings of yet another draw may take a gradient.

    Args:
        mean_square: (P,), the mean over draws of the squared deviations.
        draws: how many.
    """
    return student_factor(draws) * np.sqrt(_finite(mean_square))


def accumulation_bound(sizes: Vector, terms: int, dtype: str) -> Vector:
    """Return what scaling contributions and adding them up in `dtype` may do, in any order.

    Args:
        sizes: (P,), the sum over micro-batches of the absolute value of each one's contribution.
        terms: how many micro-batches.
        dtype: the coarsest in which contributions are computed or added up.
    """
    roundings = terms - 1 + FURTHER_ROUNDINGS
    return growth(roundings, dtype) * _finite(sizes) + roundings * SMALLEST[dtype]


def farthest(expected: Vector, computed: list[Vector]) -> Vector:
    """Return the largest distance, element by element, of some computations of a gradient from the float64 one.

    Args:
        expected: (P,), in float64.
        computed: the same gradient, computed otherwise.
    """
    return np.max([distance(other, expected) for other in computed], axis=0)


def distance(a: Vector, b: Vector) -> Vector:
    """Return |a - b| where it is finite, else 0: two infinities leave no noise to measure."""
    with np.errstate(invalid="ignore"):
        return _finite(np.abs(a - b))


def _finite(vector: Vector) -> Vector:
    return np.where(np.isfinite(vector), vector, 0.0)
