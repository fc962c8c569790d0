"""Ask trainers on which plans they hold: one verdict for each question, and the lines that show
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis import strategies as st

from gradcheck_suite.core.case import Plan
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.core.options import NUMPY
from gradcheck_suite.core.results import Result, Verdict
from gradcheck_suite.core.text import cut_text
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.trainer import MAX_SIZE, EpochCut, Question, Trainer, quiet
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.verification.verify import verify


@dataclass(frozen=True)
class Answer:
    """A trainer's verdict on a question.

    Attributes:
        trainer: the subject.
        question: what was asked.
        result: what `verify` returned; None where the trainer does not take the problem.
        why: the reason where there is no result; empty otherwise.
    """

    trainer: Trainer
    question: Question
    result: Result | None
    why: str = ""

    @property
    def violated(self) -> bool:
        """Whether some case shows a fault."""
        return self.result is not None and self.result.violation is not None

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
def cut_plans(draw: st.DrawFn, cut: EpochCut) -> Plan:
    """Draw plans of one way of cutting up an epoch, with K from 2 to `MAX_SIZE`."""
    k = draw(st.integers(2, MAX_SIZE))
    missing = draw(st.integers(*(min(bound, k - 1) for bound in cut.missing)))
    count = draw(st.integers(*cut.windows)) * k - missing
    if cut.equal:
        sizes = [draw(st.integers(1, MAX_SIZE))] * count
    else:
        sizes = draw(
            st.lists(st.integers(1, MAX_SIZE), min_size=count, max_size=count).filter(
                lambda n: len({*n}) > 1
            )
        )
    return Plan(tuple(sizes), k, draw(st.integers(*cut.epochs)))


def ask(
    trainer: Trainer,
    question: Question,
    *,
    examples: int,
    seed: int = 0,
    problem: Problem | None = None,
    progress: Callable[[Verdict], None] | None = None,
    jax: str = NUMPY,
) -> Answer:
    """Ask a trainer one question.

    Where it cannot be loaded or does not take the problem, the answer says why.

    Args:
        trainer: the subject.
        question: what is asked.
        examples: number of cases.
        seed: the seed of the cases.
        problem: the problem to train in place of the one that the question names.
        progress: called with every verdict.
        jax: what evaluates JAX's derivatives.
    """
    small = plans(max_windows=2, max_accumulation_steps=MAX_SIZE, max_items=MAX_SIZE)
    try:
        loop = trainer.load()
        asked = problem or _problem(question.problem)
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
                progress=progress,
                quiet=True,
                jax=jax,
            )
    except CannotRunHere as error:
        return Answer(
            trainer,
            question,
            None,
            str(error),
        )
    return Answer(trainer, question, result)


def _problem(place: str) -> Problem:
    """Return the problem at `module:NAME`, or what the function there returns."""
    module, _, name = place.partition(":")
    found: Problem | Callable[[], Problem] = getattr(import_module(module), name)
    return found if isinstance(found, Problem) else found()


NAME_WIDTH = max(map(len, TRAINERS))
QUESTION_WIDTH = 22
"""Widths of the columns; the names of models are longer than the second."""


def line(answer: Answer) -> str:
    """Return an answer on one line: `holds`, `VIOLATED` with the diagnosis and the smallest case,
    or `not asked`.
    """
    # the versions stand in the run's first line: beside each answer they would make it 112 wide
    text = f"{answer.trainer.name:<{NAME_WIDTH}} {answer.question.name:<{QUESTION_WIDTH}} "
    if answer.result is None:
        return f"{text}not asked"
    violation = answer.result.violation
    if violation is None:
        return f"{text}holds"
    return f"{text}VIOLATED  {violation.diagnosis:<14} {cut_text(violation.case.plan)}"


def closing(answers: Sequence[Answer]) -> list[str]:
    """Return the last lines: how to read a smallest case, what was not asked and why, who holds."""
    lines = []
    if any(answer.violated for answer in answers):
        lines.append(
            "after a diagnosis: the smallest case, as items of each micro-batch, windows separated"
            " by |, and K"
        )
    not_asked = {(a.trainer.name, a.why): None for a in answers if a.result is None}
    lines += [f"{name} was not asked: {why}" for name, why in not_asked]
    asked = list(dict.fromkeys(a.trainer.name for a in answers if a.result is not None))
    violated = {a.trainer.name for a in answers if a.violated}
    holding = [name for name in asked if name not in violated]
    return lines + _holding_lines(asked, holding)


def _holding_lines(asked: Sequence[str], holding: Sequence[str]) -> list[str]:
    if not asked:
        return []
    if len(asked) == 1:
        verdict = "holds on every question" if holding else "is violated on some question"
        return [f"{asked[0]} {verdict}"]
    names = f": {', '.join(holding)}" if holding else ""
    return [f"{len(holding)} of {len(asked)} trainers hold on every question{names}"]
