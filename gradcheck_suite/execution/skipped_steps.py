"""Steps that a `torch.amp.GradScaler` skipped, as it does where a gradient is infinite or NaN.

torch has no hook for them, so `GradScaler.step` is replaced while a loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def skipped_steps(steps: Callable[[], int]) -> Iterator[list[int]]:
    """Record the calls of `GradScaler.step` that did not step.

    Args:
        steps: returns the number of optimizer steps so far.

    Yields:
        For each such call, the number of optimizer steps before it; filled while the context is active.
    """
    original, skipped = torch.amp.GradScaler.step, []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = steps()
        result = original(self, *args, **kwargs)
        if steps() == before:
            skipped.append(before)
        return result

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    try:
        yield skipped
    finally:
        torch.amp.GradScaler.step = original  # type: ignore[method-assign]
