"""What a device spent its time on, by torch's profiler: operations, and the kernels that they launched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MAX_ENTRIES = 4
_NO_OPERATION = re.compile(r"cu(da)?[A-Z]\w*|([A-Z]\w+ )+[A-Z]\w+")
"""Names of calls to CUDA's libraries, such as the wait at the end (`cudaDeviceSynchronize`), and of what the profiler
itself costs (`Activity Buffer Request`)."""


@dataclass(frozen=True)
class Profile:
    """One profiled run.

    Attributes:
        operations: torch's operations with the most self time: name, calls, microseconds on the host and on the device.
        kernels: kernels, copies and memsets that the device ran; None on a CPU.
        busy: seconds in which the device ran them, the gaps between them left out; None on a CPU.
    """

    operations: list[dict[str, Any]]
    kernels: int | None = None
    busy: float | None = None


def profiled(run: Callable[[], Any], device: str) -> Profile:
    """Run once under the profiler, which slows the run down: time it before, not meanwhile.

    Args:
        run: the function to profile.
        device: `"cpu"` or `"cuda"`.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    return Profile(operations(found.key_averages()), *(device_work(found.events()) if device == "cuda" else ()))


def operations(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operations with the most self time, from the profiler's averages by name.

    A kernel has an entry of its own, which repeats the device's time of its operation, and does not count.
    """
    entries = [
        {
            "name": event.key,
            "calls": int(event.count),
            "host_us": round(float(event.self_cpu_time_total), 1),
            "device_us": round(float(event.self_device_time_total), 1),
        }
        for event in averages
        if event.device_type == DeviceType.CPU and not _NO_OPERATION.fullmatch(event.key)
    ]
    entries.sort(key=lambda entry: entry["host_us"] + entry["device_us"], reverse=True)
    return entries[:MAX_ENTRIES]


def device_work(events: Any) -> tuple[int, float]:
    """Return how many of the profiler's events ran on the device, and the seconds that they cover together.

    An operation's own event is the host's and repeats its kernels' time, so it does not count. Kernels that overlap, on
    several streams, count once.
    """
    spans = sorted(
        (float(e.time_range.start), float(e.time_range.end))
        for e in events
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return len(spans), busy / 1e6  # microseconds to seconds
