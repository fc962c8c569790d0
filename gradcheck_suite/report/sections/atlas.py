"""Where torch and JAX choose different derivatives: kinks, ties and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import counts_plot
from gradcheck_suite.report.content import Figure, Section, Table
from gradcheck_suite.report.provenance import sources

COLUMNS = ("operation", "point", "dtype", "torch", "jax", "agree", "convention")


def atlas(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest atlas; None where there is none."""
    whole = [record for record in records if isinstance(record.data.get("rows"), list)]
    if not whole:
        return None
    rows = [row for row in whole[-1].data["rows"] if isinstance(row, dict)]
    agree = sum(bool(row.get("agree")) for row in rows)
    points = len({(row.get("operation"), row.get("point")) for row in rows})
    dtypes = {row.get("dtype") for row in rows}
    counts = {"torch and JAX agree": agree, "they choose differently": len(rows) - agree}
    return Section(
        "atlas",
        "Where torch and JAX choose different derivatives",
        "atlas",
        (
            f"{points:,} points at kinks, ties and limits, in {counted(len(dtypes), 'dtype')}: of these {len(rows):,} "
            f"derivatives, torch and JAX agree in {agree:,}.",
        ),
        figures=(
            Figure(
                "atlas-agreement",
                counts_plot(counts, "points"),
                "; ".join(f"{name}: {count:,}" for name, count in counts.items()),
                f"Derivatives at kinks, ties and limits: {points:,} points in {counted(len(dtypes), 'dtype')}.",
            ),
        ),
        tables=(
            Table(
                "Points and the derivatives that torch and JAX choose",
                COLUMNS,
                tuple(tuple(_cell(row.get(name)) for name in COLUMNS) for row in rows),
            ),
        ),
        sources=sources(whole[-1:]),
    )


def _cell(value: object) -> str | int | float | None:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_numbers(numbers)}" for name, numbers in value.items())
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _numbers(value: object) -> str:
    """Return nested lists of numbers without brackets, each inner list after a bar."""
    if isinstance(value, list):
        inner = any(isinstance(part, list) for part in value)
        return (" | " if inner else ", ").join(map(_numbers, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)
