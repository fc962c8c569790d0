"""Timers for pytest-benchmark: the host's clock, the host's clock after the device has finished, and CUDA events.

pytest-benchmark accepts as `timer` any callable whose results subtract to seconds, so CUDA events can time the device
without patching pytest-benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class DeviceStamp:
    """A CUDA event on the current stream; the difference of two is the device's time between them, in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: DeviceStamp) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000


def host_seconds_after_device() -> float:
    """Wait for the device to finish; return the host's clock."""
    torch.cuda.synchronize()
    return time.perf_counter()


def timer(device: str, clock: str = "device") -> Callable[[], Any]:
    """Return the timer for a device.

    Args:
        device: `"cpu"` or `"cuda"`.
        clock: `"device"` for CUDA events, `"host"` for the host's clock after the device has finished. On the CPU
            both are the host's clock.
    """
    if device == "cpu":
        return time.perf_counter
    return DeviceStamp if clock == "device" else host_seconds_after_device
