"""Time limit of a loop, so that a loop that hangs is a violation and does not hang the suite."""

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
"""Share of a core below which a process counts as waiting, rather than as competing for a busy processor."""
PATIENCE = 10.0
"""Factor of the limit that a process gets at most while other processes keep the processor busy."""
STARTUP_S = 300.0
"""Seconds in all that imports and compilation may take beside the limit."""
LOOKS = 4
"""How often within the limit the clock is looked at: a process that was stopped meanwhile, as by Ctrl-Z, comes late."""
STARTING = (
    "<frozen importlib._bootstrap>",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/utils/cpp_extension.py",
)
"""Files whose code runs during an import or a compilation, and never during what has been compiled."""


class TimedOut(BaseException):
    """The loop did not return in time. It is no `Exception`, so that a loop's handlers do not catch it."""


@dataclass
class Limit:
    """State of a time limit: whether it expired before the block ended."""

    expired: bool = False


class _Start:
    """The moment that a limit counts from.

    Args:
        loading: whether the block was importing or compiling at that moment.
    """

    def __init__(self, *, loading: bool = False) -> None:
        self._loading = loading
        self._clock, self._processor, self._modules = time.monotonic(), time.process_time(), len(sys.modules)
        self._looked = self._clock, self._processor

    def look(self, pause: float) -> None:
        """Leave out the time in which the process was stopped: the clock went on for longer than the pause asked for.

        Args:
            pause: seconds after which this was to be called, since the last call.
        """
        clock, processor = time.monotonic(), time.process_time()
        passed, computed = clock - self._looked[0], processor - self._looked[1]
        if passed > 2 * pause and computed < IDLE * passed:
            self._clock += passed - pause
        self._looked = clock, processor

    @property
    def passed(self) -> float:
        """Wall-clock seconds since then."""
        return time.monotonic() - self._clock

    @property
    def computed(self) -> float:
        """Processor seconds of all threads since then."""
        return time.process_time() - self._processor

    @property
    def has_loaded(self) -> bool:
        """Whether the block has imported since then; compiled code is imported too."""
        return self._loading or len(sys.modules) > self._modules


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Raise `TimedOut` inside the block after some seconds of wall-clock time, repeatedly until the block ends.

    On a busy machine wall-clock time passes while other processes compute. A process that has computed for less time
    and was not idle therefore gets up to `PATIENCE` times as long, so that a correct loop is not blamed.

    Imports and compilation do not count: a block that did such work since the limit began gets the whole limit again,
    for at most `STARTUP_S` seconds in all. Nor does the time in which the process was stopped.

    The limit uses SIGALRM: it works in the main thread, on systems that have this signal; elsewhere there is no limit.
    It stops Python code that catches every exception. It does not stop a call into C code that never returns.
    """
    limit = Limit()
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield limit
        return
    generator = inspect.currentframe()
    # the frame of the `with` statement, past contextlib's own: frames that it calls are the block's
    block = generator and generator.f_back and generator.f_back.f_back
    # not the shared generator, which property tests seed
    chance = random.Random(0)
    first = start = _Start()
    pause = seconds / LOOKS

    def rest(frame: FrameType | None) -> float:
        """Return in how many seconds to look again, or 0 where the time is up."""
        nonlocal start
        start.look(pause)
        if start.passed < seconds:
            return min(seconds / LOOKS, max(seconds - start.passed, _SHORTEST_S))
        loading = _is_starting(frame, block)
        if (start.has_loaded or loading) and first.passed < STARTUP_S:
            start = _Start(loading=loading)
            return seconds / LOOKS
        return rest_of_limit(seconds, start.passed, start.computed)

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal pause
        if not _inside(frame, block):
            return
        if not limit.expired and (pause := rest(frame)):
            signal.setitimer(signal.ITIMER_REAL, pause)
            return
        if limit.expired:
            _raise_at_next_line(frame, block)
        limit.expired = True
        # random pauses interrupt the block at every place, also outside of its exception handlers
        signal.setitimer(signal.ITIMER_REAL, _SHORTEST_S * _LONGEST_FACTOR ** chance.random())
        raise TimedOut

    with _restored():
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, pause)
        yield limit


def rest_of_limit(limit: float, passed: float, computed: float) -> float:
    """Return how many seconds a block has left, or 0.

    Args:
        limit: the limit, in seconds.
        passed: wall-clock seconds since the block began.
        computed: processor seconds of all threads since the block began.
    """
    if computed >= limit or computed < IDLE * passed or passed >= PATIENCE * limit:
        return 0.0
    return min(max(limit - computed, 0.1 * limit), PATIENCE * limit - passed)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the trace function, signal handler and unraisable hook afterwards."""
    tracer, handler, report = sys.gettrace(), signal.getsignal(signal.SIGALRM), sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, TimedOut):
            report(unraisable)

    # a `TimedOut` raised in a finaliser cannot propagate and is not reported
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
    """Return whether a frame belongs to the block, and not to the limit's own entry or exit."""
    called: FrameType | None = None
    while frame is not None and frame is not block:
        frame, called = frame.f_back, frame
    return frame is not None and (called is None or called.f_code.co_filename != contextlib.__file__)


def _is_starting(frame: FrameType | None, block: FrameType | None) -> bool:
    """Return whether the block is importing or compiling."""
    while frame is not None and frame is not block:
        if frame.f_code.co_filename.endswith(STARTING):
            return True
        frame = frame.f_back
    return False


def _raise_at_next_line(frame: FrameType | None, block: FrameType | None) -> None:
    """Make the block's frames raise `TimedOut` at the next line that they execute.

    It is for a block that caught the first `TimedOut`: its next line is in the handler, and an exception raised in a
    handler propagates.
    """

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None  # an interrupted handler of the limit would make no further attempt
        if event == "line" and _inside(frame, block):
            raise TimedOut
        return tracer

    while frame is not None and frame is not block:
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)
