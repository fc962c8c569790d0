"""Asking a trainer one question: `verify` on the question's problem and plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis import strategies as st

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.generation.plans import plans
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Result
from gradcheck_suite.trainers.process_state import quiet
from gradcheck_suite.trainers.questions import MAX_SIZE, Cut, Question
from gradcheck_suite.trainers.trainer import Trainer
from gradcheck_suite.verification.verify import verify


@dataclass(frozen=True)
class Answer:
    """A trainer's verdict on a question.

    Attributes:
        trainer: the subject.
        question: what was asked.
        result: of `verify`, or None where the trainer does not take the problem.
        why: the reason where there is no result; empty otherwise.
    """

    trainer: Trainer
    question: Question
    result: Result | None
    why: str = ""

    @property
    def violated(self) -> bool:
        """Whether some case shows a fault."""
        return self.result is not None and not self.result.holds

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


@st.composite
def cut_plans(draw: st.DrawFn, cut: Cut) -> Plan:
    """Draw plans of one way of cutting up an epoch, with K from 2 to `MAX_SIZE`."""
    k = draw(st.integers(2, MAX_SIZE))
    missing = draw(st.integers(*(min(bound, k - 1) for bound in cut.missing)))
    count = draw(st.integers(*cut.windows)) * k - missing
    if cut.equal:
        sizes = [draw(st.integers(1, MAX_SIZE))] * count
    else:
        sizes = draw(st.lists(st.integers(1, MAX_SIZE), min_size=count, max_size=count).filter(lambda n: len({*n}) > 1))
    return Plan(tuple(sizes), k, draw(st.integers(*cut.epochs)))


def ask(
    trainer: Trainer, question: Question, *, examples: int, seed: int = 0, problem: Problem | None = None
) -> Answer:
    """Ask a trainer one question; where it cannot be loaded or does not take the problem, the answer says why.

    Args:
        trainer: the subject.
        question: what is asked.
        examples: number of cases.
        seed: of the cases.
        problem: in place of the one that the question names.
    """
    small = plans(max_windows=2, max_accumulation_steps=MAX_SIZE, max_items=MAX_SIZE)
    try:
        loop, asked = trainer.load(), problem or _problem(question.problem)
        # models of transformers warn about themselves through the same loggers as its trainer
        with quiet("transformers"):
            result = verify(
                loop,
                name=trainer.name,
                problem=asked,
                problem_name=question.problem,
                plan=small if question.cut is None else cut_plans(question.cut),
                examples=examples,
                seed_value=seed,
            )
    except CannotRunHere as error:
        return Answer(trainer, question, None, str(error))
    return Answer(trainer, question, result)


def _problem(place: str) -> Problem:
    """Return the problem at `module:NAME`, or what the function there returns."""
    module, _, name = place.partition(":")
    found: Problem | Callable[[], Problem] = getattr(import_module(module), name)
    return found if isinstance(found, Problem) else found()
