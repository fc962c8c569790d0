"""Comparing vectors: where the worst element is, what counts as equal, how elements are named."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite.core.comparison import (
    DRAWS,
    FEW_DRAWS,
    QUICK,
    Comparison,
    Difference,
    Layout,
    accumulation_bound,
    coarse_bound,
    likely_bound,
    noise_bound,
    quick_bound,
    summation_bound,
    worst_difference,
)

COMPARISON_LAYOUT = Layout(("0.weight", "0.bias", "1.scale", "2.empty"), ((2, 3), (2,), (), (0,)))


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
    assert COMPARISON_LAYOUT.place(index) == place


def test_the_place_of_an_element_after_an_empty_parameter():
    layout = Layout(("empty", "weight"), ((0, 3), (2,)))
    assert layout.place(0) == ("weight", (0,))
    assert layout.place(1) == ("weight", (1,))


def test_a_part_has_its_parameters_shape():
    vector = np.arange(9.0)
    assert COMPARISON_LAYOUT.part(vector, "0.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert COMPARISON_LAYOUT.part(vector, "0.bias").tolist() == [6, 7]
    assert COMPARISON_LAYOUT.part(vector, "1.scale").tolist() == 8
    assert COMPARISON_LAYOUT.part(vector, "2.empty").shape == (0,)


def test_spread_takes_each_parameters_largest():
    vector = np.array([1.0, 5, 2, 0, 0, 0, 3, 4, 9])
    assert COMPARISON_LAYOUT.spread(vector).tolist() == [5, 5, 5, 5, 5, 5, 4, 4, 9]
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
    vector = np.array([1.0, value, -0.0])
    assert worst_difference(vector, np.array([1.0, value, 0.0]), np.zeros(3)).ratio == 0


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
    difference = worst_difference(
        np.array([0.0, observed]), np.array([0.0, expected]), np.full(2, 1e300)
    )
    assert difference.index == 1
    assert difference.error == math.inf
    assert difference.ratio == math.inf
    assert difference.count == 1


def test_no_elements_differ_by_nothing():
    difference = worst_difference(np.zeros(0), np.zeros(0), np.zeros(0))
    assert difference == Difference(index=0, error=0.0, allowed=0.0, count=0)
    assert difference.ratio == 0


def test_equal_elements_are_never_the_worst():
    """Whether or not anything is allowed there, and however little the others differ."""
    for allowed in (0.0, 1.0):
        difference = worst_difference(
            np.array([3.0, 0.25]), np.array([3.0, 0.0]), np.array([allowed, 1.0])
        )
        assert difference == Difference(index=1, error=0.25, allowed=1.0, count=0)


def test_a_comparison_keeps_its_evidence():
    def comparison():
        return Comparison(
            COMPARISON_LAYOUT, np.zeros(9), np.arange(9.0), np.full(9, 2.0), frozenset({"0.bias"})
        )

    compared = comparison()
    assert (compared.ratio, compared.worst.index) == (4.0, 8)
    assert compared.worst is compared.worst, "computed once"
    assert compared.seen("0.bias") is None
    np.testing.assert_array_equal(compared.seen("0.weight"), [[0, 1, 2], [3, 4, 5]])
    assert compared != comparison(), (
        "arrays have no truth value, so comparisons are told apart by identity"
    )
    with pytest.raises(FrozenInstanceError):
        compared.allowed = np.ones(9)


# Bounds, from both sides: sound rounding never exceeds them, an error just above them does, and so
# does every fault.
#
# The sound side is real arithmetic in the dtype, on gradients made of known contributions; the
# other side plants errors.


ELEMENTS = 12
BOUNDS_LAYOUT = Layout(("weight", "bias"), ((2, 4), (4,)))
LOW = ("float32", "bfloat16", "float16")
seeds = st.integers(0, 2**32 - 1)
terms = st.integers(1, 24)


def _contributions(seed: int, count: int) -> np.ndarray:
    """Return (count, ELEMENTS): micro-batches' parts of a window's gradient, of sizes three decades
    apart.
    """
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, ELEMENTS)) * 10 ** rng.uniform(-3, 0, (count, 1)) / count


def _exact_sum(parts: np.ndarray) -> np.ndarray:
    return np.array([float(sum(map(Fraction, column))) for column in parts.T])


def _rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).to(torch.float64).numpy()


def _accumulated(parts: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return what `.grad` holds after adding the parts up in `dtype`, in order."""
    grad = torch.zeros(parts.shape[1], dtype=dtype)
    for part in parts:
        grad += torch.from_numpy(part).to(dtype)
    return grad.to(torch.float64).numpy()


def _ratio(observed, expected, bound) -> float:
    return worst_difference(observed, expected, bound).ratio


# The factors


