"""Timers for pytest-benchmark: the host's clock, and one that lets the device finish or asks its own events.

pytest-benchmark takes any callable whose results subtract to seconds as its `timer`, so a CUDA event whose difference
is the elapsed device time needs no private patching.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class DeviceStamp:
    """A moment on the current CUDA stream; the difference of two is the device's time between them, in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: DeviceStamp) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000


def host_seconds_after_device() -> float:
    """Return the host's clock once the device has nothing left to do."""
    torch.cuda.synchronize()
    return time.perf_counter()


def timer(device: str, clock: str = "device") -> Callable[[], Any]:
    """Return the timer for a device.

    Args:
        device: `"cpu"` or `"cuda"`.
        clock: `"device"` for CUDA events, `"host"` for the host's clock with the device waited for. On the CPU both
            are the host's.
    """
    if device == "cpu":
        return time.perf_counter
    return DeviceStamp if clock == "device" else host_seconds_after_device
