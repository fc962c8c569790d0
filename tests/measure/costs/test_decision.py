"""Which mode a step is faster under: what the sign test says, and that it finds a mode that was made slower."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from gradcheck_suite.measure import decision
from gradcheck_suite.measure.models import Size
from gradcheck_suite.measure.resets import MODES

SMALL = Size(100, "few")


@pytest.mark.parametrize(
    ("successes", "trials", "chance"),
    [(0, 5, 2 / 32), (5, 5, 2 / 32), (1, 5, 12 / 32), (2, 4, 1.0), (1, 1, 1.0), (0, 10, 2 / 1024)],
)
def test_the_sign_test_counts_coins(successes, trials, chance):
    assert decision.sign_test(successes, trials) == pytest.approx(chance, rel=1e-15)


@pytest.mark.parametrize(("slow", "better"), [("zero_", "none"), ("set_to_none", "zero")])
def test_a_mode_made_slower_is_the_slower_one(monkeypatch, slow, better):
    reset = MODES[slow].reset

    def sleepy(parameters):
        reset(parameters)
        time.sleep(0.02)

    monkeypatch.setitem(MODES, slow, replace(MODES[slow], reset=sleepy))
    found = decision.decide(SMALL, items=1, micro_batches=2, pairs=9)
    assert found.better == better
    assert abs(found.saved) == pytest.approx(0.02, rel=0.5)
    assert found.bytes_between == 4 * SMALL.total


def test_equal_modes_are_equal():
    found = decision.Decision(1, 1, 1, zero=1.0, none=1.0, saved=0.0, faster=7, pairs=12, bytes_between=4)
    assert found.better == "neither"