def test_the_likely_bound_of_few_draws_is_smaller_than_that_of_many():
    """What lies within it needs no more draws: the bound of many draws would allow it as well."""
    rng = np.random.default_rng(0)
    seen = rng.standard_normal((DRAWS, 20_000))
    few, many = (
        likely_bound((seen[:FEW_DRAWS] ** 2).mean(axis=0)),
        noise_bound((seen**2).mean(axis=0)),
    )
    assert (few < many).mean() > 0.9
    # a further draw of the same size is seldom beyond it
    assert (np.abs(rng.standard_normal(20_000)) < few).mean() > 0.99


# float64


@given(seeds, terms)
def test_a_sound_float64_sum_is_within_the_quick_bound(seed, count):
    parts = _contributions(seed, count)
    expected = _exact_sum(parts)
    if np.abs(expected).max() < 1e-6 * np.abs(parts).max():
        return  # cancelled: the bound of summation is for those
    assert _ratio(_accumulated(parts, torch.float64), expected, quick_bound(expected, count)) <= 1


def test_the_quick_bound_is_far_below_any_fault():
    expected = np.linspace(-1, 1, ELEMENTS)
    assert quick_bound(expected, 24).max() <= (QUICK + 24) * 2**-53
    for fault in (1 + 1e-6, 1 - 1e-6, 1 + 2**-24):
        assert _ratio(fault * expected, expected, quick_bound(expected, 24)) > 1e3


@given(seeds, st.integers(2, 64))
def test_sums_in_any_order_are_within_the_bound_of_summation(seed, items):
    rng = np.random.default_rng(seed)
    parts = rng.choice([-1.0, 1.0], (items, ELEMENTS)) * rng.uniform(0.5, 2, (items, 1)) / items
    bound = summation_bound(np.abs(parts).sum(axis=0), items, BOUNDS_LAYOUT)
    first, other = (_accumulated(rng.permutation(parts), torch.float64) for _ in range(2))
    assert _ratio(other, first, bound) <= 1
    assert _ratio(first + 1.01 * bound + 2 * np.spacing(np.abs(first)), first, bound) > 1
    assert bound.max() <= 2 * (items + 4) * 2**-53 * 2


# Lower precisions


def _low(parts: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected gradient of parts, and the bound for `name` on adding them up."""
    return _exact_sum(parts), accumulation_bound(np.abs(parts).sum(axis=0), len(parts), name)


@pytest.mark.parametrize("name", LOW)
@given(seed=seeds, count=terms)
def test_a_sound_low_precision_sum_is_within_its_bound(name, seed, count):
    parts = _contributions(seed, count)
    expected, bound = _low(parts, name)
    for order in (parts, parts[::-1]):
        assert _ratio(_accumulated(order, getattr(torch, name)), expected, bound) <= 1


@pytest.mark.parametrize("name", LOW)
@given(seed=seeds, count=st.integers(2, 8))
def test_faults_of_ratios_of_small_integers_exceed_the_low_precision_bound(name, seed, count):
    """A dropped or doubled micro-batch among equals, and a factor of K, are seen in every dtype."""
    parts = np.random.default_rng(seed).uniform(0.5, 1, (count, ELEMENTS)) / count
    expected, bound = _low(parts, name)
    for fault in (parts[1:].sum(axis=0), parts.sum(axis=0) + parts[-1], parts.sum(axis=0) * 2):
        assert _ratio(fault, expected, bound) > 1


def test_a_stagnating_bfloat16_accumulator_is_within_its_bound():
    """256 + 1 is 256 in bfloat16: adding 1 to it 16 times leaves it, and that is rounding, not a
    fault.
    """
    parts = np.vstack([np.full((1, ELEMENTS), 256.0), np.ones((16, ELEMENTS))])
    expected, bound = _low(parts, "bfloat16")
    observed = _accumulated(parts, torch.bfloat16)
    assert observed.tolist() == [256.0] * ELEMENTS
    assert _ratio(observed, expected, bound) <= 1


def test_a_bfloat16_accumulator_of_float32_gradients_that_stagnates_is_a_fault():
    """The same sum where the run is in float32: an accumulator of lower precision has lost a
    sixteenth.
    """
    parts = np.vstack([np.full((1, ELEMENTS), 256.0), np.ones((16, ELEMENTS))])
    expected, bound = _low(parts, "float32")
    assert _ratio(_accumulated(parts, torch.bfloat16), expected, bound) > 1000
    assert _ratio(_accumulated(parts, torch.float32), expected, bound) <= 1


def test_underflow_is_within_the_float16_bound():
    parts = np.full((4, ELEMENTS), 2.0**-26)
    expected, bound = _low(parts, "float16")
    assert _accumulated(parts, torch.float16).max() == 0
    assert _ratio(np.zeros(ELEMENTS), expected, bound) <= 1


def test_bounds_are_finite_where_gradients_are_not():
    wild = np.array([1.0, np.nan] + [np.inf] * (ELEMENTS - 2))
    for bound in (
        summation_bound(wild, 3, BOUNDS_LAYOUT),
        noise_bound(wild),
        likely_bound(wild),
        accumulation_bound(wild, 2, "float32"),
        coarse_bound(wild, 2, "float32", BOUNDS_LAYOUT),
    ):
        assert np.isfinite(bound).all()
