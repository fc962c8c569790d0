"""A limit on how long a loop may take, so that one that hangs is a verdict and not a hang of the suite."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_AGAIN_S = 0.5


class TimedOut(BaseException):
    """The loop did not return in time. Not an `Exception`, so that a loop's own handlers let it pass."""


@dataclass
class Limit:
    """What became of a limit: whether the time was over before the block was."""

    expired: bool = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Raise `TimedOut` inside the block after some seconds, again and again until it is left.

    The limit works by SIGALRM: in the main thread, on systems that have it. Elsewhere there is no limit.
    """
    limit = Limit()
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield limit
        return
    generator = inspect.currentframe()
    # the frame of the `with` statement, past contextlib's own: frames inside it are the block's
    block = generator and generator.f_back and generator.f_back.f_back

    def stop(signum: int, frame: FrameType | None) -> None:
        if limit.expired:
            _raise_at_next_line(frame, block)
        limit.expired = True
        raise TimedOut

    traced = sys.gettrace()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
        if limit.expired:
            sys.settrace(traced)


def _raise_at_next_line(frame: FrameType | None, block: FrameType | None) -> None:
    """Make the block's frames raise `TimedOut` at the next line they come to.

    For a block that caught the first one: its next line is the handler's, and what is raised in a handler leaves it.
    """

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            raise TimedOut
        return tracer

    while frame is not None and frame is not block:
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)
