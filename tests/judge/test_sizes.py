"""Gradients at several sizes of their loss, written down, and the fault that they have by construction."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.core.case import SMALL_SCALE
from gradcheck_suite.judge.sizes import Sizes, diagnose_sizes


@pytest.mark.parametrize(
    ("expected", "observed", "small", "name", "says"),
    [
        ([3, -4], [1, -1], [1, -1], "normalised", "(every element is 1, 0 or -1: only signs are left)"),
        ([3, 0, -4], [1, 0, -1], [1, 0, -1], "normalised", "(every element is 1, 0 or -1: only signs are left)"),
        ([2, -2], [1, -1], [1, -1], "normalised", "(every element is 1, 0 or -1)"),
        ([3, -4], [0.6, -0.8], [0.6, -0.8], "normalised", "(its norm is 1)"),
        # of a probe of many sizes, on which gradients of about 1 are right
        ([1e-9, 1e-9], [1e-9, 0], None, "skipped-by-size", "1 of 2 elements are 0, where 1e-09 is right"),
        ([1e-9, 1e-7], [0, 0], None, "skipped-by-size", "2 of 2 elements are 0, where 1e-09 to 1e-07 is right"),
        ([1, 1], [1, 0], None, None, ""),
    ],
)
def test_a_fault_of_sizes_has_its_name(expected, observed, small, name, says):
    """`small` is the gradient with a loss 2**-20 times as large; None where no run showed it."""
    rest = None if small is None else np.array(small, dtype=float)
    found = diagnose_sizes(Sizes(np.array(expected, dtype=float), np.array(observed, dtype=float), rest))
    assert (found and found.name) == name
    assert found is None or says in found.sentence


def test_decay_is_read_off_two_elements_and_is_a_round_factor_of_one():
    """0.25 times the parameters 1, -2 and 0, and 0.37123 times them, which one element alone does not show."""
    expected = np.array([3.0, 5.0, 7.0])
    for factor, shown, said in (
        (0.25, slice(0, 3), "0.25 times the parameter"),
        (0.37123, slice(0, 3), "0.371 times the parameter"),
        (0.25, slice(0, 1), "0.25 times the parameter"),
        (0.37123, slice(0, 1), "a term that does not depend on the loss"),
    ):
        right, parameters = expected[shown], np.array([1.0, -2.0, 0.0])[shown]
        small = SMALL_SCALE * right + factor * parameters
        found = diagnose_sizes(Sizes(right, right + factor * parameters, small, parameters=parameters))
        assert found.name == "added-term"
        assert said in found.sentence
