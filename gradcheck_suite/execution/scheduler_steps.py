"""How often a loop steps each learning rate scheduler; torch has no hook for it, so `step` is replaced meanwhile."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import lr_scheduler

_CLASSES = [
    found
    for found in vars(lr_scheduler).values()
    if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler) and "step" in vars(found)
]


class Calls:
    """Counts of calls of `step`, one for each scheduler. The call that a scheduler makes when it is made is none."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[torch.optim.lr_scheduler.LRScheduler, Counter[int]]] = {}

    def add(self, scheduler: torch.optim.lr_scheduler.LRScheduler, epoch: int) -> None:
        """Count one call, which has returned."""
        if getattr(scheduler, "last_epoch", 0) > 0:
            # the reference keeps the id from being used again
            _, counts = self._counts.setdefault(id(scheduler), (scheduler, Counter()))
            counts[epoch] += 1

    @property
    def counts(self) -> tuple[dict[int, int], ...]:
        """The number of calls in each epoch, one for each scheduler that was stepped."""
        return tuple(dict(counts) for _, counts in self._counts.values())


@contextmanager
def scheduler_steps(epoch: Callable[[], int]) -> Iterator[Calls]:
    """Count the calls of `step` of every scheduler of torch while the context is active.

    Args:
        epoch: returns the epoch of the loop.
    """
    calls, originals = Calls(), {found: found.step for found in _CLASSES}

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            calls.add(self, epoch())
            return result

        return step

    for found, original in originals.items():
        found.step = counted(original)  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        for found, original in originals.items():
            found.step = original  # type: ignore[method-assign]
