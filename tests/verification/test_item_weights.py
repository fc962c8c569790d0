"""The weights of a mean, read from its losses: what was put in comes out, and no other objective is taken for one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite.verification.item_weights import TOLERANCE, proportion, weights_of_items

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


def test_a_loss_that_is_off_for_one_pair_is_no_mean():
    right = weighted((5, 3, 4, 1))
    assert weights_of_items(lambda batch: right(batch) + 1e-3 * (set(batch) == {1, 2}), 4) is None
    assert weights_of_items(lambda batch: right(batch) if len(batch) < 4 else math.nan, 4) is None


@pytest.mark.parametrize("weights", [(5, 3, 0), (5, 3, -4)])
def test_an_item_that_weighs_nothing_or_less_is_in_no_mean(weights):
    assert weights_of_items(weighted((5, 3, 4), LOSSES[:3]), 3) == pytest.approx([1, 0.6, 0.8])
    mean = weighted(weights, LOSSES[:3])
    assert weights_of_items(lambda batch: mean(batch) if len(batch) > 1 else LOSSES[batch[0]], 3) is None


def test_an_item_beside_which_the_first_is_lost_has_no_weight():
    """Losses of 4, 0 and 1: the first two together come to 4 times the first's share, here the tolerance itself."""
    for share, found in ((TOLERANCE, False), (1.01 * TOLERANCE, True)):
        mean = weighted((1, (1 - share) / share, 2), (4.0, 0.0, 1.0))
        weights = weights_of_items(lambda batch, m=mean, s=share: 4 * s if list(batch) == [0, 1] else m(batch), 3)
        assert (weights is not None) == found


def test_a_batch_may_be_off_by_the_tolerance():
    """Losses of 5, -3 and 1 weighed 1, 1 and 3: the last two together come to 0, and the largest is 5."""
    mean = weighted((1, 1, 3), (5.0, -3.0, 1.0))
    assert mean([1, 2]) == 0
    for off in (TOLERANCE * 5, -TOLERANCE * 5):
        assert weights_of_items(lambda batch, off=off: mean(batch) or off, 3) == [1, 1, 3]
        assert weights_of_items(lambda batch, off=off: mean(batch) or 1.01 * off, 3) is None


@pytest.mark.parametrize(("apart", "unequal"), [(0.9 * TOLERANCE, False), (1.1 * TOLERANCE, True)])
def test_weights_are_the_same_up_to_the_tolerance(apart, unequal):
    for weights in ((1, 1 + apart, 1), (1 + apart, 1, 1)):
        assert (weights_of_items(weighted(weights, (3.0, 1.0, 2.0)), 3) is not None) == unequal


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ((1.0, 0.6, 0.6, 0.8), "5 : 3 : 3 : 4"),
        ((1.0, 0.60001), "5 : 3"),
        ((1.0, 2.0), "1 : 2"),
        ((5.0, 3.0, 4.0), "5 : 3 : 4"),
        ((1.0, 1000.0), "1 : 1000"),
        ((1.0, 63 / 64), "64 : 63"),
        ((1.0, 64 / 65), "1 : 0.985"),
        ((1.0, math.pi / 3), "1 : 1.05"),
        ((2.0, 2 * math.pi / 3), "1 : 1.05"),
    ],
)
def test_weights_are_shown_in_whole_numbers_where_small_ones_fit(weights, shown):
    assert proportion(weights) == shown
