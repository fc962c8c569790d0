"""State that trainers leave in the process: it is reset before every run, so that no case depends on an earlier one."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import TrainingRun


@cache
def _freeze_imported_objects() -> None:
    """Exclude the objects that exist by now, mostly modules, from garbage collection.

    Some trainers collect after every run, and that pass is otherwise half of a small case's time.
    """
    gc.collect()
    gc.freeze()


def begin(run: TrainingRun) -> None:
    """Prepare the process for a trainer's run.

    Raises:
        CannotRunHere: the run is one of several ranks. Adapters set up one process, and their trainer would be blamed
            for gradients that nothing reduces.
    """
    if run.world_size > 1:
        raise CannotRunHere(
            "the adapters of trainers run in one process: audit a script of the trainer on several ranks, as "
            "`torchrun --nproc-per-node 2 -m gradcheck_suite audit train.py`"
        )
    _freeze_imported_objects()


def reset_accelerate() -> None:
    """Reset the state of Accelerate that all `Accelerator`s of a process share."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence warnings, progress bars of datasets, and these loggers below errors: a trainer's advice is no verdict."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets = sys.modules.get("datasets")
    shown = datasets is not None and not datasets.are_progress_bars_disabled()
    if datasets is not None and shown:
        datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if datasets is not None and shown:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
