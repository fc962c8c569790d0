"""The questions that trainers are asked, as data; each is about one way of cutting up an epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_SIZE = 4
"""Largest K and largest micro-batch that are drawn."""


@dataclass(frozen=True)
class Cut:
    """A way of cutting up an epoch.

    Attributes:
        windows: fewest and most windows.
        missing: fewest and most micro-batches that the last window lacks; it always keeps one.
        equal: whether all micro-batches have the same number of items; otherwise at least two differ.
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
        asked_of: the trainers that it makes sense for, such as "trainers that smooth labels"; empty for all.
    """

    name: str
    about: str
    problem: str
    cut: Cut | None
    asked_of: str = ""


_MEAN, _SUM = "gradcheck_suite.trainers.linear_problems:MEAN", "gradcheck_suite.trainers.linear_problems:SUM"
_ROWS = "gradcheck_suite.trainers.problems"
_ROWS_OF = "trainers that take models of transformers"
PLANS = (
    Question("equal counts", "whole windows of equal micro-batches, one epoch", _MEAN, Cut()),
    Question("unequal counts", "whole windows of micro-batches of 1 to 4 items, one epoch", _MEAN, Cut(equal=False)),
    Question(
        "short last window",
        "whole windows, then one that lacks some micro-batches; equal micro-batches, one epoch",
        _MEAN,
        Cut(windows=(2, 3), missing=(1, MAX_SIZE)),
    ),
    Question(
        "epoch shorter than K",
        "fewer micro-batches than accumulation steps; equal micro-batches, one epoch",
        _MEAN,
        Cut(windows=(1, 1), missing=(1, MAX_SIZE)),
    ),
    Question("several epochs", "as equal counts, two or three epochs", _MEAN, Cut(epochs=(2, 3))),
    Question("sum loss", "as equal counts, with a loss that is a sum over items", _SUM, Cut()),
)
"""The questions about a trainer that takes any model: their problems need only torch."""
PADDED_ROWS = (
    Question(
        "padded rows", "every kind of split of rows of 2 to 6 tokens, on a Llama", f"{_ROWS}:llama", None, _ROWS_OF
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
    return tuple(replace(question, problem=name) for question in PLANS if question.problem != _SUM)


def model_questions() -> tuple[Question, ...]:
    """Return one question for each model class in `models`; short last windows are drawn too."""
    from gradcheck_suite.trainers import models

    return tuple(
        Question(MODEL + name, "equal micro-batches", f"{models.__name__}:{name}", Cut(missing=(0, 1)))
        for name in models.NAMES
    )
