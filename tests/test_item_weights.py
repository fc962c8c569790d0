"""The weights of a mean, read from its losses: what was put in comes out, and no other objective is taken for one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite.item_weights import proportion, weights_of_items

LOSSES = (0.3, 2.0, 1.1, 0.7)


def weighted(weights, losses=LOSSES):
    return lambda batch: sum(weights[i] * losses[i] for i in batch) / sum(weights[i] for i in batch)


@given(st.lists(st.integers(1, 500), min_size=4, max_size=4).filter(lambda w: len({*w}) > 1))
@settings(deadline=None)
def test_the_weights_that_were_put_in_come_out(weights):
    found = weights_of_items(weighted(weights), 4)
    assert found == pytest.approx([w / weights[0] for w in weights], rel=1e-6)


def test_a_mean_in_which_all_weigh_the_same_is_not_unequal():
    assert weights_of_items(weighted((2, 2, 2, 2)), 4) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch: sum(LOSSES[i] for i in batch),
        lambda batch: (sum(LOSSES[i] for i in batch) / len(batch)) ** 2,
        lambda batch: sum(LOSSES[i] for i in batch) / len(batch) * sum(i + 1 for i in batch) / len(batch),
        lambda batch: max(LOSSES[i] for i in batch),
        lambda batch: math.log(sum(math.exp(LOSSES[i]) for i in batch)),
        lambda batch: 1.0,
    ],
    ids=["sum", "squared mean", "product of means", "maximum", "logsumexp", "constant"],
)
def test_what_is_no_weighted_mean_is_not_taken_for_one(loss):
    assert weights_of_items(loss, 4) is None


def test_a_loss_that_is_off_for_one_batch_is_no_mean():
    right = weighted((5, 3, 4, 1))
    assert weights_of_items(right, 4) is not None
    assert weights_of_items(lambda batch: right(batch) + 1e-3 * (len(batch) == 4), 4) is None


@pytest.mark.parametrize(
    ("weights", "shown"),
    [((1.0, 0.6, 0.6, 0.8), "5 : 3 : 3 : 4"), ((1.0, 2.0), "1 : 2"), ((1.0, math.pi / 3), "1 : 1.05")],
)
def test_weights_are_shown_in_whole_numbers_where_small_ones_fit(weights, shown):
    assert proportion(weights) == shown
