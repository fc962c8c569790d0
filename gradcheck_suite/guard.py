"""A limit on how long a loop may take, so that one that hangs is a verdict and not a hang of the suite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimedOut(BaseException):
    """The loop did not return in time. Not an `Exception`, so that a loop's own handlers let it pass."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimedOut` inside the block after some seconds.

    The limit works by SIGALRM: in the main thread, on systems that have it. Elsewhere there is no limit.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimedOut

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
