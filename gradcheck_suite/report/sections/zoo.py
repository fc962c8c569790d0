"""The scoreboard of known bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.evidence.zoo import NOT_EXPRESSED
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import counts_plot, scoreboard_plot
from gradcheck_suite.report.content import Cell, Figure, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest

KEY, TITLE, TAB = "zoo", "The zoo of known bugs", "zoo"
OURS = "gradcheck-suite"
ZOO_COLUMNS = (
    "number",
    "bug",
    "reported as",
    "mechanism",
    "found",
    "median cases",
    "median seconds",
    "smallest: windows, micro-batches, layers",
    "diagnosis",
    "missed by",
)


def zoo(records: Sequence[Record]) -> Section:
    """Return the scoreboard of known bugs: the latest run in float64 and the latest in each other dtype."""
    coarser = latest([record for record in records if record.data.get("dtype")], lambda data: data["dtype"])
    records = [record for record in records if not record.data.get("dtype")]
    if not records:
        return Section(KEY, TITLE, TAB, missing="The zoo has not been run yet: run `gradcheck-suite zoo`.")
    data = records[-1].data
    bugs, sound = data["bugs"], data["sound"]
    found = sum(b["found"] == b["runs"] for b in bugs)
    others: dict[str, int] = Counter()
    for bug in bugs:
        others.update({name: int(hit) for name, hit in bug["others"].items()})
    rows = tuple(
        (
            b["number"],
            b["name"],
            ", ".join(b["citations"]),
            b["mechanism"],
            f"{b['found']}/{b['runs']}",
            b["median_cases"],
            b["median_seconds"],
            f"{b['windows']}, {b['micro_batches']}, {b['layers']}",
            ", ".join(f"{name} ({count})" for name, count in b["names"].items()),
            ", ".join(name for name, hit in b["others"].items() if not hit) or None,
        )
        for b in bugs
    )
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            f"{found} of {len(bugs)} real bugs, re-created in a few lines each, are found in every one of "
            f"{data['seeds']} runs, {sum(b['rightly_named'] for b in bugs)} of {sum(b['runs'] for b in bugs)} runs "
            f"with a right diagnosis. The sound loops beside them were blamed in "
            f"{sum(bool(s['blamed']) for s in sound)} of {sum(s['cases'] for s in sound):,} cases.",
        ),
        figures=_figures(bugs, {OURS: found, **others}),
        tables=(
            Table("Known bugs", ZOO_COLUMNS, rows),
            Table(
                "Bugs found by other rules and by fixed tests",
                ("rule or fixed test", f"bugs found, of {len(bugs)}"),
                ((OURS, found), *sorted(others.items(), key=lambda item: -item[1])),
                "Rules compare the gradients of the case that first showed the bug, so they profit from the suite's "
                "search; each fixed test is one hand-written case, as trainers have them in their tests.",
            ),
            *([_coarser(coarser)] if coarser else []),
            Table("Reported bugs that are not in the zoo", ("number", "why"), tuple(NOT_EXPRESSED.items())),
        ),
        sources=sources((records[-1], *coarser)),
    )


def _coarser(records: Sequence[Record]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for data in (record.data for record in records):
        bugs, sound = data["bugs"], data["sound"]
        total = {name: sum(b[name] for b in bugs) for name in ("runs", "found", "within_rounding", "rightly_named")}
        unnamed = sum(b["unnamed"] for b in bugs)
        rows.append(
            (
                data["dtype"],
                *total.values(),
                unnamed,
                total["found"] - total["rightly_named"] - unnamed,
                sum(s["cases"] for s in sound),
                sum(bool(s["blamed"]) for s in sound),
            )
        )
    return Table(
        "The same bugs in other precisions",
        ("dtype", "runs", "found", "within rounding", "right diagnosis", "no diagnosis", "wrong diagnosis",
         "sound cases", "sound loops blamed"),
        tuple(rows),
        "Within rounding: the bug's effect on the smallest case that shows it in float64 is smaller than what rounding "
        "explains in this dtype. No diagnosis: found, but rounding hides the weights of the items.",
    )  # fmt: skip


def _figures(bugs: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> tuple[Figure, ...]:
    totals = dict(sorted(found.items(), key=lambda item: (item[0] != OURS, -item[1])))
    rows = [
        {"bug": f"{bug['number']} {bug['name']}", "method": method, "state": "found" if hit else "missed"}
        for bug in bugs
        for method, hit in _hits(bug, totals).items()
    ]
    said = "; ".join(f"{method} {count}" for method, count in totals.items())
    return (
        Figure(
            "zoo-totals",
            counts_plot(totals, "bugs found"),
            f"Bugs found, of {len(bugs)}: {said}",
            f"Bugs found, of {len(bugs)}, by the suite, by the tolerance rules of others and by fixed tests.",
        ),
        Figure(
            "zoo-scoreboard",
            scoreboard_plot(rows, list(totals)),
            f"Which of {len(bugs)} known bugs each rule and fixed test finds. The table of known bugs has the same.",
            "Every bug, and what finds it.",
        ),
    )


def _hits(bug: Mapping[str, Any], methods: Mapping[str, int]) -> dict[str, bool]:
    return {m: bug["found"] == bug["runs"] if m == OURS else bool(bug["others"].get(m)) for m in methods}
