"""Ctrl-C, written down as well as raised, since a loop under test may catch whatever is raised inside it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Yield the list that every Ctrl-C inside the block is added to, beside raising `KeyboardInterrupt`."""
    pressed: list[int] = []

    report = sys.unraisablehook

    def note(signum: int, frame: Any) -> None:
        pressed.append(signum)
        raise KeyboardInterrupt

    def report_others(unraisable: Any) -> None:
        # raised inside a finaliser or the garbage collector's callback, it goes nowhere: it is noted
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    try:
        previous = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, where Ctrl-C never arrives
        yield pressed
        return
    sys.unraisablehook = report_others
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = report
