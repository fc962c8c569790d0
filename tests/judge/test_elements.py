"""What a wrong gradient's own elements say: vectors written down, and the fault that they have by
construction.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.core.comparison import Comparison, Layout
from gradcheck_suite.judge.elements import diagnose_elements

ALLOWED = 2.0**-30


def _compared(*pairs):
    """Return the comparison of parameters `a`, `b`, ..., each given as (expected, observed)."""
    expected, observed = (
        [np.array(side, dtype=float) for side in sides] for sides in zip(*pairs, strict=True)
    )
    layout = Layout(tuple("abcdefgh"[: len(pairs)]), tuple(part.shape for part in expected))
    flat = [np.concatenate([part.reshape(-1) for part in side]) for side in (expected, observed)]
    return Comparison(layout, *flat, np.full(len(flat[0]), ALLOWED))


@pytest.mark.parametrize(("corner", "where"), [(0.0, "in columns 1"), (2.0, "at [(1, 1), (2, 1)]")])
def test_a_column_is_wrong_though_an_element_of_it_is_0_either_way(corner, where):
    found = diagnose_elements(
        _compared(([[1, corner], [3, 2], [4, 5]], [[1, corner], [3, 7], [4, 9]])), {}
    )
    assert found.name == "partial-gradient"
    assert f"2 of the 6 elements of a are wrong, {where}, and are other values" in found.sentence


@pytest.mark.parametrize(
    ("apart", "said"), [(0.0, "1.00001 times what"), (1e-7, "other values than")]
)
def test_factors_near_1_are_one_where_what_they_differ_from_1_by_is(apart, said):
    factors = np.array([1, 1, 1 + 1e-5, 1 + 1e-5 + apart])
    expected = np.array([3.0, 5.0, 4.0, 8.0])
    assert (
        f"are {said} they should be"
        in diagnose_elements(_compared((expected, factors * expected)), {}).sentence
    )


def test_of_a_single_element_a_lost_mean_leaves_what_rounding_does():
    matrix = np.array([[3.0, -1.0], [5.0, 9.0]])
    found = diagnose_elements(_compared((matrix, matrix - 4.0), ([2.0], [ALLOWED / 2])), {})
    assert found.name == "projected-gradient"
    assert (
        "in b, the mean of all its elements has been subtracted from it, and nothing else is wrong, which leaves 0"
        in (found.sentence)
    )
