"""Time limit of a loop, so that a loop that hangs is a violation and does not hang the suite."""

from __future__ import annotations

import contextlib
import inspect
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

IDLE = 0.02
"""Share of a core below which a process counts as waiting, rather than as competing for a busy processor."""
PATIENCE = 10.0
"""Factor of the limit that a process gets at most while other processes keep the processor busy."""
STARTUP_S = 300.0
"""Seconds in all that imports and compilation may take beside the limit."""
LOOKS = 4
"""How often within the limit the clocks are looked at."""
STARTING = (
    "<frozen importlib._bootstrap>",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/utils/cpp_extension.py",
)
"""Files whose code runs during an import or a compilation, and never during what has been compiled."""


class TimedOut(BaseException):
    """The loop did not return in time.

    It is no `Exception`, so that a loop's handlers do not catch it.
    """


class Allowance:
    """The time that a loop has for one case, in one process or in several.

    It is over once a process has computed for as long as the limit, or all have been idle that
    long. While others keep the processor busy it lasts up to `PATIENCE` times as long, so that a
    correct loop is not blamed. Imports and compilation do not count: a loop that did such work gets
    the whole limit again, for `STARTUP_S` seconds at most.
    """

    def __init__(self, limit_s: float, computed: Sequence[float]) -> None:
        """Begin, with the processor seconds of each process so far."""
        self._limit = limit_s
        self._began = 0.0
        self._at_start = computed

    def is_over(
        self, passed: float, computed: Sequence[float], has_loaded: Callable[[], bool]
    ) -> bool:
        """Return whether the loop is to be stopped.

        Args:
            passed: wall-clock seconds since the loop began.
            computed: processor seconds of each process so far.
            has_loaded: returns whether it was importing or compiling since the limit began; called
                where it is over.
        """
        since = passed - self._began
        used = max(now - before for before, now in zip(self._at_start, computed, strict=True))
        # a process that computes and gets little of the processor is slowed down, not stuck
        if since < self._limit or (
            IDLE * since <= used < self._limit and since < PATIENCE * self._limit
        ):
            return False
        if not has_loaded() or passed >= STARTUP_S:
            return True
        self._began = passed
        self._at_start = computed
        return False


class _Clocks:
    """Wall clock and processor time of this process since a limit began.

    Attributes:
        _pause: seconds from one look at the clocks to the next.
    """

    def __init__(self, limit_s: float, pause: float) -> None:
        self._pause = pause
        self._passed = 0.0
        self._clock = time.monotonic()
        self._computed = time.process_time()
        self._modules = len(sys.modules)
        self._was_starting = False
        self._allowance = Allowance(limit_s, [self._computed])

    def is_over(self, is_starting: Callable[[], bool]) -> bool:
        """Return whether the allowance is over."""
        clock = time.monotonic()
        computed = time.process_time()
        since = clock - self._clock
        # the time in which the process was stopped, as by Ctrl-Z, does not count
        stopped = since > 2 * self._pause and computed - self._computed < IDLE * since
        self._passed += self._pause if stopped else since
        self._clock = clock
        self._computed = computed
        has_loaded = partial(self._has_loaded, is_starting)
        return self._allowance.is_over(self._passed, [computed], has_loaded)

    def _has_loaded(self, is_starting: Callable[[], bool]) -> bool:
        before = self._modules
        was_starting = self._was_starting
        self._modules = len(sys.modules)
        self._was_starting = is_starting()
        # compiled code is imported too
        return self._was_starting or was_starting or self._modules > before


@dataclass
class Limit:
    """State of a time limit: whether it expired before the block ended."""

    expired: bool = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Raise `TimedOut` inside the block once its `Allowance` is over, repeatedly until the block
    ends.

    The limit uses SIGALRM: it works in the main thread, on systems that have this signal; elsewhere
    there is no limit. It stops Python code that catches every exception. It does not stop a call
    into C code that never returns.
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
    pause = seconds / LOOKS
    clocks = _Clocks(seconds, pause)

    def is_over(frame: FrameType | None) -> bool:
        return clocks.is_over(lambda: _is_starting(frame, block))

    def stop(signum: int, frame: FrameType | None) -> None:
        if not _is_inside_block(frame, block) or not (limit.expired or is_over(frame)):
            return
        if limit.expired:
            _raise_at_next_line(frame, block)
        limit.expired = True
        # random pauses interrupt the block at every place, also outside of its exception handlers
        signal.setitimer(signal.ITIMER_REAL, 10 ** (-5 + 3 * chance.random()))
        raise TimedOut

    def report_others(unraisable: Any) -> None:
        # a `TimedOut` raised in a finaliser cannot propagate and is not reported
        if not isinstance(unraisable.exc_value, TimedOut):
            report(unraisable)

    tracer = sys.gettrace()
    report = sys.unraisablehook
    sys.unraisablehook = report_others
    handler = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, pause, pause)
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        sys.unraisablehook = report
        if sys.gettrace() is not tracer:
            sys.settrace(tracer)


def _is_inside_block(frame: FrameType | None, block: FrameType | None) -> bool:
    """Return whether a frame belongs to the block, and not to the limit's own entry or exit."""
    called: FrameType | None = None
    while frame is not None and frame is not block:
        called = frame
        frame = frame.f_back
    return frame is not None and (
        called is None or called.f_code.co_filename != contextlib.__file__
    )


def _is_starting(frame: FrameType | None, block: FrameType | None) -> bool:
    """Return whether the block is importing or compiling."""
    while frame is not None and frame is not block:
        if frame.f_code.co_filename.endswith(STARTING):
            return True
        frame = frame.f_back
    return False


def _raise_at_next_line(frame: FrameType | None, block: FrameType | None) -> None:
    """Make the block's frames raise `TimedOut` at the next line that they execute.

    It is for a block that caught the first `TimedOut`: its next line is in the handler, and an
    exception raised in a handler propagates.
    """

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None  # an interrupted handler of the limit would make no further attempt
        if event == "line" and _is_inside_block(frame, block):
            raise TimedOut
        return tracer

    while frame is not None and frame is not block:
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)
