"""Timers: the host's clock, the host's clock after the device has finished, and CUDA events.

pytest-benchmark accepts as `timer` any callable whose results subtract to seconds, so CUDA events can time the device
without patching pytest-benchmark.

CUDA work is queued: the host goes on while the device computes. A round is timed right only if the queue is empty when
it starts (`settle`). Otherwise the host's clock also counts what was queued before the round, such as the flush of the
caches, and the device hides the time that the host needs to launch kernels behind that earlier work.
See https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class DeviceStamp:
    """A CUDA event on the current stream; the difference of two is the device's time between them, in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: DeviceStamp) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000  # milliseconds to seconds


def settle(device: str) -> None:
    """Wait until the device has finished all work queued so far; nothing to wait for on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def timer(device: str, clock: str = "device") -> Callable[[], Any]:
    """Return the timer for a device.

    Args:
        device: `"cpu"` or `"cuda"`.
        clock: `"device"` for CUDA events, `"host"` for the host's clock after the device has finished. On the CPU
            both are the host's clock.
    """
    if device == "cpu":
        return time.perf_counter
    return DeviceStamp if clock == "device" else _host_seconds_after_device


def _host_seconds_after_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Timing:
    """Quartiles of one duration over several rounds, in seconds."""

    q1: float
    median: float
    q3: float


def quartiles(seconds: Sequence[float]) -> Timing:
    """Return the quartiles of some durations, interpolated linearly between the ordered values."""
    return Timing(*(float(q) for q in np.percentile(seconds, (25, 50, 75))))


def timed(
    run: Callable[[], Any], setup: Callable[[], Any], rounds: int, device: str, clock: str = "device"
) -> list[float]:
    """Return the seconds that `run` takes in each round, on one clock.

    Args:
        run: what is timed.
        setup: called before each round and not timed; the device finishes it before the round starts.
        rounds: number of rounds.
        device: `"cpu"` or `"cuda"`.
        clock: as for `timer`.
    """
    stamp = timer(device, clock)
    seconds = []
    for _ in range(rounds):
        setup()
        settle(device)
        start = stamp()
        run()
        seconds.append(stamp() - start)
    return seconds
