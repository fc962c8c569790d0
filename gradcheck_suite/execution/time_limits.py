"""A limit on how long a loop may take, so that one that hangs is a verdict and not a hang of the suite."""

from __future__ import annotations

import contextlib
import inspect
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_SHORTEST_S, _LONGEST_FACTOR = 1e-5, 1e3
"""The pauses before each further attempt lie between 10 microseconds and 10 milliseconds."""
IDLE = 0.02
"""The share of a core below which a process waits for something, and not for its turn on a busy machine."""
PATIENCE = 10.0
"""How many times the limit a process may take that is kept from the processor by others."""


class TimedOut(BaseException):
    """The loop did not return in time. Not an `Exception`, so that a loop's own handlers let it pass."""


@dataclass
class Limit:
    """What became of a limit: whether the time was over before the block was."""

    expired: bool = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Raise `TimedOut` inside the block after some seconds, again and again until it is left.

    The seconds are the clock's. On a busy machine they pass while others compute, and a sound loop would be blamed:
    where the process itself has computed for less, and has not been idle either, it has up to `PATIENCE` times as long.

    The limit works by SIGALRM: in the main thread, on systems that have it. Elsewhere there is no limit. Python code
    is stopped even where it catches whatever is raised; a call into C code that never returns is not.
    """
    limit = Limit()
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield limit
        return
    generator = inspect.currentframe()
    # the frame of the `with` statement, past contextlib's own: frames that it calls are the block's
    block = generator and generator.f_back and generator.f_back.f_back
    # of its own, since whoever tests at random seeds the shared one
    chance = random.Random(0)
    began, computed = time.monotonic(), time.process_time()

    def stop(signum: int, frame: FrameType | None) -> None:
        if not _inside(frame, block):
            return
        if not limit.expired and (rest := _rest(seconds, time.monotonic() - began, time.process_time() - computed)):
            signal.setitimer(signal.ITIMER_REAL, rest)
            return
        # pauses of every length meet the block at every place, also where it catches nothing
        pause = _SHORTEST_S * _LONGEST_FACTOR ** chance.random()
        if limit.expired:
            _raise_at_next_line(frame, block)
        limit.expired = True
        signal.setitimer(signal.ITIMER_REAL, pause)
        raise TimedOut

    with _restored():
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield limit


def _rest(limit: float, passed: float, computed: float) -> float:
    """Return how many seconds a block still has, 0 where none.

    Args:
        limit: that it was given.
        passed: by the clock.
        computed: of processor time, in all threads.
    """
    if computed >= limit or computed < IDLE * passed or passed >= PATIENCE * limit:
        return 0.0
    return min(max(limit - computed, 0.1 * limit), PATIENCE * limit - passed)


@contextmanager
def _restored() -> Iterator[None]:
    """Put back, at the end, what a limit changes in the interpreter."""
    tracer, handler, report = sys.gettrace(), signal.getsignal(signal.SIGALRM), sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, TimedOut):
            report(unraisable)

    # raised inside a finaliser, it can go nowhere and means nothing
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        sys.unraisablehook = report
        if sys.gettrace() is not tracer:
            sys.settrace(tracer)


def _inside(frame: FrameType | None, block: FrameType | None) -> bool:
    """Whether a frame is the block's, and not the limit's own on its way in or out."""
    called: FrameType | None = None
    while frame is not None and frame is not block:
        frame, called = frame.f_back, frame
    return frame is not None and (called is None or called.f_code.co_filename != contextlib.__file__)


def _raise_at_next_line(frame: FrameType | None, block: FrameType | None) -> None:
    """Make the block's frames raise `TimedOut` at the next line they come to.

    For a block that caught the first one: its next line is the handler's, and what is raised in a handler leaves it.
    """

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None  # the limit's own work must come to its end, or no further attempt follows
        if event == "line" and _inside(frame, block):
            raise TimedOut
        return tracer

    while frame is not None and frame is not block:
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)
