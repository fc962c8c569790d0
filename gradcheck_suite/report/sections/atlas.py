"""Where torch and JAX choose different derivatives: kinks, ties and limits."""

from __future__ import annotations

from collections.abc import Sequence

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
    counts = {"torch and JAX agree": agree, "they choose differently": len(rows) - agree}
    return Section(
        "atlas",
        "Where torch and JAX choose different derivatives",
        "atlas",
        (f"At {len(rows):,} points where the derivative is a choice, torch and JAX agree in {agree:,}.",),
        figures=(
            Figure(
                "atlas-agreement",
                counts_plot(counts, "points"),
                "; ".join(f"{name}: {count:,}" for name, count in counts.items()),
                "Points at which the derivative is a choice.",
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
    return value if value is None or isinstance(value, str | int | float) else str(value)
