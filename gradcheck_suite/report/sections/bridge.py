"""Which real architectures the bridge carries over to JAX, and how well torch and JAX agree there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import against_bound_plot
from gradcheck_suite.report.content import Figure, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest

KEY, TITLE, TAB = "bridge", "Your own model in JAX", "trust"
NARROW_SHOWN = 3


def bridge(records: Sequence[Record]) -> Section:
    """Return the table of architectures."""
    if not records:
        return Section(
            KEY,
            TITLE,
            TAB,
            missing="No architecture has been carried over yet: run "
            "`pytest tests/bridge/test_architectures.py --full --bridge-records reports`, which needs transformers.",
        )
    current = latest(records, lambda d: (d["architecture"], d["version"], d["widened"]))
    refused = [record.data for record in current if "refused" in record.data]
    newest = [record.data for record in current if "refused" not in record.data]
    rows = _rows(newest, refused)
    agree = sum(data["gradient_error"] <= data["allowed"] for data in newest if not data["widened"])
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            "`verify --problem` asks JAX about your own model, too: torch exports the loss, the suite translates it to "
            f"JAX operation by operation, and JAX alone differentiates it. Tried on {len(rows)} architectures of "
            f"transformers and torch.nn, small, with random weights, in float64: {agree} gradients agree with torch's "
            f"within the bound, and {len(refused)} are refused by name.",
        ),
        figures=(_figure(newest),),
        tables=(
            Table(
                "Architectures",
                (
                    "architecture",
                    "version",
                    "operations",
                    "loss off by",
                    "gradient off by",
                    "bound",
                    "with float32 parts in float64",
                    "computed in float32 by the model",
                ),
                rows,
                "Gradients' differences are those of the worst entry, over the largest entry of all gradients. Where a "
                "model computes parts in float32 whatever its own dtype, the bound is two float32 roundoffs for each "
                "such operation, and the model is held to 1e-10 with these parts in float64.",
            ),
        ),
        sources=sources(current),
    )


def _rows(newest: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of the table: first the architectures that JAX computes, then those that are refused."""
    wide = {(d["architecture"], d["version"]): d for d in newest if d["widened"]}
    rows: list[tuple[Any, ...]] = []
    for data in (d for d in newest if not d["widened"]):
        other = wide.get((data["architecture"], data["version"]))
        narrow = data["narrow"]
        shown = ", ".join(narrow[:NARROW_SHOWN]) + (f" and {len(narrow) - NARROW_SHOWN} more" if narrow[3:] else "")
        rows.append(
            (
                data["architecture"],
                f"{data['package']} {data['version']}",
                data["operations"],
                data["loss_error"],
                data["gradient_error"],
                data["allowed"],
                None if other is None else other["gradient_error"],
                shown or None,
            )
        )
    for data in refused:
        nothing = (None,) * 5
        rows.append(
            (data["architecture"], f"{data['package']} {data['version']}", *nothing, f"refused: {data['refused']}")
        )
    return tuple(rows)


def _figure(datas: Sequence[Mapping[str, Any]]) -> Figure:
    rows = [
        {
            "name": f"{data['architecture']} {data['version']}",
            "error": float(data["gradient_error"]),
            "bound": float(data["allowed"]),
        }
        for data in datas
        if not data["widened"]
    ]
    return Figure(
        "architectures",
        against_bound_plot(rows, "difference of the gradients"),
        "Difference between torch's and JAX's gradient for each architecture, beside its bound: "
        + "; ".join(f"{row['name']} {row['error']:.1e} of {row['bound']:.0e}" for row in rows),
        "Points: difference between torch's and JAX's gradient. Ticks: the bound.",
    )
