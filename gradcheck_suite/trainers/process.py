"""What trainers keep in the process from one run to the next, put aside: every case finds the process as if new."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def settle() -> None:
    """Take what is imported by now out of the garbage collector's sight: some trainers collect after every run.

    That pass over all modules' objects is otherwise half of a small case's time.
    """
    gc.collect()
    gc.freeze()


def forget_accelerate() -> None:
    """Let Accelerate's next `Accelerator` start from nothing: its state is shared by all of a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Let loggers say nothing below an error, and nobody warn: a trainer's advice is no verdict on it."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
