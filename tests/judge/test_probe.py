"""Which probes show an item's weight, what a right weight is there, and how weights are listed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradcheck_suite import Plan
from gradcheck_suite.core.case import PARAMETER, probe_case
from gradcheck_suite.core.contract import EQUAL_BATCHES, EQUAL_MICRO_BATCHES, ONE_EPOCH, WHOLE_WINDOWS
from gradcheck_suite.core.results import Weight
from gradcheck_suite.judge.probe import (
    WeightProbe,
    expected_gradients,
    flat_on_probe,
    gradients_of_steps,
    item_weights,
    ranges_text,
    separating_probe,
)
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.runner import run_loop

PLAN = Plan((1, 3, 2), 2)
"""Items 0 to 3 in window 0, and items 4 and 5 in window 1."""


def test_the_expected_gradient_is_the_weight_times_the_slope_and_nothing_where_the_weight_is_none():
    case = probe_case(PLAN, "mean", slopes="4.0 inf nan -8.0 2.0 inf")
    first, second = expected_gradients(case)
    np.testing.assert_array_equal(first, [1.0, math.inf, math.nan, -2.0, 0.0, 0.0])
    np.testing.assert_array_equal(second, [0.0, 0.0, 0.0, 0.0, 1.0, math.inf])
    (summed,) = expected_gradients(probe_case(Plan((1, 2), 2), "sum", slopes="4.0 3.0 2.0"))
    assert summed.tolist() == [4.0, 3.0, 2.0]


def test_a_row_for_each_micro_batch_has_its_count_and_its_right_and_observed_weight():
    rows = item_weights(WeightProbe(PLAN, "mean"), np.array([0.5, 0.25, 0.0]), 0)
    assert rows == (
        Weight(micro_batches="0", count=1.0, expected=0.25, observed=0.5),
        Weight(micro_batches="1", count=3.0, expected=0.25, observed=0.25),
        Weight(micro_batches="2", count=2.0, expected=0.0, observed=0.0),
    )
    rows = item_weights(WeightProbe(Plan((1, 3, 2), 1, ranks=(2, 1)), "sum"), np.array([1.0, 2.0, 3.0]), 0)
    assert [row.rank for row in rows] == [0, 1, 0]  # in turn


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


def test_runs_of_numbers_are_written_by_their_ends():
    assert ranges_text([]) == ""
    assert ranges_text([3]) == "3"
    assert ranges_text([0, 1]) == "0-1"
    assert ranges_text([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert ranges_text([300, 301, 303]) == "300-301, 303"  # no longer one object each


def test_a_gradient_that_is_none_weighs_nothing():
    def forgets(run):
        MODES["set_to_none"](run)
        run.optimizer.zero_grad()
        run.optimizer.step()

    steps = gradients_of_steps(run_loop(forgets, WeightProbe(PLAN, "mean", dtype="float32").instance()))
    assert steps[0].tolist() == [0.25] * 4 + [0] * 2
    assert steps[2].tolist() == [0] * 6
    assert {step.dtype for step in steps} == {np.dtype("float64")}
    assert flat_on_probe({PARAMETER: None}, torch.zeros(2)).tolist() == [0, 0]
    assert flat_on_probe({PARAMETER: torch.ones(2)}, torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("assumes", "sizes", "short", "epochs"),
    [
        ((), (2, 2, 1, 2), True, 2),
        ((WHOLE_WINDOWS, ONE_EPOCH), (2, 2, 1), False, 1),
        ((EQUAL_MICRO_BATCHES,), (1, 1, 1, 1), True, 2),
        ((EQUAL_BATCHES,), (1, 1, 1, 1), True, 2),
    ],
)
def test_the_probe_that_separates_keeps_to_what_a_loop_assumes(assumes, sizes, short, epochs):
    """`sizes`: the fewest sizes of micro-batches that each of its windows has."""
    plan = separating_probe(WeightProbe(PLAN, "mean"), assumes).plan
    found = [{plan.micro_batches[j] for j in window} for window in plan.windows]
    assert len(found) == len(sizes)
    assert all(len(own) >= least for own, least in zip(found, sizes, strict=True))
    assert all(len(own) == 1 for own in found) == (sizes == (1, 1, 1, 1))
    assert (len(set().union(*found)) == 1) == (EQUAL_BATCHES in assumes)
    assert (len({len(window) for window in plan.windows}) > 1) == short
    assert plan.epochs == epochs
