"""The bounds' formulas against exact arithmetic and published tables, by rationals and decimals.

No dtype is computed in here, so this needs numpy alone.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from gradcheck_suite.core.comparison import (
    FALSE_ALARM,
    SMALLEST,
    UNIT_ROUNDOFF,
    Layout,
    accumulation_bound,
    coarse_bound,
    growth,
    likely_bound,
    noise_bound,
    quick_bound,
    student_factor,
    summation_bound,
)

FORMATS = {
    "float64": (53, -1022),
    "float32": (24, -126),
    "bfloat16": (8, -126),
    "float16": (11, -14),
}
"""Digits of the significand and smallest exponent of a normal number (IEEE 754; bfloat16 has float32's exponents)."""


def _product(factors, dtype):
    """Return (1 + u)**n - 1, exactly."""
    return (1 + Fraction(1, 2 ** FORMATS[dtype][0])) ** factors - 1


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_dtypes_are_those_of_the_standard(dtype):
    digits, smallest = FORMATS[dtype]
    assert UNIT_ROUNDOFF[dtype] == Fraction(1, 2**digits)
    assert SMALLEST[dtype] == Fraction(1, 2 ** (digits - 1 - smallest))


# Products of roundings


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("factors", [1, 2, 5, 42])
def test_few_roundings_grow_by_the_exact_product(factors, dtype):
    assert growth(factors, dtype) == pytest.approx(
        float(_product(factors, dtype)), rel=1e-14, abs=0
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_roundings_of_a_sum_that_stagnates_do_too(dtype):
    assert growth(300, dtype) == pytest.approx(float(_product(300, dtype)), rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factors", [43, 1000, 10**10])
def test_many_random_roundings_grow_as_higham_and_mary_say(factors, dtype):
    """Theorem 2.4, with l such that the probability of failure, 2 exp(-(l (1 - u))**2 / 2), is one
    in 1e9.
    """
    with localcontext() as context:
        context.prec = 60
        unit = Decimal(2) ** -FORMATS[dtype][0]
        width = (2 * (Decimal(2) / Decimal(FALSE_ALARM)).ln()).sqrt() / (1 - unit)
        n = Decimal(factors)
        expected = (width * n.sqrt() * unit + n * unit**2 / (1 - unit)).exp() - 1
    assert growth(factors, dtype) == pytest.approx(float(expected), rel=1e-13, abs=0)
    # which is less than n u, and so less than (1 + u)**n - 1
    assert growth(factors, dtype) < factors * UNIT_ROUNDOFF[dtype]


# Student's distribution


def test_the_factor_leaves_the_tail_that_is_asked_for():
    # with q = 1 - p, the two-degree form t / sqrt(2 + t**2) = q has t**2 = 2 q**2 / (1 - q**2)
    q = 1 - Fraction(FALSE_ALARM)
    assert student_factor(2) == pytest.approx(math.sqrt(2 * q**2 / (1 - q**2)), rel=1e-6)
    # the integral of the density 12 (4 + t**2)**(-5/2) at four degrees
    t = student_factor(4)
    assert 1 - t * (t**2 + 6) / math.sqrt(4 + t**2) ** 3 == pytest.approx(
        FALSE_ALARM, rel=1e-4, abs=0
    )
    # at 16 degrees, by numerical integration of the density
    grid = student_factor(16) + np.linspace(0, 200, 40_001)
    density = math.gamma(8.5) / math.gamma(8) / math.sqrt(16 * math.pi) * (1 + grid**2 / 16) ** -8.5
    assert 2 * float(np.trapezoid(density, grid)) == pytest.approx(FALSE_ALARM, rel=1e-4, abs=0)


# The bounds


def test_the_quick_bound_is_a_multiple_of_the_largest_finite_entry():
    for terms in (1, 3):
        bound = quick_bound(np.array([0.5, -0.75, np.nan, np.inf]), terms)
        assert bound.tolist() == [(256 + terms) * 2.0**-53 * 0.75] * 4
    assert quick_bound(np.array([np.nan]), 1).tolist() == [0.0]
    assert quick_bound(np.zeros(0), 1).shape == (0,)


@pytest.mark.parametrize(("items", "roundings"), [(1, 5), (4, 8)])
def test_the_bound_of_summation_is_twice_that_of_a_parameters_largest_sum(items, roundings):
    layout = Layout(("weight", "bias"), ((2,), (1,)))
    bound = summation_bound(np.array([3.0, 7.0, np.nan]), items, layout)
    exact = float(2 * _product(roundings, "float64") * 7)
    assert bound == pytest.approx([exact, exact, 0.0], rel=1e-14, abs=0)


def test_the_bound_of_noise_is_students_factor_times_the_root_mean_square():
    mean_square = np.array([4.0, 0.0, np.inf, np.nan, 0.25])
    assert noise_bound(mean_square, 2) == pytest.approx(
        [2 * student_factor(2), 0, 0, 0, student_factor(2) / 2]
    )
    # 32 draws where nothing is said: 8.5, by the table in the module's text
    assert noise_bound(np.ones(1)) == pytest.approx([8.5], abs=0.05)


def test_the_likely_bound_is_the_normal_distributions():
    # erfc(x / sqrt(2)) is the probability beyond x on both sides
    (factor,) = likely_bound(np.ones(1))
    assert math.erfc(factor / math.sqrt(2)) == pytest.approx(FALSE_ALARM, rel=1e-9)
    assert likely_bound(np.array([4.0, np.nan])).tolist() == [2 * factor, 0.0]


def test_the_coarse_bound_is_that_of_a_parameters_largest_element():
    layout = Layout(("weight", "bias"), ((2,), (1,)))
    bound = coarse_bound(np.array([3.0, 7.0, np.nan]), 2, "bfloat16", layout)
    largest, none = accumulation_bound(np.array([7.0, 0.0]), 2, "bfloat16")
    assert bound.tolist() == [largest, largest, none]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("terms", "roundings"), [(1, 5), (2, 6), (3, 7)])
def test_the_bound_of_accumulation_has_a_relative_and_an_absolute_part(terms, roundings, dtype):
    digits, smallest = FORMATS[dtype]
    spacing = Fraction(1, 2 ** (digits - 1 - smallest))
    for size in (Fraction(0), Fraction(3), 2**10 * spacing):
        bound = accumulation_bound(np.array([float(size)]), terms, dtype)
        assert bound == pytest.approx(
            [float(_product(roundings, dtype) * size + roundings * spacing)], rel=1e-13, abs=0
        )
    assert accumulation_bound(np.array([np.inf]), terms, dtype).tolist() == [
        float(roundings * spacing)
    ]
