"""Plans of several ranks: what each rank gets, and that a plan of one rank is what it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from gradcheck_suite import Plan, UsageError
from gradcheck_suite.generation.plans import plans
from gradcheck_suite.records.description import describe_plan, split_text
from gradcheck_suite.schema.contract import BUSY_RANKS, EQUAL_MICRO_BATCHES, EVEN_RANKS, WHOLE_WINDOWS
from gradcheck_suite.schema.plan import plan_from_json


def test_a_window_has_the_micro_batches_of_all_ranks():
    plan = Plan((1, 2, 3, 4, 5), 2, ranks=(3, 2))
    assert plan.windows == ((0, 1, 2, 3), (4,))
    assert plan.owners == (0, 0, 1, 1, 0)
    assert (plan.of_rank(0), plan.of_rank(1)) == ((0, 1, 4), (2, 3))
    assert (plan.world_size, plan.steps, plan.has_short_window, plan.has_idle_rank) == (2, 2, True, True)
    assert split_text(plan) == "[1 2 / 3 4 | 5 / -]"
    assert describe_plan(plan)[0].endswith("; 1 epoch; 2 ranks, between which / stands")


def test_ranks_may_share_many_micro_batches():
    """Numbers beyond 256 are no longer one object each."""
    assert Plan((1,) * 300, 100, ranks=(200, 100)).steps == 2


def test_one_rank_is_the_plan_without_ranks():
    plan = Plan((1, 2), 1, ranks=(2,))
    assert plan == Plan((1, 2), 1)
    assert "ranks" not in plan.to_json()
    assert repr(plan) == "Plan(micro_batches=(1, 2), accumulation_steps=1, epochs=1, masked=())"


def test_select_keeps_micro_batches_at_their_ranks():
    plan = Plan((1, 2, 3, 4, 5), 2, masked=(3,), ranks=(3, 2))
    assert plan.select((0, 3, 4)) == Plan((1, 5, 4), 2, masked=(2,), ranks=(2, 1))
    assert plan.select((2, 3)) == Plan((3, 4), 2, masked=(1,))


def test_select_finds_the_ranks_of_many():
    assert Plan((1,) * 300, 1, ranks=(1,) * 300).select((0, 299)) == Plan((1, 1), 1, ranks=(1, 1))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (3, 0), (2, True), (4, -1)])
def test_ranks_must_share_all_micro_batches(ranks):
    with pytest.raises(UsageError, match="ranks must be positive integers that add up to the 3 micro-batches"):
        Plan((1, 1, 1), 2, ranks=ranks)


@given(plans(ranks=4, maskable=True))
def test_every_micro_batch_is_in_one_window_of_one_rank(plan):
    assert 2 <= plan.world_size <= 4
    assert [j for window in plan.windows for j in window] == list(range(len(plan.micro_batches)))
    for rank, count in enumerate(plan.ranks):
        own = plan.of_rank(rank)
        assert len(own) == count
        assert sorted(own) == list(own)
        k = plan.accumulation_steps
        assert [j for w in plan.windows for j in w if plan.owners[j] == rank] == list(own)
        assert all(
            [j for j in w if plan.owners[j] == rank] == list(own[i * k : (i + 1) * k])
            for i, w in enumerate(plan.windows)
        )
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert eval(repr(plan)) == plan


@given(plans(ranks=3, assumes=(BUSY_RANKS,)), plans(ranks=3, assumes=(EVEN_RANKS, EQUAL_MICRO_BATCHES)))
def test_plans_are_within_what_a_loop_assumes_of_ranks(busy, even):
    assert not busy.has_idle_rank
    assert len(set(even.ranks)) == 1
    assert all(len({even.micro_batches[j] for j in window}) == 1 for window in even.windows)


@given(plans(ranks=2, assumes=(WHOLE_WINDOWS,)))
def test_whole_windows_are_whole_on_every_rank(plan):
    assert not plan.has_short_window
