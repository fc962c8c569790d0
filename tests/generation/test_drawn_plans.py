"""What holds of every plan that the strategy draws."""

from __future__ import annotations

import json

from hypothesis import given

from gradcheck_suite import Plan, plans
from gradcheck_suite.schema.plan import plan_from_json


@given(plans(maskable=True))
def test_windows_hold_every_item_once_in_order(plan):
    members = [j for window in plan.windows for j in window]
    assert members == list(range(len(plan.micro_batches)))
    items = [i for w in range(len(plan.windows)) for i in plan.window_items(w)]
    assert items == list(range(sum(plan.micro_batches)))
    assert all(len(window) == plan.accumulation_steps for window in plan.windows[:-1])


@given(plans(maskable=True))
def test_json_round_trip(plan):
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans(maskable=True))
def test_the_repr_is_the_constructor_call(plan):
    assert eval(repr(plan), {"Plan": Plan, "__builtins__": {}}) == plan
