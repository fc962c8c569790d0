"""Bounds, from both sides: sound rounding never exceeds them, an error just above them does, and so does every fault.

The sound side is real arithmetic in the dtype, on gradients made of known contributions; the other side plants errors.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite.numerics.bounds import (
    QUICK,
    UNIT_ROUNDOFF,
    low_precision_bound,
    measured_bound,
    quick_bound,
)
from gradcheck_suite.numerics.compare import Layout, worst_difference

ELEMENTS = 12
LAYOUT = Layout(("weight", "bias"), ((2, 4), (4,)))
LOW = ("float32", "bfloat16", "float16")
seeds = st.integers(0, 2**32 - 1)
terms = st.integers(1, 24)


def _contributions(seed: int, count: int) -> np.ndarray:
    """Return (count, ELEMENTS): micro-batches' parts of a window's gradient, of sizes three decades apart."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, ELEMENTS)) * 10 ** rng.uniform(-3, 0, (count, 1)) / count


def _exact_sum(parts: np.ndarray) -> np.ndarray:
    return np.array([float(sum(map(Fraction, column))) for column in parts.T])


def _accumulated(parts: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return what `.grad` holds after adding the parts up in `dtype`, in order."""
    grad = torch.zeros(ELEMENTS, dtype=dtype)
    for part in parts:
        grad += torch.from_numpy(part).to(dtype)
    return grad.to(torch.float64).numpy()


def _ratio(observed, expected, bound) -> float:
    return worst_difference(observed, expected, bound).ratio


def test_unit_roundoffs_are_half_of_eps():
    for name, unit in UNIT_ROUNDOFF.items():
        assert unit == torch.finfo(getattr(torch, name)).eps / 2


@given(seeds, terms)
def test_a_sound_float64_sum_is_within_the_quick_bound(seed, count):
    parts = _contributions(seed, count)
    expected = _exact_sum(parts)
    if np.abs(expected).max() < 1e-6 * np.abs(parts).max():
        return  # cancelled: the measured bound is for those
    assert _ratio(_accumulated(parts, torch.float64), expected, quick_bound(expected, count)) <= 1


@given(seeds, terms, st.integers(0, ELEMENTS - 1))
def test_an_error_just_above_the_quick_bound_exceeds_it(seed, count, where):
    expected = _exact_sum(_contributions(seed, count))
    bound = quick_bound(expected, count)
    observed = expected.copy()
    observed[where] += 1.01 * bound[where] + 2 * np.spacing(abs(expected[where]))
    difference = worst_difference(observed, expected, bound)
    assert difference.ratio > 1
    assert difference.index == where


def test_the_quick_bound_is_far_below_any_fault():
    expected = np.linspace(-1, 1, ELEMENTS)
    assert quick_bound(expected, 24).max() <= (QUICK + 24) * 2**-53
    for fault in (1 + 1e-6, 1 - 1e-6, 1 + 2**-24):
        assert _ratio(fault * expected, expected, quick_bound(expected, 24)) > 1e3


def test_the_quick_bound_ignores_what_is_not_finite():
    expected = np.array([1.0, np.inf, np.nan])
    assert quick_bound(expected, 1).tolist() == [257 * 2**-53] * 3
    assert quick_bound(np.array([np.nan]), 1).tolist() == [0.0]


def _cancelling(rng: np.random.Generator, dtype: type) -> np.ndarray:
    """Return a gradient in which terms of size 1e4 cancel to about 1, computed in `dtype`.

    (1 + a) - (1 + b), times 1e4 each: the same formula on the same numbers, whatever the precision.
    """
    a, b = (rng.uniform(0, 1e-4, ELEMENTS).astype(np.float32).astype(dtype) for _ in range(2))
    large = dtype(1e4)
    return ((large * (dtype(1) + a)) - (large * (dtype(1) + b))).astype(np.float64)


@given(seeds)
def test_measured_noise_covers_what_cancels(seed):
    def draw(dtype):
        return _cancelling(np.random.default_rng(seed), dtype)

    expected, observed = draw(np.longdouble), draw(np.float64)
    bound = measured_bound(expected, [draw(np.float32)], 1, LAYOUT)
    assert _ratio(observed, expected, bound) <= 1
    assert bound.max() < 1e-9


@given(seeds, terms)
def test_an_error_just_above_the_measured_bound_exceeds_it(seed, count):
    expected = _exact_sum(_contributions(seed, count))
    bound = measured_bound(expected, [expected.astype(np.float32).astype(np.float64)], count, LAYOUT)
    assert _ratio(expected + 1.01 * bound + 2 * np.spacing(np.abs(expected)), expected, bound) > 1
    assert _ratio(expected * (1 + 1e-6), expected, bound) > 1


def _low(parts: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected gradient of parts and the bound for `name`, its large batch being one rounded sum."""
    dtype = getattr(torch, name)

    def rounded(values):
        return torch.from_numpy(values).to(dtype).to(torch.float64).numpy()

    expected = _exact_sum(parts)
    bound = low_precision_bound(expected, rounded(expected), [(rounded(p), p) for p in parts], LAYOUT, name)
    return expected, bound


@pytest.mark.parametrize("name", LOW)
@given(seed=seeds, count=terms)
def test_a_sound_low_precision_sum_is_within_its_bound(name, seed, count):
    parts = _contributions(seed, count)
    expected, bound = _low(parts, name)
    assert _ratio(_accumulated(parts, getattr(torch, name)), expected, bound) <= 1


@pytest.mark.parametrize("name", LOW)
@given(seed=seeds, count=terms)
def test_an_error_just_above_the_low_precision_bound_exceeds_it(name, seed, count):
    expected, bound = _low(_contributions(seed, count), name)
    assert _ratio(expected + 1.01 * bound + 2 * np.spacing(np.abs(expected)), expected, bound) > 1


@pytest.mark.parametrize("name", LOW)
@given(seed=seeds, count=st.integers(2, 8))
def test_faults_of_ratios_of_small_integers_exceed_the_low_precision_bound(name, seed, count):
    """A dropped or doubled micro-batch among equals, and a factor of K, are seen in every dtype."""
    parts = np.random.default_rng(seed).uniform(0.5, 1, (count, ELEMENTS)) / count
    expected, bound = _low(parts, name)
    for fault in (parts[1:].sum(axis=0), parts.sum(axis=0) + parts[-1], parts.sum(axis=0) * 2):
        assert _ratio(fault, expected, bound) > 1


def test_a_stagnating_bfloat16_accumulator_is_within_its_bound():
    """256 + 1 is 256 in bfloat16: adding 1 to it 16 times leaves it, and that is rounding, not a fault."""
    parts = np.vstack([np.full((1, ELEMENTS), 256.0), np.ones((16, ELEMENTS))])
    expected, bound = _low(parts, "bfloat16")
    observed = _accumulated(parts, torch.bfloat16)
    assert observed.tolist() == [256.0] * ELEMENTS
    assert _ratio(observed, expected, bound) <= 1


def test_underflow_is_within_the_float16_bound():
    parts = np.full((4, ELEMENTS), 2.0**-26)
    expected, bound = _low(parts, "float16")
    assert _accumulated(parts, torch.float16).max() == 0
    assert _ratio(np.zeros(ELEMENTS), expected, bound) <= 1


def test_bounds_are_finite_where_gradients_are_not():
    expected = np.array([1.0, np.nan] + [np.inf] * (ELEMENTS - 2))
    assert np.isfinite(measured_bound(expected, [expected], 2, LAYOUT)).all()
    assert np.isfinite(low_precision_bound(expected, expected, [(expected, expected)], LAYOUT, "float32")).all()
