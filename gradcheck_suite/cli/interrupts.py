"""Note each Ctrl-C beside raising `KeyboardInterrupt`, which a loop under test may catch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_active: list[list[int]] = []


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Yield a list to which every Ctrl-C inside the block is added; `KeyboardInterrupt` is raised all the same.

    A block inside another one yields the same list: an interrupt during start-up, which a callback of the garbage
    collector may lose, is noticed by the work that follows.
    """
    if _active:
        yield _active[-1]
        return
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
    _active.append(pressed)
    try:
        yield pressed
    finally:
        _active.pop()
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = report
