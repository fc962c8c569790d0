"""A CUDA device played by a queue: work runs in order on the device's clock, while the host's clock
goes on.

An event that the device has not reached cannot be read, durations come in milliseconds, and memory
is handed out when the host asks for it, as `torch.cuda` does it.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch

from studies import step_times

LAUNCH = 1e-3
"""Seconds that the host needs to queue one piece of work."""


class Device:
    """The queue, both clocks in seconds, and the allocator's statistics in bytes."""

    def __init__(self) -> None:
        self.host = 0.0
        self.done = 0.0  # when the device will have finished all that is queued
        self.stats: Counter[str] = Counter(
            {"num_alloc_retries": 0, "segment.all.current": 1, "allocation.all.allocated": 0}
        )

    def launch(self, seconds: float) -> None:
        """Queue work that takes the device some seconds."""
        self.host += LAUNCH
        self.done = max(self.done, self.host) + seconds

    def synchronize(self) -> None:
        """Let the host wait until the queue is empty."""
        self.host = max(self.host, self.done)

    def allocate(self, size: int) -> None:
        """Hand out some bytes."""
        self._add(size)
        self.stats["allocation.all.allocated"] += 1

    def free(self, size: int) -> None:
        """Take some bytes back."""
        self._add(-size)

    def _add(self, size: int) -> None:
        for kind in ("requested", "allocated", "reserved"):
            current, peak = f"{kind}_bytes.all.current", f"{kind}_bytes.all.peak"
            rounded = (
                size
                if kind == "requested"
                else (1 if size > 0 else -1) * (-(-abs(size) // 512) * 512)
            )
            self.stats[current] += rounded
            self.stats[peak] = max(self.stats[peak], self.stats[current])

    def reset_peaks(self) -> None:
        """Let every peak be what is allocated now."""
        for kind in ("requested", "allocated", "reserved"):
            self.stats[f"{kind}_bytes.all.peak"] = self.stats[f"{kind}_bytes.all.current"]


def install(monkeypatch) -> Device:
    """Put a fake device in the place of `torch.cuda` and of the host's clock; return it."""
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing, "an event without timing has no time"
            self.at = None

        def record(self) -> None:
            self.at = max(device.done, device.host)

        def synchronize(self) -> None:
            device.host = max(device.host, self.at)

        def elapsed_time(self, end: Event) -> float:
            if device.host < end.at:
                raise RuntimeError("device not ready")
            return 1000 * (end.at - self.at)

    for name, value in (
        ("Event", Event),
        ("synchronize", device.synchronize),
        ("memory_stats", lambda: dict(device.stats)),
        ("reset_peak_memory_stats", device.reset_peaks),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: device.host))
    return device
