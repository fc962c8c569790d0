"""Which trainers hold on which plans: one question each, so that a fault does not hide behind another.

`verify` on all plans stops at the first fault. Here every way of cutting up an epoch is tried by itself, on the
simplest problem that can show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis import strategies as st

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.generation.strategies import plans
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Result
from gradcheck_suite.trainers import Trainer
from gradcheck_suite.trainers.process import quiet
from gradcheck_suite.verification.verify import verify

MOST = 4
"""Largest K, micro-batch and number of windows that are drawn: these questions need no larger ones."""
Plans = st.SearchStrategy[Plan]


@st.composite
def _cut(
    draw: st.DrawFn,
    *,
    windows: tuple[int, int],
    missing: tuple[int, int],
    equal: bool,
    epochs: tuple[int, int] = (1, 1),
) -> Plan:
    """Draw a plan of some windows of K, the last of which lacks some micro-batches."""
    k = draw(st.integers(2, MOST))
    short = draw(st.integers(min(missing[0], k - 1), min(missing[1], k - 1)))
    count = draw(st.integers(*windows)) * k - short
    if equal:
        sizes = [draw(st.integers(1, MOST))] * count
    else:
        sizes = draw(st.lists(st.integers(1, MOST), min_size=count, max_size=count).filter(lambda n: len({*n}) > 1))
    return Plan(tuple(sizes), k, draw(st.integers(*epochs)))


@dataclass(frozen=True)
class Question:
    """One way of cutting up an epoch, on one problem.

    Attributes:
        name: of the column.
        about: what is drawn, in words.
        problem: `module:NAME` as `--problem` takes it.
        plan: what is drawn.
    """

    name: str
    about: str
    problem: str
    plan: Callable[[], Plans]


_DENSE = "gradcheck_suite.trainers.dense"
_TEXT = "gradcheck_suite.trainers.problems"
WHOLE: dict[str, Any] = {"windows": (1, 2), "missing": (0, 0), "equal": True}
QUESTIONS = (
    Question(
        "equal counts", "whole windows of equal micro-batches, one epoch", f"{_DENSE}:MEAN", lambda: _cut(**WHOLE)
    ),
    Question(
        "unequal counts",
        "whole windows of micro-batches of 1 to 4 items, one epoch",
        f"{_DENSE}:MEAN",
        lambda: _cut(**{**WHOLE, "equal": False}),
    ),
    Question(
        "short last window",
        "at least one whole window and then a short one, equal micro-batches, one epoch",
        f"{_DENSE}:MEAN",
        lambda: _cut(windows=(2, 3), missing=(1, MOST), equal=True),
    ),
    Question(
        "epoch shorter than K",
        "fewer micro-batches than accumulation steps, equal micro-batches, one epoch",
        f"{_DENSE}:MEAN",
        lambda: _cut(windows=(1, 1), missing=(1, MOST), equal=True),
    ),
    Question(
        "several epochs",
        "two or three epochs of whole windows of equal micro-batches",
        f"{_DENSE}:MEAN",
        lambda: _cut(**WHOLE, epochs=(2, 3)),
    ),
    Question("sum loss", "a sum over items; otherwise as equal counts", f"{_DENSE}:SUM", lambda: _cut(**WHOLE)),
)
"""What every trainer is asked."""


def _any_small() -> Plans:
    return plans(max_windows=2, max_accumulation_steps=MOST, max_items=MOST)


TEXT_QUESTIONS = (
    Question("padded rows", "a Llama, rows of 2 to 6 tokens, every kind of plan", f"{_TEXT}:llama", _any_small),
    Question("padded rows, GPT-2", "likewise, a GPT-2", f"{_TEXT}:gpt2", _any_small),
)
"""What is asked beside of a trainer that takes models of transformers."""
HEAD = "head "
_HEADS = "gradcheck_suite.trainers.heads"


def _two_windows() -> Plans:
    return _cut(windows=(1, 2), missing=(0, 1), equal=True)


def head_questions() -> tuple[Question, ...]:
    """Return one question for every head of transformers' models that is known here: short last windows too."""
    from gradcheck_suite.trainers.heads import NAMES

    return tuple(Question(HEAD + name, "equal micro-batches", f"{_HEADS}:{name}", _two_windows) for name in NAMES)


SMOOTHING_QUESTIONS = (
    Question("label smoothing", "padded rows, targets smoothed by 0.1", f"{_TEXT}:llama_smoothed", _any_small),
)
"""What is asked of one that smooths their labels."""


@dataclass(frozen=True)
class Answer:
    """How a trainer fared on a question.

    Attributes:
        trainer: the subject.
        question: what was asked.
        result: of the cases, or None where the trainer does not take the problem.
        why: it does not take it; empty otherwise.
    """

    trainer: Trainer
    question: Question
    result: Result | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON-ready data."""
        return {
            "trainer": self.trainer.name,
            "about": self.trainer.about,
            "package": self.trainer.package,
            "version": self.trainer.version,
            "question": self.question.name,
            "problem": self.question.problem,
            "result": None if self.result is None else self.result.to_json(),
            "why": self.why,
        }


def questions_for(trainer: Trainer) -> tuple[Question, ...]:
    """Return what a trainer is asked."""
    if trainer.name == "hf-trainer-smoothing":
        return SMOOTHING_QUESTIONS
    return (*QUESTIONS, *TEXT_QUESTIONS) if trainer.name == "hf-trainer" else QUESTIONS


def _problem(name: str) -> Problem:
    """Return the problem that `module:NAME` stands for."""
    module, _, attribute = name.partition(":")
    found: Problem = getattr(import_module(module), attribute)
    return found


def ask(trainer: Trainer, question: Question, *, examples: int, seed: int = 0) -> Answer:
    """Put one question to a trainer; where it cannot be loaded, or does not take the problem, the answer says why."""
    try:
        loop, problem = trainer.load(), _problem(question.problem)
        # models of transformers warn about themselves through the same loggers as its trainer
        with quiet("transformers"):
            result = verify(
                loop,
                name=trainer.name,
                problem=problem,
                problem_name=question.problem,
                plan=question.plan(),
                examples=examples,
                seed_value=seed,
            )
    except CannotRunHere as error:
        return Answer(trainer, question, None, str(error))
    return Answer(trainer, question, result)
