"""What the suite knows about a real trainer before the trainer's package is imported."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

from gradcheck_suite.core.contract import Loop, TrainingRun
from gradcheck_suite.errors import CannotRunHere

# The questions that trainers are asked, as data; each is about one way of cutting up an epoch.


MAX_SIZE = 4
"""Largest K and largest micro-batch that are drawn."""


@dataclass(frozen=True)
class EpochCut:
    """A way of cutting up an epoch.

    Attributes:
        windows: fewest and most windows.
        missing: fewest and most micro-batches that the last window lacks; it always keeps one.
        equal: whether all micro-batches have the same number of items; otherwise at least two
            differ.
        epochs: fewest and most epochs.
    """

    windows: tuple[int, int] = (1, 2)
    missing: tuple[int, int] = (0, 0)
    equal: bool = True
    epochs: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Question:
    """One way of cutting up an epoch, on one problem.

    Attributes:
        name: the name of its column.
        about: what is drawn, in words.
        problem: `module:NAME` as `--problem` takes it.
        cut: the plans that are drawn; None for every kind of plan of at most 2 windows.
        asked_of: the trainers that it makes sense for, such as "trainers that smooth labels"; empty
            for all.
    """

    name: str
    about: str
    problem: str
    cut: EpochCut | None
    asked_of: str = ""


_MEAN = "gradcheck_suite.loops.trainers.problems:MEAN"
_SUM = "gradcheck_suite.loops.trainers.problems:SUM"
_ROWS = "gradcheck_suite.loops.trainers.models"
_ROWS_OF = "trainers that take models of transformers"
PLANS = (
    Question("equal counts", "whole windows of equal micro-batches, one epoch", _MEAN, EpochCut()),
    Question(
        "unequal counts",
        "whole windows of micro-batches of 1 to 4 items, one epoch",
        _MEAN,
        EpochCut(equal=False),
    ),
    Question(
        "short last window",
        "whole windows, then one that lacks some micro-batches; equal micro-batches, one epoch",
        _MEAN,
        EpochCut(windows=(2, 3), missing=(1, MAX_SIZE)),
    ),
    Question(
        "epoch shorter than K",
        "fewer micro-batches than accumulation steps; equal micro-batches, one epoch",
        _MEAN,
        EpochCut(windows=(1, 1), missing=(1, MAX_SIZE)),
    ),
    Question(
        "several epochs", "as equal counts, two or three epochs", _MEAN, EpochCut(epochs=(2, 3))
    ),
    Question("sum loss", "as equal counts, with a loss that is a sum over items", _SUM, EpochCut()),
)
"""The questions about a trainer that takes any model: their problems need only torch."""
PLANS_OF_JAX = tuple(
    replace(question, problem=question.problem.replace(":", ":JAX_")) for question in PLANS
)
"""The same about a loop of JAX."""
PADDED_ROWS = (
    Question(
        "padded rows",
        "every kind of split of rows of 2 to 6 tokens, on a Llama",
        f"{_ROWS}:llama",
        None,
        _ROWS_OF,
    ),
    Question("padded rows, GPT-2", "the same on a GPT-2", f"{_ROWS}:gpt2", None, _ROWS_OF),
)
"""The questions about a trainer that takes models of transformers."""
SMOOTHED = (
    Question(
        "label smoothing",
        "the same on the Llama with smoothed targets",
        f"{_ROWS}:llama_smoothed",
        None,
        "trainers that smooth labels",
    ),
)
"""The question about a trainer that smooths its labels."""
MODEL = "head "
"""The name of a question about one model of transformers starts so, in records too."""


def on_problem(name: str) -> tuple[Question, ...]:
    """Return the questions about plans, asked about a problem of somebody's own."""
    # whether a loss is a sum is a property of the problem, which is given here
    return tuple(replace(question, problem=name) for question in PLANS if question.problem != _SUM)


