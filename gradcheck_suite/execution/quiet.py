"""Discard what loops print: trainers that print a line or a progress bar for every epoch of every case."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

_QUIET = ContextVar("_QUIET", default=False)


@contextmanager
def quiet_loops(quiet: bool) -> Iterator[None]:
    """Discard the output of the loops that run inside the block, if `quiet`."""
    token = _QUIET.set(quiet)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Return whether the output of loops is discarded."""
    return _QUIET.get()


def loop_output() -> AbstractContextManager[None]:
    """Return the context that a loop runs in: one that discards its output, or one that does nothing."""
    return _discarded_output() if is_quiet() else nullcontext()


@contextmanager
def _discarded_output() -> Iterator[None]:
    """Discard what is written to the process's standard output and error, also by loggers and by code in C."""
    out, err = sys.stdout, sys.stderr
    for stream in filter(None, (out, err)):
        stream.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    with open(os.devnull, "w") as nowhere:
        try:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
            # a stream of Python's own, as a notebook has, is replaced
            sys.stdout = sys.stderr = nowhere
            yield
        finally:
            for stream in filter(None, (out, err, nowhere)):
                stream.flush()
            sys.stdout, sys.stderr = out, err
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
