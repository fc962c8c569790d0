"""Ctrl-C, written down as well as raised, since a loop under test may catch whatever is raised inside it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Yield the list that every Ctrl-C inside the block is added to, beside raising `KeyboardInterrupt`."""
    pressed: list[int] = []

    def note(signum: int, frame: Any) -> None:
        pressed.append(signum)
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, where Ctrl-C never arrives
        yield pressed
        return
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
