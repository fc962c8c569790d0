"""Communication of each window, counted and as the wrappers' algorithms predict it."""

from __future__ import annotations

import pytest

from gradcheck_suite.core.case import Case
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.ranks import PLAIN, Traffic, traffic_per_window, traffic_text
from gradcheck_suite.verification.verify import verify
from studies.traffic import traffic_rows
from tests.verification import rank_loops

pytestmark = pytest.mark.usefixtures("ranks")
GRADIENTS, WINDOW_LEFT, COUNT = 5 * 8, 8, 8
"""Bytes: of five float64 gradients; of the number of micro-batches; of the count."""


def per_window(loop):
    found = traffic_per_window(loop, lambda plan: generated_instance(Case(PLAIN, plan)), 2, 30.0)
    return [(traffic.collectives, traffic.bytes) for traffic in found]


@pytest.mark.full
def test_a_window_takes_what_the_law_of_its_wrapper_says():
    names = ["all_reduce/zero_", "ddp/zero_", "fsdp2/zero_"]
    rows = traffic_rows(names)
    assert [(row.loop, row.accumulation_steps) for row in rows] == [
        (name, k) for name in names for k in (1, 4)
    ]
    assert [row.observed for row in rows] == [row.predicted for row in rows]


@pytest.mark.full
def test_every_reset_mode_communicates_as_its_wrapper_does():
    rows = traffic_rows()
    assert len(rows) == 2 * len(RANK_LOOPS)
    assert [row.observed for row in rows] == [row.predicted for row in rows]
    assert [row.observed for row in traffic_rows(["fsdp2/zero_grad"], ranks=3)] == [
        {"all-reduce": (2, 16), "all-gather": (k, 40 * k), "reduce-scatter": (1, 120)}
        for k in (1, 4)
    ]


@pytest.mark.full
def test_a_right_loop_that_reduces_at_every_micro_batch_holds_and_its_traffic_is_said():
    once = WINDOW_LEFT + COUNT
    assert per_window(rank_loops.reduces_every_micro_batch) == [
        (3, once + GRADIENTS),
        (6, once + 4 * GRADIENTS),
    ]
    result = verify(
        rank_loops.reduces_every_micro_batch,
        examples=2,
        ranks=2,
        assumes=("even-ranks", "dense-gradients"),
    )
    assert result.holds
    assert result.traffic == (
        "each window takes 3 collectives of 56 bytes on every rank with accumulation_steps = 1, and 6 collectives of "
        "176 bytes with 4: the loop communicates at every micro-batch; once per window is enough, such as under no_sync"
    )
    assert result.to_json()["traffic"] == result.traffic


def test_a_sentence_says_that_traffic_does_not_depend_on_the_micro_batches():
    same = (Traffic(1, {"all-reduce": (3, 56)}), Traffic(4, {"all-reduce": (3, 56)}))
    assert traffic_text(same) == (
        "each window takes 3 collectives of 56 bytes on every rank, whatever its number of micro-batches"
    )


def test_a_sentence_says_that_sharded_parameters_are_gathered_for_every_micro_batch():
    once = {"all-reduce": (2, 16), "reduce-scatter": (1, 80)}
    found = tuple(Traffic(k, {**once, "all-gather": (k, 40 * k)}) for k in (1, 4))
    assert traffic_text(found) == (
        "each window takes 4 collectives of 136 bytes on every rank with accumulation_steps = 1, and 7 collectives of "
        "256 bytes with 4: every micro-batch gathers the sharded parameters, and each window adds up gradients once"
    )
