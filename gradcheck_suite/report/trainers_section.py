"""Which real trainers hold on which plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Section, Table, unique
from gradcheck_suite.report.records_view import latest
from gradcheck_suite.trainers.study import HEAD
from gradcheck_suite.trainers.table import cut

KEY, TITLE = "trainers", "Real trainers"


def trainers(records: Sequence[Record]) -> Section:
    """Return the table of trainers and the plans they were asked about, and that of transformers' heads."""
    if not records:
        return Section(KEY, TITLE, missing="No trainer has been asked yet: run `gradcheck-suite trainers`.")
    newest = [r.data for r in latest(records, lambda d: (d["trainer"], d["version"], d["question"]))]
    plans = [data for data in newest if not data["question"].startswith(HEAD)]
    heads = [data for data in newest if data["question"].startswith(HEAD)]
    violated = sorted({_name(data) for data in plans if _violation(data)})
    asked = sorted({_name(data) for data in plans})
    tables = [
        Table(
            "What each trainer does on which plans",
            ("trainer", "question", "verdict", "smallest case", "cases"),
            tuple((_name(data), data["question"], *_cells(data)) for data in plans),
            "A smallest case is the items of its micro-batches, windows apart, and K. What is wrong, where in the "
            "trainer's source, and what would mend it is written in trainers.md beside this page.",
        )
    ]
    if heads:
        rows = tuple((data["question"].removeprefix(HEAD), _version(data), *_cells(data)) for data in heads)
        tables.append(
            Table(
                "Heads of transformers under its Trainer",
                ("head", "version", "verdict", "smallest case", "cases"),
                rows,
            )
        )
    text = (
        f"{len(asked)} trainers and versions ran as they are installed, unpatched; {len(violated)} of them hand their "
        "optimizer another gradient than the large batch's on some plans.",
    )
    return Section(KEY, TITLE, text, tuple(tables), commands=unique([record.command for record in records]))


def _violation(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    result = data["result"]
    return None if result is None else result["violation"]


def _version(data: Mapping[str, Any]) -> str:
    return f"{data['package']} {data['version']}"


def _name(data: Mapping[str, Any]) -> str:
    return f"{data['trainer']}, {_version(data)}"


def _cells(data: Mapping[str, Any]) -> tuple[Cell, Cell, Cell]:
    if data["result"] is None:
        return f"not asked: {data['why']}", None, None
    violation = data["result"]["violation"]
    if violation is None:
        return "holds", None, data["result"]["cases"]
    return f"{violation['kind']}: {violation['diagnosis']}", cut(violation["case"]["plan"]), data["result"]["cases"]
