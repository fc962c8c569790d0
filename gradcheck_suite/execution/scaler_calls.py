"""What a loop asks of its `torch.amp.GradScaler`s: calls of each method, and steps that were skipped.

torch has no hook for them, so the methods are replaced while a loop runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

METHODS = ("unscale_", "step", "update")


class ScalerCalls:
    """The calls of `METHODS` so far. Those that one scaler gets for different optimizers are counted apart.

    Attributes:
        skipped: for each call of `step` that did not step, the number of optimizer steps before it. A scaler does not
            step where a gradient is infinite or NaN.
    """

    def __init__(self) -> None:
        self.skipped: list[int] = []
        self._counts: dict[tuple[str, int, int], Counter[int]] = {}
        self._kept: list[Any] = []  # so that no id is used again

    def add(self, method: str, scaler: Any, arguments: tuple[Any, ...], epoch: int) -> None:
        """Count one call, which has returned. A `step` calls `unscale_` by itself where the loop has not."""
        optimizer = arguments[0] if arguments and isinstance(arguments[0], torch.optim.Optimizer) else None
        self._counts.setdefault((method, id(scaler), id(optimizer)), Counter())[epoch] += 1
        self._kept.append((scaler, optimizer))

    @property
    def counts(self) -> tuple[tuple[str, dict[int, int]], ...]:
        """(method, number of calls in each epoch), one for each scaler and optimizer."""
        return tuple((method, dict(counts)) for (method, _, _), counts in self._counts.items())


@contextmanager
def scaler_calls(steps: Callable[[], int], epoch: Callable[[], int]) -> Iterator[ScalerCalls]:
    """Record the calls of every scaler while the context is active.

    Args:
        steps: returns the number of optimizer steps so far.
        epoch: returns the epoch of the loop.
    """
    calls, found = ScalerCalls(), torch.amp.GradScaler
    originals = {method: getattr(found, method) for method in METHODS}

    def recorded(method: str) -> Callable[..., Any]:
        @functools.wraps(originals[method])
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = steps()
            result = originals[method](self, *args, **kwargs)
            calls.add(method, self, args or tuple(kwargs.values()), epoch())
            if method == "step" and steps() == before:
                calls.skipped.append(before)
            return result

        return call

    for method in METHODS:
        setattr(found, method, recorded(method))
    try:
        yield calls
    finally:
        for method, original in originals.items():
            setattr(found, method, original)
