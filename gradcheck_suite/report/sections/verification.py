"""The sections on verified loops, their counterexamples, and the claims about gradient zeroing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.description import violation_title
from gradcheck_suite.records.step_times import answer
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Section, Table, commands_of, standing
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
STEPS = "C1.8"
"""The claim about when zeroing may do, which steps under both modes in turn decide."""
LOOP_COLUMNS = ("loop", "what it does", "as it stands", "why", "relies on", "with that", "smallest case")


def verification(records: Sequence[Record]) -> Section:
    """Return what was verified: each loop's verdict, and the layers, losses and splits of its cases."""
    newest = latest(
        records, lambda d: (d.get("loop"), d.get("dtype"), d.get("device"), d.get("optimizer"), d.get("problem"))
    )
    if not newest:
        return Section(
            "verified", "What was verified", missing="Nothing has been verified yet: run `gradcheck-suite verify`."
        )
    tables = [
        Table(
            "Every loop and its verdict",
            ("loop", "verdict", "cases judged", "dtype", "device", "optimizer", "worst error / allowed", "diagnosis"),
            tuple(_verdict_row(record.data) for record in newest),
            "The ratio is the largest difference from the float64 reference over what rounding allows, among cases "
            "that hold. A loop that is no built-in is a user's.",
        )
    ]
    reached = _reached([record.data for record in newest])
    judged = [int(record.data.get("judged", 0)) for record in newest]
    # each row judges cases of its own, so a layer may be reached more often than one row has cases
    of = f"of {sum(judged):,} judged: " + (
        f"{judged[0]:,} for each of {len(judged)} rows above"
        if len(set(judged)) == 1
        else f"the sum over the {len(judged)} rows above"
    )
    for category, title in (("splits", "Splits that the cases reached"), ("layers", "Layers"), ("losses", "Losses")):
        if counts := reached.get(category):
            tables.append(Table(f"{title} (cases, {of})", ("what", "cases"), tuple(counts.most_common())))
    text = (
        "Each loop trained random models on random splits. Every gradient that reached its optimizer was compared "
        "with the gradient of the whole window in one batch, computed in float64 by torch and by JAX.",
    )
    return Section(
        "verified", "What was verified", (*text, *standing(newest)), tuple(tables), commands=commands_of(newest)
    )


def _verdict_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        str(data.get("loop", "?")),
        str(data.get("verdict", "?")),
        int(data.get("judged", data.get("cases", 0))),
        str(data.get("dtype", "")),
        str(data.get("device", "")),
        data.get("optimizer"),
        data.get("worst_error_over_allowed"),
        _title(data.get("violation")),
    )


def _title(violation: Mapping[str, Any] | None) -> str | None:
    return violation_title(str(violation["kind"]), str(violation["diagnosis"])) if violation else None


def _reached(datas: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for data in datas:
        for category, counts in (data.get("reached") or {}).items():
            found.setdefault(str(category), Counter()).update({str(k): int(v) for k, v in counts.items()})
    return found


def counterexamples(records: Sequence[Record]) -> Section | None:
    """Return the stored violations with the commands that run them again, None where there is none."""
    violated = [r for r in latest(records, lambda d: (d.get("loop"), d.get("stored"))) if r.data.get("stored")]
    if not violated:
        return None
    rows = tuple(
        (
            str(data["loop"]),
            _title(data["violation"]),
            str(data["violation"]["explanation"]),
            f"gradcheck-suite replay reports/counterexamples/{data['stored']}\n"
            f"python reports/counterexamples/{str(data['stored']).removesuffix('.json')}.py",
        )
        for data in (record.data for record in violated)
    )
    table = Table("Violations, and the commands that run them again", ("loop", "diagnosis", "why", "commands"), rows)
    return Section("counterexamples", "Counterexamples", tables=(table,), commands=commands_of(violated))


def claims(records: Sequence[Record], steps: Sequence[Mapping[str, Any]] = ()) -> Section:
    """Return the claims with their verdicts, and the loops that the sources print.

    Args:
        records: the claims' records.
        steps: the timed steps that the section on steps shows; the claim about them is answered from the same ones.
    """
    claimed = latest([r for r in records if "number" in r.data], lambda d: d["number"])
    on_cpu = [row for row in steps if row["device"] == "cpu"]
    loops = latest([r for r in records if "loop" in r.data], lambda d: d["loop"])
    if not claimed and not loops:
        return Section(
            "claims", "The claims", missing="The claims have not been tested yet: run `gradcheck-suite claims`."
        )
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(claimed, key=lambda r: (str(r.data.get("source", "")), _order(r.data["number"]))):
        data = {**record.data, **answer(on_cpu)} if record.data["number"] == STEPS and on_cpu else record.data
        by_source.setdefault(str(record.data.get("source", "")), []).append(data)
    tables = [
        Table(f"Claims of {source}", CLAIM_COLUMNS, tuple(map(_claim_row, datas)))
        for source, datas in by_source.items()
    ]
    if loops:
        rows = tuple(_loop_row(record.data) for record in loops)
        tables.append(Table("The loops that the sources print", LOOP_COLUMNS, rows))
    text = (
        "Three widely read explanations of gradient zeroing, put to the test. A verdict is `confirmed`, `refuted`, or "
        "`conditional`: true under the condition.",
    )
    return Section(
        "claims",
        "The claims",
        (*text, *standing([*claimed, *loops])),
        tuple(tables),
        commands=commands_of([*claimed, *loops]),
    )


def _claim_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    condition = f"\nTrue where: {data['condition']}" if data.get("condition") else ""
    return (
        str(data["number"]),
        str(data["text"]),
        str(data["verdict"]),
        f"{data['sentence']}{condition}",
        "\n".join(f"{name}: {_value(value)}" for name, value in data["figures"].items()),
        str(data["how"]),
        str(data["counterexample"]) or None,
    )


def _loop_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        str(data["loop"]),
        str(data["says"]),
        str(data["bare"]),
        str(data["why"]) if data.get("why") else None,
        data.get("needs"),
        str(data["within"]),
        "\n".join(map(str, data.get("smallest", ()))),
    )


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.removeprefix("C").split("."))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value)
