"""What a device spent its time on, by torch's profiler: operations, and the kernels that they launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MAX_ENTRIES = 4


@dataclass(frozen=True)
class Profile:
    """One profiled run.

    Attributes:
        operations: the operations with the most self time: name, calls, microseconds on the host and on the device.
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
    operations = [
        {
            "name": event.key,
            "calls": int(event.count),
            "host_us": round(float(event.self_cpu_time_total), 1),
            "device_us": round(float(event.self_device_time_total), 1),
        }
        for event in found.key_averages()
    ]
    operations.sort(key=lambda entry: entry["host_us"] + entry["device_us"], reverse=True)
    return Profile(operations[:MAX_ENTRIES], *(device_work(found.events()) if device == "cuda" else ()))


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
