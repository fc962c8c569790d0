"""The other rules pass and fail where their definitions say."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from studies.tally import RIVALS, Compared


def _compared(observed, large_batch, exact=(1.0, 2.0), dtype="float32"):
    return Compared(*(np.array(v, dtype=float) for v in (observed, large_batch, exact)), dtype)


@pytest.mark.parametrize(
    ("rule", "within", "beyond"),
    [
        ("torch.testing.assert_close", 2 + 2 * 1.3e-6 + 0.9e-5, 2 + 2 * 1.3e-6 + 1.1e-5),
        ("chex.assert_trees_all_close", 2 + 1.9e-6, 2 + 2.1e-6),
        ("NNSmith 1e-2/1e-3", 2 + 0.0209, 2 + 0.0211),
    ],
)
def test_a_rule_of_tolerances_has_both_sides(rule, within, beyond):
    assert RIVALS[rule](_compared((1, within), (1, 2)))
    assert not RIVALS[rule](_compared((1, beyond), (1, 2)))


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        ("float64", 1e-7, 1e-7),
        ("float32", 1.3e-6, 1e-5),
        ("bfloat16", 0.016, 1e-5),
        ("float16", 1e-3, 1e-5),
    ],
)
def test_tolerances_go_with_the_dtype(dtype, rtol, atol):
    """As torch's documentation of `assert_close` lists them."""
    rule = RIVALS["torch.testing.assert_close"]
    for expected in (2.0, 0.0):
        tolerance = atol + rtol * expected
        assert rule(_compared((1, expected + 0.999 * tolerance), (1, expected), dtype=dtype))
        assert not rule(_compared((1, expected + 1.001 * tolerance), (1, expected), dtype=dtype))


def test_the_rule_of_twice_the_error_has_both_sides():
    # the large batch is off by 0.1 in one element
    assert RIVALS["twice the reference's rmse"](_compared((1.19, 2), (1.1, 2)))
    assert not RIVALS["twice the reference's rmse"](_compared((1.21, 2), (1.1, 2)))
    assert not RIVALS["twice the reference's rmse"](_compared((1.21, 2), (0.9, 2)))
    assert RIVALS["twice the reference's rmse"](_compared((0.81, 2), (1.1, 2)))
    assert not RIVALS["twice the reference's rmse"](_compared((0.79, 2), (0.9, 2)))
    assert RIVALS["twice the reference's rmse"](_compared((1, 2), (1, 2)))
    # the root of the mean square, not the mean: 0.1 in one of two against 0.15 in both, and against
    # 0.13
    assert not RIVALS["twice the reference's rmse"](_compared((1.15, 2.15), (1.1, 2)))
    assert RIVALS["twice the reference's rmse"](_compared((1.13, 2.13), (1.1, 2)))


@pytest.mark.parametrize("rule", RIVALS)
def test_nan_passes_nowhere(rule):
    assert not RIVALS[rule](_compared((1, np.nan), (1, 2.5)))


@pytest.mark.parametrize("rule", RIVALS)
def test_a_nan_equals_another_for_chex_alone(rule):
    """Torch takes `equal_nan=False`, NNSmith calls any NaN an error, and chex compares as numpy
    does.
    """
    compared = _compared((1, np.nan), (1, np.nan))
    assert RIVALS[rule](compared) == (rule == "chex.assert_trees_all_close")


def test_nothing_is_absolute_for_chex():
    assert not RIVALS["chex.assert_trees_all_close"](_compared((1, 1e-300), (1, 0)))


def test_what_is_compared_is_frozen():
    with pytest.raises(FrozenInstanceError):
        _compared((1, 2), (1, 2)).dtype = "float64"
