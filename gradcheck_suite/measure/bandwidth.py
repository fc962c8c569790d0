"""The device's own bandwidth, measured in the same run as the resets: of a large copy and of a large fill."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gradcheck_suite.measure.clock import settle

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Bytes of one copy, far beyond every cache."""
REPEATS = 7


def copy_bandwidth(device: str, timer: Callable[[], Any]) -> float:
    """Return bytes per second, read and written, of a device-to-device copy: the median of several."""
    elements = COPY_BYTES[device] // 4
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES[device] / _median_seconds(lambda: target.copy_(source), timer)


def fill_bandwidth(device: str, timer: Callable[[], Any]) -> float:
    """Return bytes per second that `zero_` of one large tensor writes: the median of several."""
    target = torch.ones(COPY_BYTES[device] // 4, device=device)
    return COPY_BYTES[device] / _median_seconds(target.zero_, timer)


def memset_bandwidth() -> float:
    """Return bytes per second that the C library's `memset` writes, on one thread of the CPU."""
    target = torch.ones(COPY_BYTES["cpu"] // 4)
    return COPY_BYTES["cpu"] / _median_seconds(
        lambda: ctypes.memset(target.data_ptr(), 0, COPY_BYTES["cpu"]), time.perf_counter
    )


def _median_seconds(run: Callable[[], Any], timer: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS + 2):
        start = timer()
        run()
        seconds.append(timer() - start)
    return median(seconds[2:])


def flush(device: str) -> Callable[[], None]:
    """Return a function that evicts everything else from the caches and waits until the device is idle."""
    scratch = torch.zeros(COPY_BYTES[device] // 8, device=device)

    def run() -> None:
        scratch.add_(1)
        settle(device)

    return run
