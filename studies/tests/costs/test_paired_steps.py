"""Paired steps: that a mode made slower is found, and that a disturbed measurement is told and
repeated.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from studies import step_times as paired_steps
from studies.report.faster import step_times
from studies.reset_modes import RESET_MODES
from studies.step_times import ATTEMPTS, StepTime, disturbance, time_paired_steps
from studies.workload import Size

SMALL = Size(100, "few")


class Clock:
    """A clock on which only resets take time.

    The process computes all of it, or waits for a processor.
    """

    def __init__(self, monkeypatch, resets, waiting=lambda: False):
        self.now = self.used = 0.0
        for name, seconds in resets.items():
            monkeypatch.setitem(
                RESET_MODES, name, replace(RESET_MODES[name], reset=self._spending(name, seconds))
            )
        self.waiting = waiting
        times = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.used)
        monkeypatch.setattr(paired_steps, "time", times)
        monkeypatch.setattr(paired_steps, "timer", lambda device: lambda: self.now)
        monkeypatch.setattr(paired_steps, "flush", lambda device: lambda: None)

    def _spending(self, name, seconds):
        reset = RESET_MODES[name].reset

        def slower(parameters, optimizer):
            reset(parameters, optimizer)
            self.now += seconds
            self.used += 0 if self.waiting() else seconds

        return slower


@pytest.mark.parametrize(("zero", "none"), [(0.5, 0.25), (0.25, 0.5)])
def test_the_mode_with_the_slower_reset_is_the_slower_one(monkeypatch, zero, none):
    Clock(monkeypatch, {"zero_": zero, "set_to_none": none})
    found = time_paired_steps(SMALL, items=1, micro_batches=2, pairs=9)
    assert (found.zero, found.none, found.saved) == (zero, none, zero - none)
    assert found.saved_quartiles == (zero - none, zero - none)
    assert found.faster == (9 if zero > none else 0)
    assert found.bytes_between == 4 * SMALL.total
    assert (found.disturbed, found.attempts) == (None, 1)


def test_modes_that_take_the_same_time_differ_in_no_pair(monkeypatch):
    """A sign test leaves out ties: counted as slower, they would make zeroing the faster mode."""
    Clock(monkeypatch, {"zero_": 0.5, "set_to_none": 0.5})
    row = time_paired_steps(SMALL, items=1, micro_batches=1, pairs=21).to_row(SMALL, "cpu")
    assert (row["faster"], row["pairs"], row["saved"]) == (0, 0, 0)
    assert step_times([row]).faster == ("neither",)


@pytest.mark.parametrize(("busy", "attempts"), [(1, 2), (ATTEMPTS, ATTEMPTS)])
def test_a_measurement_in_which_the_process_waited_is_repeated(monkeypatch, busy, attempts):
    """Planted fault: another process holds the processor during the first measurements, or during
    all of them.
    """
    measurements = 0
    Clock(monkeypatch, {"zero_": 0.5, "set_to_none": 0.25}, waiting=lambda: measurements <= busy)
    in_turn = paired_steps._in_turn

    def counted(*args):
        nonlocal measurements
        measurements += 1
        return in_turn(*args)

    monkeypatch.setattr(paired_steps, "_in_turn", counted)
    found = time_paired_steps(SMALL, items=1, micro_batches=1, pairs=5)
    assert found.attempts == attempts
    assert (found.disturbed is None) == (busy < ATTEMPTS)
    if busy == ATTEMPTS:
        assert found.disturbed == "the process waited for a processor in 100% of a step's time"


@pytest.mark.parametrize(("processor", "told"), [(0.91, False), (0.89, True), (2.0, False)])
def test_waiting_a_tenth_of_the_time_is_the_limit(processor, told):
    steps = [StepTime(1.0, 1.0, processor)] * 4
    assert (disturbance(steps, [0.1, 0.1]) is not None) == told


def test_a_process_that_sleeps_while_it_waits_for_a_gpu_is_not_disturbed():
    steps = [StepTime(1.0, 1.0, 0.1)] * 4
    assert disturbance(steps, [0.1, 0.1], "cpu") is not None
    assert disturbance(steps, [0.1, 0.1], "cuda") is None


@pytest.mark.parametrize(("spread", "told"), [(0.49, False), (0.51, True)])
def test_differences_without_a_centre_are_told(spread, told):
    """The middle half of five values, two below and two above, spans twice their distance from the
    median.
    """
    saved = [-spread, -spread / 2, 0.0, spread / 2, spread]
    assert (disturbance([StepTime(1.0, 1.0, 1.0)] * 10, saved) is not None) == told
