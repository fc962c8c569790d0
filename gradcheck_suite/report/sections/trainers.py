"""Verdicts on real trainers, one column per question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Matrix, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest
from gradcheck_suite.trainers import TRAINERS
from gradcheck_suite.trainers.console_table import cut_text
from gradcheck_suite.trainers.questions import MODEL

KEY, TITLE, TAB = "trainers", "Real trainers", "trainers"


def trainers(records: Sequence[Record]) -> Section:
    """Return a table of trainers and questions, and one of transformers' models."""
    if not records:
        return Section(KEY, TITLE, TAB, missing="No trainer has been asked yet: run `gradcheck-suite trainers`.")
    current = latest(records, lambda d: (d["trainer"], d["version"], d["question"]))
    newest = [record.data for record in current]
    models = [data for data in newest if data["question"].startswith(MODEL)]
    answers: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for data in newest:
        if data not in models:
            answers.setdefault((data["trainer"], _version(data)), {})[data["question"]] = data
    violated = sum(any(_violation(data) for data in row.values()) for row in answers.values())
    ran = sum(any(data["result"] is not None for data in row.values()) for row in answers.values())
    text = (
        *_models_text(models),
        f"{ran} of {len(answers)} trainers and versions ran, unpatched, as they are installed; {violated} of them hand "
        "their optimizer a gradient that differs from the large batch's for some question.",
    )
    tables = (_questions(answers), _models(models)) if models else (_questions(answers),)
    return Section(KEY, TITLE, TAB, text, (_matrix(answers),), tables=tables, sources=sources(current))


def _questions(answers: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> Table:
    questions = list(dict.fromkeys(question for row in answers.values() for question in row))
    rows = tuple((*name, *(_cell(row.get(question)) for question in questions)) for name, row in answers.items())
    return Table(
        "Verdict of each trainer on each question",
        ("trainer", "version", *questions),
        rows,
        "A violated cell has the diagnosis and the smallest case: items of each micro-batch, windows separated by |, "
        "and K. A dash stands for a question that was not asked; the notes above say why. "
        "docs/found-in-trainers.md has the cause of each violation and a fix.",
    )


def _matrix(answers: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> Matrix:
    questions = list(dict.fromkeys(question for row in answers.values() for question in row))
    reasons: dict[str, str] = {}
    rows = []
    for (trainer, version), row in answers.items():
        cells: list[tuple[str, tuple[str, ...]]] = []
        for question in questions:
            if (data := row.get(question)) is None or data["result"] is None:
                why = _why_not_asked(trainer, question, data)
                cells.append(("none", (f"not asked ({reasons.setdefault(why, str(len(reasons) + 1))})",)))
            else:
                cells.append(_mark(data["result"]["violation"]))
        rows.append((f"{trainer}, {version}", tuple(cells)))
    return Matrix(
        "Verdict of each trainer on each question: holds, or the diagnosis of the violation",
        "trainer",
        tuple(questions),
        tuple(rows),
        tuple(f"Not asked ({mark}): {why}." for why, mark in reasons.items()),
    )


def _why_not_asked(trainer: str, question: str, data: Mapping[str, Any] | None) -> str:
    """Return why a trainer has no verdict on a question."""
    if data is not None and data.get("why"):
        return str(data["why"])
    known = TRAINERS.get(trainer)
    of = {q.name: q.asked_of for other in TRAINERS.values() for q in other.questions}.get(question)
    if known is None or of is None or question in (own := [q.name for q in known.questions]):
        return f"no record has it; `gradcheck-suite trainers {trainer}` asks"
    return f"this question is for {of}" if of else f"{trainer} is a variant for the question {', '.join(own)} alone"


def _mark(violation: Mapping[str, Any] | None) -> tuple[str, tuple[str, ...]]:
    return ("good", ("holds",)) if violation is None else ("bad", (str(violation["diagnosis"]),))


def _models(answers: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (data["question"].removeprefix(MODEL), _version(data), _cell(data), _explanation(data)) for data in answers
    )
    return Table(
        "Models of transformers under its Trainer", ("model", "version", "verdict", "what its gradient is"), rows
    )


def _models_text(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each version: how many models hold, and how many get each wrong gradient."""
    versions: dict[str, list[Mapping[str, Any]]] = {}
    for data in models:
        if data["result"] is not None:
            versions.setdefault(_version(data), []).append(data)
    found = []
    for version, mine in versions.items():
        wrong = Counter(str(v["diagnosis"]) for data in mine if (v := _violation(data)) is not None)
        sentence = f"Of {len(mine)} models under the Trainer of {version}, {len(mine) - wrong.total()} hold"
        if wrong:
            kinds = ", ".join(f"{name} {count}" for name, count in wrong.most_common())
            sentence += f" and {wrong.total()} get a wrong gradient (diagnosis: {kinds})"
        found.append(f"{sentence}.")
    return found


def _violation(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    result = data["result"]
    return None if result is None else result["violation"]


def _explanation(data: Mapping[str, Any]) -> str | None:
    violation = _violation(data)
    return None if violation is None else str(violation["explanation"]).partition(": ")[0]


def _version(data: Mapping[str, Any]) -> str:
    return f"{data['package']} {data['version']}" if data["package"] else "own file"


def _cell(data: Mapping[str, Any] | None) -> Cell:
    if data is None or data["result"] is None:
        return None
    violation = data["result"]["violation"]
    return "holds" if violation is None else f"{violation['diagnosis']} {cut_text(violation['case']['plan'])}"