def model_questions() -> tuple[Question, ...]:
    """Return one question for each model class in `models`; short last windows are drawn too."""
    from gradcheck_suite.loops.trainers import models

    return tuple(
        Question(
            MODEL + name,
            "equal micro-batches",
            f"{models.__name__}:{name}",
            EpochCut(missing=(0, 1)),
        )
        for name in models.NAMES
    )


@dataclass(frozen=True)
class Trainer:
    """A trainer that can be a subject: one with an adapter, or a loop in somebody's own file.

    Attributes:
        name: the name that `verify` and `trainers` take.
        loop: the training loop; it imports the trainer's package when it is called.
        about: one line on what runs.
        requires: requirements such as `"accelerate>=1.0"`, the trainer's package first; the extra
            of that name lists the same. Empty for a loop in somebody's own file.
        tested: versions of the trainer's package that the adapter is tested with.
        imports: `module:name` of what the loop uses of the packages.
        questions: what `gradcheck-suite trainers` asks.
    """

    name: str
    loop: Loop
    about: str
    requires: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    questions: tuple[Question, ...] = PLANS

    @property
    def packages(self) -> tuple[str, ...]:
        """The distributions that must be installed, the trainer's own first."""
        return tuple(re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in self.requires)

    @property
    def package(self) -> str:
        """The trainer's own distribution; empty for a loop in somebody's own file."""
        return self.packages[0] if self.packages else ""

    @property
    def place(self) -> str:
        """`module:name` of the loop."""
        return f"{self.loop.__module__}:{self.loop.__name__}"

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        return _version(self.package) if self.package else None

    @property
    def missing(self) -> str | None:
        """Why the trainer cannot be imported and what to do, or None."""
        absent = [name for name in self.packages if _version(name) is None]
        if not absent:
            return None
        return (
            f"{self.name} needs {' and '.join(absent)}, not installed here: pip install"
            f" {' '.join(absent)}"
        )

    @property
    def note(self) -> str | None:
        """That the installed version is not a tested one, or None."""
        if self.version is None or self.version in self.tested:
            return None
        tested = " and ".join(self.tested)
        return (
            f"{self.name} is tested with {self.package} {tested}; {self.version} is installed, and"
            " is run all the same"
        )

    @property
    def status(self) -> str:
        """The installed version, or that there is none."""
        if not self.package:
            return "own file"
        return (
            f"{self.package} is not installed"
            if self.version is None
            else f"{self.package} {self.version}"
        )

    def load(self) -> Loop:
        """Import what the loop uses and return the loop.

        Raises:
            CannotRunHere: a package is not installed, or an import fails.
        """
        if reason := self.missing:
            raise CannotRunHere(reason)
        try:
            for place in self.imports:
                module, _, name = place.partition(":")
                getattr(import_module(module), name)
        except Exception as error:  # a broken or foreign version raises anything
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise CannotRunHere(
                f"{self.name} cannot be loaded with {self.package} {self.version} ({message}); "
                f"it is tested with {' and '.join(self.tested)}"
            ) from error
        return self.loop


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# State that trainers leave in the process: it is reset before every run, so that no case depends on
# an earlier one.


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
        CannotRunHere: the run is one of several ranks. Adapters set up one process, and their
            trainer would be blamed for gradients that nothing reduces.
    """
    if run.world_size > 1:
        raise CannotRunHere(
            "the adapters of trainers run in one process: audit a script of the trainer on several"
            " ranks, as `torchrun --nproc-per-node 2 -m gradcheck_suite audit train.py`"
        )
    _freeze_imported_objects()


def reset_accelerate() -> None:
    """Reset the state of Accelerate that all `Accelerator`s of a process share."""
    from accelerate.state import AcceleratorState, GradientState

    # Accelerate's own tests reset it in this way; there is no public one
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence warnings, progress bars of datasets, and these loggers below errors: a trainer's
    advice is no verdict.
    """
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
