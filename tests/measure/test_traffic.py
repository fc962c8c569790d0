"""Communication of each window, counted and as the wrappers' algorithms predict it."""

from __future__ import annotations

import pytest

from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.measure.traffic import Traffic, traffic_per_window, traffic_text
from gradcheck_suite.schema.case import Case
from gradcheck_suite.verification.verify import PLAIN, verify
from tests.verification import rank_loops

pytestmark = pytest.mark.usefixtures("ranks")
GRADIENTS, WINDOW_LEFT, COUNT, FLAGS = 5 * 8, 8, 8, 2 * 4
"""Bytes: of five float64 gradients; of the number of micro-batches; of the count; of which parameters are used."""


def per_window(loop):
    found = traffic_per_window(loop, lambda plan: generated_instance(Case(PLAIN, plan)), 2, 30.0)
    return [(traffic.collectives, traffic.bytes) for traffic in found]


def test_a_window_takes_as_many_collectives_and_bytes_whatever_its_micro_batches():
    once = WINDOW_LEFT + COUNT + GRADIENTS
    for mode in ("zero_", "set_to_none", "flat_buffer"):
        assert per_window(RANK_LOOPS[f"all_reduce/{mode}"]) == [(3, once)] * 2, mode
        assert per_window(RANK_LOOPS[f"ddp/{mode}"]) == [(4, once + FLAGS)] * 2, mode


def test_a_right_loop_that_reduces_at_every_micro_batch_holds_and_its_traffic_is_said():
    once = WINDOW_LEFT + COUNT
    assert per_window(rank_loops.reduces_every_micro_batch) == [(3, once + GRADIENTS), (6, once + 4 * GRADIENTS)]
    result = verify(
        rank_loops.reduces_every_micro_batch, examples=2, ranks=2, assumes=("even-ranks", "dense-gradients")
    )
    assert result.holds
    assert result.traffic == (
        "each window takes 3 collectives of 56 bytes on every rank with accumulation_steps = 1, and 6 collectives of "
        "176 bytes with 4: the loop communicates at every micro-batch; once per window is enough, such as under no_sync"
    )
    assert result.to_json()["traffic"] == result.traffic


def test_a_sentence_says_that_traffic_does_not_depend_on_the_micro_batches():
    same = (Traffic(1, 3, 56), Traffic(4, 3, 56))
    assert traffic_text(same) == (
        "each window takes 3 collectives of 56 bytes on every rank, whatever its number of micro-batches"
    )
