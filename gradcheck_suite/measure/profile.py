"""The operations that a reset consists of, by torch's profiler: their calls and their time on host and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MAX_ENTRIES = 4


def profiled(run: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """Run once under the profiler.

    Args:
        run: the function to profile.
        device: `"cpu"` or `"cuda"`.

    Returns:
        The operations with the most self time: name, calls, microseconds on the host and on the device.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    entries = [
        {
            "name": event.key,
            "calls": int(event.count),
            "host_us": round(float(event.self_cpu_time_total), 1),
            "device_us": round(float(event.self_device_time_total), 1),
        }
        for event in found.key_averages()
    ]
    entries.sort(key=lambda entry: entry["host_us"] + entry["device_us"], reverse=True)
    return entries[:MAX_ENTRIES]
