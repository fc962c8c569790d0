"""The exit statuses of all commands."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from gradcheck_suite.errors import UsageError

_T = TypeVar("_T")
HOLDS = 0
VIOLATED = 1
BAD_USAGE = 2
DISAGREEMENT = 3
"""No loop is violated, but torch and JAX disagree somewhere: a finding, which must not pass unseen."""
BUG = 70
"""A bug in the suite itself; the number is `EX_SOFTWARE` of `sysexits.h`."""
INTERRUPTED = 130
"""Stopped by Ctrl-C before any violation was found; after one, the status is `VIOLATED`."""

JUDGED = {
    HOLDS: "everything holds",
    VIOLATED: "some loop is violated, or a finding that is to fail stands",
    DISAGREEMENT: "nothing is violated, but torch and JAX disagree somewhere (a finding)",
}
"""What the exit statuses of a command that judges loops mean, beside those of every command."""


def status_meanings(own: Mapping[int, str]) -> dict[int, str]:
    """Return what the exit statuses of a command mean, in order.

    Args:
        own: of the command, beside or in place of those of every command.
    """
    found = {
        BAD_USAGE: "bad usage or input, or nothing could be judged",
        BUG: "a bug in gradcheck-suite",
        INTERRUPTED: "interrupted before any violation was found",
        **own,
    }
    return dict(sorted(found.items()))


def status_of(*, violated: bool, findings: bool, interrupted: bool = False) -> int:
    """Return the status of a command that judged loops: a violation outweighs an interrupt, and
    this a finding.
    """
    if violated:
        return VIOLATED
    if interrupted:
        return INTERRUPTED
    return DISAGREEMENT if findings else HOLDS


# What goes wrong, in one line on standard error.


def fail(program: str, message: str, status: int = BAD_USAGE) -> int:
    """Print one line on standard error, unless it is closed or full, and return the status."""
    with suppress(OSError, ValueError):
        # one line, so that a log or another program can tell the error from what the code under
        # test prints
        print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


def attempt(program: str, write: Callable[[], _T]) -> _T | None:
    """Call `write`; if it raises `UsageError`, print its message and return None, so that the
    verdict stays.
    """
    try:
        return write()
    except UsageError as error:
        fail(program, str(error))
        return None


# The code under test may call `os._exit`, which ends the process without running any handler.


_exit = os._exit


@contextmanager
def ends_with(act: Callable[[int], int]) -> Iterator[None]:
    """Make `os._exit(status)` end this process with the status `act(status)`.

    A forked child process keeps the real `os._exit`.
    """
    outer = os._exit
    process = os.getpid()

    def ended(status: int) -> NoReturn:
        # a worker of a data loader ends by `os._exit` every time, and says nothing of the command
        _exit(act(status) if os.getpid() == process else status)

    os._exit = ended
    try:
        yield
    finally:
        os._exit = outer


# A signal that no handler catches ends the process without running any Python.


ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Signals that end a process by default: of `timeout` and job schedulers, and of a closed terminal."""
_set_handler = signal.signal
_handler_of = signal.getsignal


def _end_by(signum: int) -> None:
    _set_handler(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


@contextmanager
def told_of_its_end(act: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Call a function before `SIGTERM` or `SIGHUP` ends this process, by that signal.

    A handler that the code under test sets takes its place. To that code the default action seems
    to stand: Lightning sets its own handler only where it finds none. A child that is forked has
    the default action.

    Args:
        act: is given what ends the process. It may do so later, but soon.
    """
    process = os.getpid()
    # one that is ignored, as under `nohup`, is the caller's
    taken = {one for one in ENDING if _handler_of(one) is signal.SIG_DFL}
    begun: list[int] = []

    def end(signum: int, _: Any) -> None:
        # a second signal ends the process at once, as the sender that repeats it means
        if os.getpid() == process and not begun:
            begun.append(signum)
            act(lambda: _end_by(signum))
        else:
            _end_by(signum)

    def set_handler(signum: Any, handler: Any, /) -> Any:
        # as `signal.signal` returns, which scripts keep to put it back
        before = handler_of(signum)
        by_default = handler == signal.SIG_DFL and signum in taken and os.getpid() == process
        _set_handler(signum, end if by_default else handler)
        return before

    def handler_of(signum: Any, /) -> Any:
        found = _handler_of(signum)
        return signal.SIG_DFL if found is end else found

    def reset() -> None:
        for signum in taken:
            # a handler that the script has set meanwhile stays
            if _handler_of(signum) is end:
                _set_handler(signum, signal.SIG_DFL)

    # assigned through `Any`, since type checkers refuse to replace a function of a module
    module: Any = signal
    for signum in taken:
        _set_handler(signum, end)
    _resets.append(reset)
    module.signal = set_handler
    module.getsignal = handler_of
    try:
        yield
    finally:
        module.signal = _set_handler
        module.getsignal = _handler_of
        _resets.remove(reset)
        reset()


_resets: list[Callable[[], None]] = []


def _reset_in_child() -> None:
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


# Note each Ctrl-C beside raising `KeyboardInterrupt`, which a loop under test may catch.


_active: list[list[int]] = []


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Yield a list to which every Ctrl-C inside the block is added.

    `KeyboardInterrupt` is still raised. A nested block yields the list of the outer one: a callback
    of the garbage collector may lose an interrupt during start-up, and the work that follows finds
    it in the list.
    """
    # the handler of the outer block stands already, and notes each Ctrl-C once
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
