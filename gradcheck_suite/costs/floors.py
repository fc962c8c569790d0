"""What the device can do at best, measured in the same run: how fast it copies."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Of one copy: well beyond every cache."""
REPEATS = 7


def copy_bandwidth(device: str, timer: Callable[[], Any]) -> float:
    """Return bytes per second read and written by a device-to-device copy, the median of several."""
    elements = COPY_BYTES[device] // 4
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 2):
        start = timer()
        target.copy_(source)
        seconds.append(timer() - start)
    return 2 * COPY_BYTES[device] / median(seconds[2:])


def flush(device: str) -> Callable[[], None]:
    """Return a function that pushes everything else out of the caches."""
    scratch = torch.empty(COPY_BYTES[device] // 8, device=device)

    def run() -> None:
        scratch.add_(1)

    return run
