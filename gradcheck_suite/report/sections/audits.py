"""The scripts that were audited: the last verdict on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Matrix, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest
from gradcheck_suite.report.sections.verification import title_of

COLUMNS = ("script", "ranks", "verdict", "steps judged", "diagnosis", "at step", "loss", "what is wrong")


def audits(records: Sequence[Record]) -> Section | None:
    """Return the section on audited scripts; None where there is none."""
    newest = latest(records, run_of)
    if not newest:
        return None
    rows = tuple(_row(record.data) for record in newest)
    violated = sum(record.data["verdict"] == "violated" for record in newest)
    return Section(
        "audits",
        "Audited scripts",
        "verification",
        (
            f"`gradcheck-suite audit` ran {counted(len(rows), 'script')} unchanged and judged the optimizer "
            f"steps; {violated} violated. Those on several ranks ran under `torchrun`.",
        ),
        (_matrix([record.data for record in newest]),),
        tables=(Table("Every script and its verdict", COLUMNS, rows),),
        sources=sources(newest),
    )


def run_of(data: Mapping[str, Any]) -> tuple[str, int]:
    """Return a script with its arguments, and the number of its ranks."""
    return " ".join([str(data["loop"]), *data.get("arguments", ())]), int(data.get("ranks") or 1)


def _matrix(datas: Sequence[Mapping[str, Any]]) -> Matrix:
    """Return the verdict on each script by its number of ranks."""
    runs = {run_of(data): data for data in datas}
    scripts, ranks = dict.fromkeys(script for script, _ in runs), sorted({ranks for _, ranks in runs})
    return Matrix(
        "Verdict on each script: holds, or the diagnosis of the violation",
        "script",
        tuple(counted(n, "rank") for n in ranks),
        tuple((script, tuple(_cell(runs.get((script, n))) for n in ranks)) for script in scripts),
    )


def _cell(data: Mapping[str, Any] | None) -> tuple[str, tuple[str, ...]]:
    if data is None:
        return "none", ("not run",)
    tone = {"holds": "good", "violated": "bad"}.get(data["verdict"], "none")
    return tone, (str((data.get("violation") or {}).get("diagnosis", data["verdict"])),)


def _row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    violation = data.get("violation") or {}
    told = (violation.get(name) for name in ("step", "where", "explanation"))
    return (*run_of(data), str(data["verdict"]), data.get("windows"), title_of(data.get("violation")), *told)
