"""Paired steps: the sign test's answer, and that a mode made slower is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradcheck_suite.loops.modes import RESET_MODES
from gradcheck_suite.measure import paired_steps
from gradcheck_suite.measure.workload import Size

SMALL = Size(100, "few")


@pytest.mark.parametrize(("slow", "better"), [("zero_", "none"), ("set_to_none", "zero")])
def test_the_mode_with_the_slower_reset_is_the_slower_one(monkeypatch, slow, better):
    """On a clock of which only the slow reset takes time, half a second."""
    now, reset = 0.0, RESET_MODES[slow].reset

    def slower(parameters, optimizer):
        nonlocal now
        reset(parameters, optimizer)
        now += 0.5

    monkeypatch.setitem(RESET_MODES, slow, replace(RESET_MODES[slow], reset=slower))
    monkeypatch.setattr(paired_steps, "timer", lambda device: lambda: now)
    found = paired_steps.time_paired_steps(SMALL, items=1, micro_batches=2, pairs=9)
    assert found.better == better
    assert abs(found.saved) == 0.5
    assert (found.zero, found.none) == ((0.5, 0.0) if slow == "zero_" else (0.0, 0.5))
    assert found.bytes_between == 4 * SMALL.total


# of 12 pairs, a fair coin falls as unevenly as 10 to 2 with probability 2 * 79 / 4096 = 0.039, as 9 to 3 with 0.146
@pytest.mark.parametrize(
    ("faster", "better"), [(7, "neither"), (9, "neither"), (3, "neither"), (10, "none"), (2, "zero"), (12, "none")]
)
def test_a_sign_test_at_five_percent_decides(faster, better):
    found = paired_steps.PairedSteps(1, 1, 1, zero=1.0, none=1.0, saved=0.0, faster=faster, pairs=12, bytes_between=4)
    assert found.better == better
