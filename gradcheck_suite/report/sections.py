"""The sections of the report, each from the records of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Section, Table, unique
from gradcheck_suite.report.records_view import latest

CLAIM_COLUMNS = (
    "",
    "claim",
    "verdict",
    "what holds",
    "figures of this run",
    "how it was tested",
    "smallest case against it",
)


def _commands(records: Sequence[Record]) -> tuple[str, ...]:
    return unique([record.command for record in records])


def verification(records: Sequence[Record]) -> Section:
    """Return what was verified: each loop's verdict, and what the cases reached."""
    newest = latest(
        records, lambda d: (d.get("loop"), d.get("dtype"), d.get("device"), d.get("optimizer"), d.get("problem"))
    )
    if not newest:
        return Section(
            "verified", "What was verified", missing="Nothing has been verified yet: run `gradcheck-suite verify`."
        )
    rows = tuple(_verdict_row(record.data) for record in newest)
    reached = _reached([record.data for record in newest])
    tables = [
        Table(
            "Every loop and its verdict",
            ("loop", "verdict", "cases judged", "dtype", "device", "optimizer", "worst error / allowed", "found as"),
            rows,
            "The ratio is the largest difference from the float64 reference over what rounding allows, among cases "
            "that "
            "hold. A loop that is no built-in is somebody's own.",
        )
    ]
    for category, title in (("splits", "Splits that the cases reached"), ("layers", "Layers"), ("losses", "Losses")):
        counts = reached.get(category)
        if counts:
            total = sum(int(record.data.get("judged", 0)) for record in newest)
            tables.append(
                Table(
                    f"{title} (cases, of {total:,} judged)",
                    ("what", "cases"),
                    tuple((name, count) for name, count in counts.most_common()),
                )
            )
    return Section(
        "verified",
        "What was verified",
        (
            "Each loop trained random models on random splits. Every gradient that reached its optimizer was compared "
            "with the gradient of the whole window in one batch, computed in float64 by torch and by JAX.",
        ),
        tuple(tables),
        commands=_commands(newest),
    )


def _verdict_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    violation = data.get("violation") or {}
    return (
        str(data.get("loop", "?")),
        str(data.get("verdict", "?")),
        int(data.get("judged", data.get("cases", 0))),
        str(data.get("dtype", "")),
        str(data.get("device", "")),
        data.get("optimizer"),
        data.get("worst_error_over_allowed"),
        f"{violation.get('kind')}: {violation.get('diagnosis')}" if violation else None,
    )


def _reached(datas: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for data in datas:
        for category, counts in (data.get("reached") or {}).items():
            found.setdefault(str(category), Counter()).update({str(k): int(v) for k, v in counts.items()})
    return found


def counterexamples(records: Sequence[Record]) -> Section | None:
    """Return the violations that are stored, with the commands that show them again."""
    violated = [r for r in latest(records, lambda d: (d.get("loop"), d.get("stored"))) if r.data.get("stored")]
    if not violated:
        return None
    rows = []
    for record in violated:
        violation, stored = record.data["violation"], str(record.data["stored"])
        rows.append(
            (
                str(record.data["loop"]),
                f"{violation['kind']}: {violation['diagnosis']}",
                str(violation["explanation"]),
                f"gradcheck-suite replay reports/counterexamples/{stored}\n"
                f"python reports/counterexamples/{stored.removesuffix('.json')}.py",
            )
        )
    table = Table("Violations, and the commands that show them", ("loop", "found as", "why", "again"), tuple(rows))
    return Section("counterexamples", "Counterexamples", tables=(table,), commands=_commands(violated))


def claims(records: Sequence[Record]) -> Section:
    """Return the claims with their verdicts, and the loops that the sources print."""
    claimed = latest([r for r in records if "number" in r.data], lambda d: d["number"])
    loops = latest([r for r in records if "loop" in r.data], lambda d: d["loop"])
    if not claimed and not loops:
        return Section(
            "claims", "The claims", missing="The claims have not been tested yet: run `gradcheck-suite claims`."
        )
    tables = []
    for source in sorted({str(r.data.get("source", "")) for r in claimed}):
        mine = sorted(
            (r for r in claimed if str(r.data.get("source", "")) == source), key=lambda r: _key(r.data["number"])
        )
        rows = tuple(
            (
                str(r.data["number"]),
                str(r.data["text"]),
                str(r.data["verdict"]),
                "\n".join(filter(None, [str(r.data["sentence"]), _condition(r.data)])),
                "\n".join(f"{name}: {_value(value)}" for name, value in r.data["figures"].items()),
                str(r.data["how"]),
                str(r.data["counterexample"]) or None,
            )
            for r in mine
        )
        columns = (
            "",
            "claim",
            "verdict",
            "what holds",
            "figures of this run",
            "how it was tested",
            "smallest case against it",
        )
        tables.append(Table(f"Claims of {source}", columns, rows))
    if loops:
        tables.append(
            Table(
                "The loops that the sources print",
                ("loop", "what it does", "as it stands", "why", "relies on", "with that", "smallest case"),
                tuple(
                    (
                        str(r.data["loop"]),
                        str(r.data["says"]),
                        str(r.data["bare"]),
                        str(r.data["why"]) if r.data.get("why") else None,
                        r.data.get("needs"),
                        str(r.data["within"]),
                        "\n".join(map(str, r.data.get("smallest", ()))),
                    )
                    for r in loops
                ),
            )
        )
    return Section(
        "claims",
        "The claims",
        (
            "Three widely read explanations of gradient zeroing, put to the test. A verdict is `confirmed`, "
            "`refuted`, or "
            "`conditional`: true where the condition says.",
        ),
        tuple(tables),
        commands=_commands([*claimed, *loops]),
    )


def _condition(data: Mapping[str, Any]) -> str:
    return f"True where: {data['condition']}" if data.get("condition") else ""


def _key(number: str) -> tuple[float, ...]:
    return tuple(float(part) for part in number.removeprefix("C").split("."))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value)
