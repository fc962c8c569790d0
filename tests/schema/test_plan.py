"""Plans: how micro-batches make windows, and which plans are none."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given

from gradcheck_suite import Plan, UsageError
from gradcheck_suite.generation.plans import plans
from gradcheck_suite.schema.plan import plan_from_json


def test_windows_are_consecutive_and_the_last_may_be_short():
    plan = Plan((1, 2, 3, 4, 5), 2, 3)
    assert plan.windows == ((0, 1), (2, 3), (4,))
    assert plan.starts == (0, 1, 3, 6, 10)
    assert [list(plan.items(j)) for j in (0, 1, 4)] == [[0], [1, 2], [10, 11, 12, 13, 14]]
    assert [plan.window_items(w) for w in range(3)] == [range(3), range(3, 10), range(10, 15)]
    assert plan.total_items == 15
    assert plan.steps == 9
    assert plan.has_short_window


def test_an_epoch_shorter_than_the_accumulation_steps_is_one_short_window():
    plan = Plan((2, 1), 5)
    assert plan.windows == ((0, 1),)
    assert plan.steps == 1
    assert plan.has_short_window


def test_whole_windows():
    assert not Plan((1,) * 300, 300).has_short_window
    assert not Plan((1, 1, 1, 1), 2).has_short_window
    assert not Plan((1, 1, 1), 1).has_short_window


@pytest.mark.parametrize(
    ("plan", "limit"), [(Plan((1,), 1), 10), (Plan((1, 2, 1), 2, 2), 20), (Plan((1,) * 5, 3, 4), 48)]
)
def test_a_loop_may_step_twice_for_each_micro_batch_and_eight_times_more(plan, limit):
    assert plan.step_limit == limit


def test_masked_indices_are_sorted_and_told_once():
    assert Plan((1, 1, 1), 3, masked=(2, 0, 2)).masked == (0, 2)


def test_plans_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan((1,), 1).epochs = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1), "micro_batches must be positive integers, at least one, got ()"),
        (((1, 0), 1), "micro_batches must be positive integers, at least one, got (1, 0)"),
        (((1, True), 1), "micro_batches must be positive integers"),
        (((1, 2.0), 1), "micro_batches must be positive integers"),
        (((1,), 0), "accumulation_steps must be a positive integer, got 0"),
        (((1,), True), "accumulation_steps must be a positive integer, got True"),
        (((1,), 1, 0), "epochs must be a positive integer, got 0"),
        (((1,), 1, "2"), "epochs must be a positive integer, got '2'"),
        (((1, 1), 2, 1, (2,)), "masked must be indices of micro-batches below 2, got (2,)"),
        (((1, 1), 2, 1, (5,)), "masked must be indices of micro-batches below 2, got (5,)"),
        (((1, 1), 2, 1, (-1,)), "masked must be indices of micro-batches below 2, got (-1,)"),
        (((1, 1, 1), 2, 1, (2,)), "window 1 has no valid targets: all its micro-batches (2,) are masked"),
    ],
)
def test_a_bad_plan_is_refused(arguments, message):
    with pytest.raises(UsageError) as error:
        Plan(*arguments)
    assert message in str(error.value)


def test_a_window_is_masked_whatever_else_is():
    with pytest.raises(UsageError, match=r"window 0 has no valid targets: all its micro-batches \(0, 1\) are masked"):
        Plan((1, 1, 1, 1), 2, masked=(0, 1, 2))


def test_selected_micro_batches_keep_their_masks_and_all_other_fields():
    plan = Plan((1, 2, 3, 4), 2, 3, masked=(1, 2))
    assert plan.select((3, 1)) == Plan((4, 2), 2, 3, masked=(1,))


@given(plans(maskable=True))
def test_json_and_repr_give_the_plan_back(plan):
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert eval(repr(plan)) == plan


def test_json_without_epochs_and_masks_is_one_epoch_without_masks():
    assert plan_from_json({"micro_batches": [2, 1], "accumulation_steps": 2}) == Plan((2, 1), 2, 1, ())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "plan: expected an object, got None"),
        ({"micro_batches": [1]}, "plan: missing ['accumulation_steps'], unknown []"),
        ({"micro_batches": [1], "accumulation_steps": 1, "epoch": 2}, "plan: missing [], unknown ['epoch']"),
        ({"micro_batches": 3, "accumulation_steps": 1}, "plan: micro_batches must be a list, got 3"),
        ({"micro_batches": [1], "accumulation_steps": 1, "masked": 0}, "plan: masked must be a list, got 0"),
        ({"micro_batches": ["1"], "accumulation_steps": 1}, "micro_batches must be positive integers"),
    ],
)
def test_bad_json_is_refused(data, message):
    with pytest.raises(UsageError) as error:
        plan_from_json(data)
    assert message in str(error.value)
