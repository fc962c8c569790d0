"""Note each Ctrl-C beside raising `KeyboardInterrupt`, which a loop under test may catch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Yield a list to which every Ctrl-C inside the block is added; `KeyboardInterrupt` is raised all the same."""
    pressed: list[int] = []

    report = sys.unraisablehook

    def note(signum: int, frame: Any) -> None:
        pressed.append(signum)
        raise KeyboardInterrupt

    def report_others(unraisable: Any) -> None:
        # an exception raised inside a finaliser or a callback of the garbage collector is lost
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
