"""The answers on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.description import split_text
from gradcheck_suite.schema.plan import plan_from_json
from gradcheck_suite.trainers import TRAINERS
from gradcheck_suite.trainers.study import Answer

NAME_WIDTH = max(map(len, TRAINERS))
QUESTION_WIDTH = 22
"""Widths of the columns; the names of models are longer than the second."""


def line(answer: Answer) -> str:
    """Return an answer on one line: `holds`, `VIOLATED` with the diagnosis and the smallest case, or `not asked`."""
    text = f"{answer.trainer.name:<{NAME_WIDTH}} {answer.trainer.status:<20} {answer.question.name:<{QUESTION_WIDTH}} "
    if answer.result is None:
        return f"{text}not asked"
    violation = answer.result.violation
    if violation is None:
        return f"{text}holds"
    return f"{text}VIOLATED  {violation.diagnosis:<14} {cut_text(violation.case.plan.to_json())}"


def closing(answers: Sequence[Answer]) -> list[str]:
    """Return the last lines: how to read a smallest case, what was not asked and why, who holds."""
    lines = []
    if any(answer.violated for answer in answers):
        lines.append(
            "after a diagnosis: the smallest case, as items of each micro-batch, windows separated by |, and K"
        )
    not_asked = {(a.trainer.name, a.why): None for a in answers if a.result is None}
    lines += [f"{name} was not asked: {why}" for name, why in not_asked]
    asked = list(dict.fromkeys(a.trainer.name for a in answers if a.result is not None))
    violated = {a.trainer.name for a in answers if a.violated}
    holding = [name for name in asked if name not in violated]
    if len(asked) == 1:
        lines.append(f"{asked[0]} {'holds on every question' if holding else 'is violated on some question'}")
    elif asked:
        names = f": {', '.join(holding)}" if holding else ""
        lines.append(f"{len(holding)} of {len(asked)} trainers hold on every question{names}")
    return lines


def cut_text(data: Mapping[str, Any]) -> str:
    """Return a plan, given as data, in a few characters such as `[1 2 | 1] K=2, 2 epochs`."""
    plan = plan_from_json(data)
    epochs = f", {plan.epochs} epochs" if plan.epochs > 1 else ""
    return f"{split_text(plan)} K={plan.accumulation_steps}{epochs}"
