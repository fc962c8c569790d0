"""Why no step may come is asked after 16 passes, and again as long as that costs next to nothing."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite.auditing import unstepped


def test_a_search_that_takes_long_is_not_made_again_at_once(monkeypatch):
    clock = [100.0]
    searches = []

    def searched(*kinds):
        searches.append(clock[0])
        clock[0] += 0.1  # of a process with a million objects
        return []

    monkeypatch.setattr(unstepped, "live_instances", searched)
    monkeypatch.setattr(unstepped.time, "perf_counter", lambda: clock[0])
    watched = unstepped.Unstepped()
    for passes in range(1, 2**15):
        clock[0] += 0.001
        watched.on_pass(passes)
    assert searches[0] == pytest.approx(100.0 + 0.001 * 16)
    assert 1 < len(searches) <= 1 + 0.01 * (clock[0] - 100.0) / 0.1


def test_an_optimizer_that_never_steps_is_seen_while_it_lives():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    watched = unstepped.Unstepped()
    watched.on_pass(unstepped.MANY)
    del optimizer
    assert "never called" in watched.why
