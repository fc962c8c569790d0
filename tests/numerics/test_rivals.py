"""The other rules pass and fail where their definitions say."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.numerics.rivals import RIVALS, Compared


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


def test_tolerances_go_with_the_dtype():
    assert not RIVALS["torch.testing.assert_close"](_compared((1, 2.01), (1, 2)))
    assert RIVALS["torch.testing.assert_close"](_compared((1, 2.01), (1, 2), dtype="bfloat16"))


def test_the_rule_of_twice_the_error_has_both_sides():
    # the large batch is off by 0.1 in one element
    assert RIVALS["twice the reference's rmse"](_compared((1.19, 2), (1.1, 2)))
    assert not RIVALS["twice the reference's rmse"](_compared((1.21, 2), (1.1, 2)))


@pytest.mark.parametrize("rule", RIVALS)
def test_nan_passes_nowhere(rule):
    assert not RIVALS[rule](_compared((1, np.nan), (1, 2.5)))
