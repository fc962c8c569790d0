"""The answers on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.schema.plan import plan_from_json
from gradcheck_suite.trainers import TRAINERS
from gradcheck_suite.trainers.study import Answer

NAME_WIDTH = max(map(len, TRAINERS))
QUESTION_WIDTH = 22
"""Of the columns on the console; the names of heads are longer, and stand alone."""


def line(answer: Answer) -> str:
    """Return an answer on one line: `holds`, `VIOLATED` with the diagnosis and the smallest case, or that none is."""
    text = f"{answer.trainer.name:<{NAME_WIDTH}} {answer.trainer.status:<20} {answer.question.name:<{QUESTION_WIDTH}} "
    if answer.result is None:
        return f"{text}not asked"
    violation = answer.result.violation
    if violation is None:
        return f"{text}holds"
    return f"{text}VIOLATED  {violation.diagnosis:<14} {cut(violation.case.plan.to_json())}"


def closing(answers: Sequence[Answer]) -> list[str]:
    """Return what stands below the lines: how to read them, what was not asked and why, who holds."""
    lines = []
    if any(_violated(answer) for answer in answers):
        lines.append("after a diagnosis: the smallest case, as items of its micro-batches, windows apart by |, and K")
    not_asked = {(a.trainer.name, a.why): None for a in answers if a.result is None}
    lines += [f"{name} was not asked: {why}" for name, why in not_asked]
    asked = {a.trainer.name: None for a in answers if a.result is not None}
    violated = {a.trainer.name: None for a in answers if _violated(a)}
    if asked:
        lines.append(_holding(list(asked), list(violated)))
    return lines


def _violated(answer: Answer) -> bool:
    return answer.result is not None and answer.result.violation is not None


def _holding(asked: Sequence[str], violated: Sequence[str]) -> str:
    holding = [name for name in asked if name not in violated]
    text = f"{len(holding)} of {len(asked)} trainers hold on every question" if len(asked) > 1 else ""
    if not text:
        return f"{asked[0]} {'is violated on some question' if violated else 'holds on every question'}"
    return f"{text}: {', '.join(holding)}" if holding else text


def cut(data: Mapping[str, Any]) -> str:
    """Return a plan, as data, in a few characters: items of the micro-batches, windows apart, K, epochs."""
    plan = plan_from_json(data)
    windows = " | ".join(" ".join(str(plan.micro_batches[j]) for j in window) for window in plan.windows)
    epochs = f", {plan.epochs} epochs" if plan.epochs > 1 else ""
    return f"[{windows}] K={plan.accumulation_steps}{epochs}"
