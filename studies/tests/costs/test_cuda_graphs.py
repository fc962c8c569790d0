"""What the optimizer finds after a replay of a captured window, on graphs played on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies.compiled_steps import PLACES, CapturedWindow
from studies.reset_modes import BENCHMARKED, RESET_MODES
from studies.tests.costs import fake_graphs
from studies.workload import Size

SMALL = Size(50, "few")
NEVER = replace(RESET_MODES["zero_"], reset=lambda parameters, optimizer: None)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
def test_only_a_release_between_replays_takes_the_gradients_away(
    monkeypatch, mode, place, micro_batches
):
    fake_graphs.install(monkeypatch)
    captured = CapturedWindow(mode, place, SMALL, micro_batches, "cpu")
    assert captured.finding() == ("None" if mode.releases and place == PLACES[1] else "right")


@pytest.mark.parametrize("place", PLACES)
def test_a_window_that_is_never_reset_is_found_wrong(monkeypatch, place):
    """Planted fault: the gradients of all replays are summed."""
    fake_graphs.install(monkeypatch)
    assert CapturedWindow(NEVER, place, SMALL, 2, "cpu").finding() == "wrong"


def test_a_capture_that_does_not_wait_for_the_warm_up_is_told(monkeypatch):
    """Planted fault: nobody waits for the side stream."""
    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(fake_graphs.Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(RuntimeError, match="side stream still works"):
        CapturedWindow(RESET_MODES["zero_"], PLACES[0], SMALL, 1, "cpu")
