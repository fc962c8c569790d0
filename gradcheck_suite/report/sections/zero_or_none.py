"""What a gradient of zeros does to a parameter and its optimizer state that None does not, for every optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest

COMMAND = "pytest properties/benchmarks/bench_zero_or_none.py --bench-records reports"
VARIANTS = ("plain", "momentum", "weight decay")
"""The settings that have a column of their own."""
Rows = Mapping[str, Mapping[str, Any]]


def zero_or_none(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest row of each optimizer and settings; None where there is none."""
    newest = latest(records, lambda d: (d.get("optimizer"), d.get("variant")))
    if not newest:
        return None
    optimizers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in newest:
        optimizers.setdefault(str(record.data["optimizer"]), {})[str(record.data["variant"])] = record.data
    every = [row for rows in optimizers.values() for row in rows.values()]
    predicted = sum(bool(row["as_predicted"]) for row in every)
    return Section(
        "zero-or-none",
        "What zeros do that None does not",
        "atlas",
        (
            "No item of the window uses this parameter. After a release its gradient is None and the optimizer skips "
            "it. After zeroing its gradient is zero, and the optimizer steps on it.",
            " ".join(_moved(optimizers)),
            f"torch did what both derivations predict in {predicted} of {len(every)} settings.",
        ),
        tables=(
            Table(
                "One step on a parameter that no item of the window uses",
                ("optimizer", *(f"zeros change, {name}" for name in VARIANTS), "None changes", "same", "law of zeros"),
                tuple(_summary(name, rows) for name, rows in optimizers.items()),
                "Two windows reach the parameter before, so that averages and momentum are not zero.",
            ),
            Table(
                "The same for all settings, with an element of the parameter",
                ("optimizer", "settings", "before", "after zeros", "after None", "zeros change", "to the bit",
                 "as predicted"),
                tuple(_line(row) for row in every),
                "To the bit: every operation of the prediction is exact in float64, so that no error is allowed.",
            ),
        ),
        sources=sources(newest),
    )  # fmt: skip


def moved_by_zeros(records: Sequence[Record]) -> list[str]:
    """Return the optimizers that by default step on a gradient of zeros and skip None, `Adam` first."""
    newest = latest(records, lambda d: (d.get("optimizer"), d.get("variant")))
    plain = [record.data for record in newest if record.data.get("variant") == VARIANTS[0]]
    return sorted(
        (str(row["optimizer"]) for row in plain if _moves_alone(row)), key=lambda name: (name != "Adam", name)
    )


def _moved(optimizers: Mapping[str, Rows]) -> list[str]:
    """Return a sentence for each of `VARIANTS`: which optimizers move the parameter under zeros alone."""
    sentences, known = [], set[str]()
    for variant, start in zip(
        VARIANTS, ("Zeros alone move it", "With momentum also", "With weight decay also"), strict=True
    ):
        named = [name for name, rows in optimizers.items() if name not in known and _moves_alone(rows.get(variant))]
        known |= set(named)
        sentences += [f"{start} under {', '.join(named)}."] if named else []
    return sentences


def _moves_alone(row: Mapping[str, Any] | None) -> bool:
    return row is not None and "parameter" in row["zero_changes"] and "parameter" not in row["none_changes"]


def _listed(row: Mapping[str, Any] | None, which: str) -> str | None:
    return None if row is None else ", ".join(row[which]) or "nothing"


def _summary(name: str, rows: Rows) -> tuple[Cell, ...]:
    same = {bool(row["same"]) for row in rows.values()}
    words = {frozenset({True}): "always", frozenset({False}): "never"}.get(frozenset(same), "in some settings")
    none = next((found for row in rows.values() if (found := _listed(row, "none_changes")) != "nothing"), "nothing")
    changes = (_listed(rows.get(variant), "zero_changes") for variant in VARIANTS)
    return (name, *changes, none, words, str(next(iter(rows.values()))["law"]))


def _line(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    values = (float(row[name]) for name in ("before", "after_zero", "after_none"))
    settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items()) or "torch's defaults"
    exact, predicted = ("yes" if row[name] else "no" for name in ("to_the_bit", "as_predicted"))
    return (str(row["optimizer"]), settings, *values, _listed(row, "zero_changes"), exact, predicted)
