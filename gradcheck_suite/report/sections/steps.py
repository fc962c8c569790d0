"""The steps of torch's optimizers in optax: where the formulas differ, and how far the parameters are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Section, Table
from gradcheck_suite.report.provenance import sources

COLUMNS = ("torch.optim", "in optax", "what differs, mapped exactly", "cases", "float64", "float32", "source")


def steps(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest comparison of each optimizer; None where there is none."""
    newest: dict[str, tuple[Record, Mapping[str, Any]]] = {}
    for record in records:
        rows = record.data.get("rows")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and isinstance(row.get("torch"), str):
                newest[row["torch"]] = record, row
    if not newest:
        return None
    found = [row for _, row in newest.values()]
    agree = sum(bool(row.get("agree")) for row in found)
    used = [record for record in records if any(record is other for other, _ in newest.values())]
    return Section(
        "steps",
        "The step of each optimizer, by torch and by optax",
        "trust",
        (
            f"Of {len(found)} optimizers of torch.optim, {agree} take the same steps as their counterpart in optax, "
            "within a bound on rounding errors that is derived through the step. Where the formulas differ by "
            "definition, the difference is computed, and no tolerance covers it. The dtypes' columns have the largest "
            "error over this bound: above 1, torch and optax differ.",
        ),
        tables=(Table("Optimizers and their counterparts", COLUMNS, tuple(map(_cells, found))),),
        sources=sources(used),
    )


def _cells(row: Mapping[str, Any]) -> tuple[str | int | float | None, ...]:
    outside = [f"not compared: {row['outside']}"] if row.get("outside") else []
    ratios = row.get("error_over_allowed") or {}
    texts = (row["torch"], row.get("optax"), "; ".join([*row.get("differs", ()), *outside]))
    return (*texts, row.get("cases"), ratios.get("float64"), ratios.get("float32"), row.get("source"))
