"""Timing rounds with pytest-benchmark: every round starts with flushed caches on an idle device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from studies.step_times import ATTEMPTS, WAITING, flush, quartiles, timed, timer

WARM = 3
"""Rounds that are not timed."""
cached_flush = cache(flush)
"""The flush of a device, whose gigabyte of memory all rows share."""


def time_rounds(
    benchmark: Any,
    run: Callable[[], Any],
    *,
    device: str,
    rounds: int,
    setup: Callable[[], Any] = lambda: None,
) -> Callable[[], None]:
    """Time rounds on the device's clock, then on the host's; return what prepares a round.

    `benchmark.extra_info` gets `host`, the quartiles on the host's clock until the device has
    finished, and `waiting`, the share of the time in which the process waited for a processor: more
    than next to nothing means that other load disturbed the rounds.

    Args:
        benchmark: pytest-benchmark's fixture.
        run: what is timed.
        device: `"cpu"` or `"cuda"`.
        rounds: number of rounds on either clock.
        setup: called before each round, and not timed.
    """
    flush_caches = cached_flush(device)

    def prepare() -> None:
        setup()
        flush_caches()

    benchmark._timer = timer(device)
    pedantic(benchmark, run, prepare, rounds, device)
    host = (
        benchmark.stats.stats.data
        if device == "cpu"
        else timed(run, prepare, rounds, device, "host")
    )
    benchmark.extra_info["host"] = asdict(quartiles(host))
    return prepare


def pedantic(
    benchmark: Any, run: Callable[[], Any], prepare: Callable[[], Any], rounds: int, device: str
) -> None:
    """Time prepared rounds on the benchmark's timer, and note in `extra_info` how long the process
    waited.

    On a CPU, rounds that other load disturbed are timed again, until they are not or were timed
    `ATTEMPTS` times.
    """
    if not benchmark.enabled:
        pytest.skip(
            "pytest-benchmark is switched off (--benchmark-disable, or -n): there is nothing to measure"
        )

    def again() -> None:
        # pytest-benchmark times once in a test; none of its statistics have been read yet
        benchmark.stats.stats.data[:] = timed(run, prepare, rounds, device)

    waiting = _waiting(
        lambda: benchmark.pedantic(run, setup=prepare, rounds=rounds, warmup_rounds=WARM)
    )
    for _ in range(ATTEMPTS - 1):
        if device != "cpu" or waiting <= WAITING:
            break
        waiting = _waiting(again)
    benchmark.extra_info["waiting"] = waiting


def _waiting(measure: Callable[[], Any]) -> float:
    """Return the share of a measurement's time in which the process waited for a processor."""
    host, processor = time.perf_counter(), time.process_time()
    measure()
    return max(0.0, 1 - (time.process_time() - processor) / (time.perf_counter() - host))
