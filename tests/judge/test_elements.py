"""What a wrong gradient's own elements say: vectors written down, and the fault that they have by construction."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.core.comparison import Comparison, Layout
from gradcheck_suite.judge.elements import diagnose_elements, place_of_the_fault

ALLOWED = 2.0**-30


def _compared(*pairs):
    """Return the comparison of parameters `a`, `b`, ..., each given as (expected, observed)."""
    expected, observed = ([np.array(side, dtype=float) for side in sides] for sides in zip(*pairs, strict=True))
    layout = Layout(tuple("abcdefgh"[: len(pairs)]), tuple(part.shape for part in expected))
    flat = [np.concatenate([part.reshape(-1) for part in side]) for side in (expected, observed)]
    return Comparison(layout, *flat, np.full(len(flat[0]), ALLOWED))


@pytest.mark.parametrize(("corner", "where"), [(0.0, "in columns 1"), (2.0, "at [(1, 1), (2, 1)]")])
def test_a_column_is_wrong_though_an_element_of_it_is_0_either_way(corner, where):
    found = diagnose_elements(_compared(([[1, corner], [3, 2], [4, 5]], [[1, corner], [3, 7], [4, 9]])), {})
    assert found.name == "partial-gradient"
    assert f"2 of the 6 elements of a are wrong, {where}, and are other values" in found.sentence


@pytest.mark.parametrize(("apart", "said"), [(0.0, "1.00001 times what"), (1e-7, "other values than")])
def test_factors_near_1_are_one_where_what_they_differ_from_1_by_is(apart, said):
    factors = np.array([1, 1, 1 + 1e-5, 1 + 1e-5 + apart])
    expected = np.array([3.0, 5.0, 4.0, 8.0])
    assert f"are {said} they should be" in diagnose_elements(_compared((expected, factors * expected)), {}).sentence


@pytest.mark.parametrize(
    ("wrong", "said"), [(3, "elements); d, e are right"), (5, "elements) and 2 more; no parameter")]
)
def test_long_lists_of_wrong_parameters_are_counted(wrong, said):
    pairs = [(np.array([1.0, 2.0]), np.array([1.0, 3.0 if i < wrong else 2.0])) for i in range(5)]
    place = place_of_the_fault(_compared(*pairs))
    assert place.startswith("wrong in a (1 of 2 elements), b (1 of 2 elements), c (1 of 2 ")
    assert said in place


def test_long_lists_of_faults_are_counted():
    """Each of five parameters has another element twice as large."""
    pairs = [(np.arange(1.0, 7.0), np.arange(1.0, 7.0) * (1 + (np.arange(6) == i))) for i in range(5)]
    found = diagnose_elements(_compared(*pairs), {})
    assert found.name == "partial-gradient"
    assert "at [(2,)]" in found.sentence
    assert found.sentence.endswith("; and 2 more")


def test_small_gradients_may_be_quantised_too():
    expected = np.array([0.9, -0.31, 0.07, 0.55, -0.42])
    found = diagnose_elements(_compared((expected, np.round(127 * expected / 0.9) * 0.9 / 127)), {})
    assert found.name == "low-precision"
    assert "multiples of 1/127 of the largest" in found.sentence


def test_of_a_single_element_a_lost_mean_leaves_what_rounding_does():
    matrix = np.array([[3.0, -1.0], [5.0, 9.0]])
    found = diagnose_elements(_compared((matrix, matrix - 4.0), ([2.0], [ALLOWED / 2])), {})
    assert found.name == "projected-gradient"
    assert (
        "in b, the mean of all its elements has been subtracted from it, and nothing else is wrong, which leaves 0"
        in (found.sentence)
    )
