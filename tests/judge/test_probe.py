"""Which probes show an item's weight, what a right weight is there, and how weights are listed."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite import Plan
from gradcheck_suite.judge.probe import (
    WeightProbe,
    item_weights,
)

PLAN = Plan((1, 3, 2), 2)
"""Items 0 to 3 in window 0, and items 4 and 5 in window 1."""


@pytest.mark.parametrize(("length", "rows"), [(12, 12), (13, 4)])
def test_of_a_long_plan_a_row_stands_for_a_run_of_equal_ones(length, rows):
    observed = np.full(length, 1 / 3)
    observed[1] += 1e-12  # nothing that is shown
    observed[4] = 0.5
    observed[-1] = 0.333334  # the last digit that is shown
    found = item_weights(WeightProbe(Plan((1,) * length, length), "sum"), observed, 0)
    assert len(found) == rows
    if rows == 4:
        assert [row.micro_batches for row in found] == ["0-3", "4", "5-11", "12"]
        assert [row.observed for row in found] == [1 / 3, 0.5, 1 / 3, 0.333334]
