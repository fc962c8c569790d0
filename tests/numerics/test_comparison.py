"""Comparing vectors: where the worst element is, what counts as equal, how elements are named."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from gradcheck_suite.numerics.comparison import Comparison, Difference, Layout, elementwise_error, worst_difference

LAYOUT = Layout(("0.weight", "0.bias", "1.scale", "2.empty"), ((2, 3), (2,), (), (0,)))


def test_sizes_and_offsets():
    assert LAYOUT.sizes == [6, 2, 1, 0]
    assert LAYOUT.offsets == [0, 6, 8, 9]


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (0, ("0.weight", (0, 0))),
        (5, ("0.weight", (1, 2))),
        (6, ("0.bias", (0,))),
        (7, ("0.bias", (1,))),
        (8, ("1.scale", ())),
    ],
)
def test_a_flat_index_has_a_place(index, place):
    assert LAYOUT.place(index) == place


def test_the_place_of_an_element_after_an_empty_parameter():
    layout = Layout(("empty", "weight"), ((0, 3), (2,)))
    assert layout.place(0) == ("weight", (0,))
    assert layout.place(1) == ("weight", (1,))


def test_the_place_of_an_element_after_an_odd_number_of_others():
    assert Layout(("weight", "bias"), ((3,), (2,))).place(4) == ("bias", (1,))


def test_a_part_has_its_parameters_shape():
    vector = np.arange(9.0)
    assert LAYOUT.part(vector, "0.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert LAYOUT.part(vector, "0.bias").tolist() == [6, 7]
    assert LAYOUT.part(vector, "1.scale").tolist() == 8
    assert LAYOUT.part(vector, "2.empty").shape == (0,)


def test_spread_takes_each_parameters_largest():
    vector = np.array([1.0, 5, 2, 0, 0, 0, 3, 4, 9])
    assert LAYOUT.spread(vector).tolist() == [5, 5, 5, 5, 5, 5, 4, 4, 9]
    assert Layout((), ()).spread(np.zeros(0)).shape == (0,)


def test_the_worst_element_is_the_one_furthest_beyond_what_is_allowed():
    expected = np.zeros(3)
    difference = worst_difference(np.array([1.0, 0.5, 0.01]), expected, np.array([2.0, 0.1, 0.02]))
    assert difference == Difference(index=1, error=0.5, allowed=0.1, count=1)
    assert difference.ratio == pytest.approx(5)


def test_an_error_of_exactly_what_is_allowed_is_allowed():
    difference = worst_difference(np.array([1.5]), np.array([1.0]), np.array([0.5]))
    assert difference.ratio == 1
    assert difference.count == 0
    beyond = worst_difference(np.array([np.nextafter(1.5, 2)]), np.array([1.0]), np.array([0.5]))
    assert beyond.ratio > 1
    assert beyond.count == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_the_same_special_value_at_the_same_place_differs_by_nothing(value):
    vector = np.array([1.0, value])
    assert worst_difference(vector, vector.copy(), np.zeros(2)).ratio == 0


def test_minus_zero_is_zero():
    assert worst_difference(np.array([-0.0]), np.array([0.0]), np.zeros(1)).ratio == 0


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (math.inf, -math.inf),
        (math.nan, math.inf),
        (math.inf, math.nan),
    ],
)
def test_nan_and_infinity_never_equal_anything_else(observed, expected):
    difference = worst_difference(np.array([0.0, observed]), np.array([0.0, expected]), np.full(2, 1e300))
    assert difference.index == 1
    assert difference.error == math.inf
    assert difference.ratio == math.inf
    assert difference.count == 1


def test_nothing_allowed_means_equal():
    assert worst_difference(np.array([5e-324]), np.array([0.0]), np.zeros(1)).ratio == math.inf
    assert worst_difference(np.array([2.0]), np.array([2.0]), np.zeros(1)).ratio == 0


def test_no_elements_differ_by_nothing():
    difference = worst_difference(np.zeros(0), np.zeros(0), np.zeros(0))
    assert difference == Difference(index=0, error=0.0, allowed=0.0, count=0)
    assert difference.ratio == 0


def test_equal_elements_are_never_the_worst():
    """Whether or not anything is allowed there, and however little the others differ."""
    for allowed in (0.0, 1.0):
        difference = worst_difference(np.array([3.0, 0.25]), np.array([3.0, 0.0]), np.array([allowed, 1.0]))
        assert difference == Difference(index=1, error=0.25, allowed=1.0, count=0)


def test_the_first_of_equals_is_the_worst_where_nothing_differs():
    assert worst_difference(np.ones(3), np.ones(3), np.zeros(3)) == Difference(0, 0.0, 0.0, 0)


def test_layouts_and_differences_are_frozen():
    with pytest.raises(FrozenInstanceError):
        LAYOUT.names = ()
    with pytest.raises(FrozenInstanceError):
        worst_difference(np.zeros(0), np.zeros(0), np.zeros(0)).count = 1


def test_the_error_of_numbers_that_are_not_finite():
    observed, expected = (
        np.array([np.inf, np.nan, np.nan, 1.0, np.inf]),
        np.array([np.inf, np.nan, 1.0, np.nan, -np.inf]),
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(elementwise_error(observed, expected), [0.0, 0.0, np.inf, np.inf, np.inf])


def test_a_comparison_keeps_its_evidence():
    def comparison():
        return Comparison(LAYOUT, np.zeros(9), np.arange(9.0), np.full(9, 2.0), frozenset({"0.bias"}))

    compared = comparison()
    assert (compared.ratio, compared.worst.index) == (4.0, 8)
    assert compared.worst is compared.worst, "computed once"
    assert compared.seen("0.bias") is None
    np.testing.assert_array_equal(compared.seen("0.weight"), [[0, 1, 2], [3, 4, 5]])
    assert compared != comparison(), "arrays have no truth value, so comparisons are told apart by identity"
    with pytest.raises(FrozenInstanceError):
        compared.allowed = np.ones(9)
