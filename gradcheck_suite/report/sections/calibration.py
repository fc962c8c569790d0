"""The error rates of the suite: how often it blames a sound loop, and how small an error it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.evidence.calibration import summary
from gradcheck_suite.evidence.calibration.curve import OURS, Curve, curve_from_json, exponents, share_found
from gradcheck_suite.evidence.calibration.tally import spread_from_json
from gradcheck_suite.numerics.baselines import RIVALS
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import detection_plot
from gradcheck_suite.report.content import Cell, Figure, Section, Table
from gradcheck_suite.report.provenance import sources

PLOTTED = "everywhere"
KEY, TITLE, TAB = "calibration", "How far the verdicts can be trusted", "trust"


def calibration(records: Sequence[Record]) -> Section:
    """Return the section on false alarms and on the detection of planted errors."""
    if not records:
        return Section(
            KEY, TITLE, TAB, missing="The bounds have not been calibrated yet: run `gradcheck-suite calibrate`."
        )
    data = records[-1].data
    alarms, coverage = summary.false_alarms(data), data["coverage"]
    reached = ", ".join(
        f"{part['reached']} of {part['reached'] + len(part['missing'])} kinds of {what}"
        for what, part in coverage.items()
    )
    worse = summary.better(data)
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            f"False alarms: {alarms} in {summary.checks(data):,} checks. A check judges a training loop that is known "
            f"to be right on a random case; {data['loops']} such loops were judged. The cases reached {reached} that "
            "the suite could draw at that time.",
            "Missed errors: right gradients were multiplied by 1 + s or 1 - s, and the suite was asked whether they "
            "are still right. The plots show in how many cases it says no, against s. A curve further left finds "
            "smaller errors. The other curves are tolerance rules of other tools. A rule is only worth comparing where "
            f"it blames no right loop. The second table has the smallest s that is found in {summary.percent()} of the "
            "cases. " + ("; ".join(worse) if worse else _nothing_better(data)),
        ),
        figures=_figures(data),
        tables=(_alarms(data), _detection(data), _skipped(data), _ratios(data)),
        sources=sources(records[-1:]),
    )


def _nothing_better(data: Mapping[str, Any]) -> str:
    """Return in which dtypes a rule can be compared and finds no smaller error, and what is found in the others."""
    alone = {row.dtype: row.sizes[OURS] for row in summary.found(data) if row.place == PLOTTED}
    compared = [dtype for dtype in alone if not all(summary.rival_alarms(data, dtype).values())]
    said = []
    if compared:
        said.append(f"In {' and '.join(compared)} no rule that blames no right loop finds smaller errors.")
    for dtype, size in alone.items():
        if dtype not in compared:
            found = "finds no error up to a factor of 2" if size is None else f"needs an error of {summary.shown(size)}"
            said.append(f"In {dtype} every other rule blames right loops; the suite {found}, planted {PLOTTED}.")
    return " ".join(said)


def _alarms(data: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for dtype, tally in data["alarms"].items():
        drawn = spread_from_json(tally["drawn_on"])
        rows.append(
            (
                dtype,
                tally["judged"],
                tally["elements"],
                len(tally["alarms"]),
                sum(drawn.counts),
                drawn.largest,
                tally["judged"] - tally["autocast"],
                *summary.rival_alarms(data, dtype).values(),
            )
        )
    return Table(
        "False alarms: right loops that were judged, and how many were blamed",
        (
            "dtype",
            "checks",
            "elements compared",
            "false alarms",
            "gradients that needed sampled rounding errors",
            "largest error over bound then",
            "checks without autocast",
            *(f"blamed by {rule}" for rule in RIVALS),
        ),
        tuple(rows),
        "A check is one loop judged on one case. Most errors are within the part of the bound that is computed; only "
        "the others need rounding errors that are sampled (Monte Carlo). Other rules compare with the large batch in "
        "the same dtype; losses under an autocast are left out for them.",
    )


def _detection(data: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in summary.found(data):
        alarms = summary.rival_alarms(data, row.dtype)
        rivals = [summary.shown(row.sizes[rule]) + (" *" if alarms[rule] else "") for rule in RIVALS]
        sure = None if row.at_least is None else f"{100 * row.at_least:.1f}%"
        rows.append(
            (row.dtype, row.place, row.cases, summary.shown(row.sizes[OURS]), sure, summary.shown(row.half), *rivals)
        )
    return Table(
        f"Smallest relative error found in {summary.percent()} of the cases",
        ("dtype", "planted in", "cases", OURS, "of all cases at least", f"{OURS}, in half of them", *RIVALS),
        tuple(rows),
        "* also blames right loops in this dtype. Of all cases at least: the lower end of a 95% interval (Wilson) for "
        "the share in which the suite finds an error of that size. An element that is 0 stays 0 under a factor, so "
        "errors are planted in the largest element and in one drawn from those that are not 0, some of which are "
        "rounding errors only.",
    )


def _skipped(data: Mapping[str, Any]) -> Table:
    rows = [(dtype, why, n) for dtype, tally in data["alarms"].items() for why, n in tally["skipped"].items()]
    return Table(
        "Checks that could not be made, because the gradient of the large batch cannot be computed",
        ("dtype", "why", "checks"),
        tuple(rows),
    )


def _ratios(data: Mapping[str, Any]) -> Table:
    dtypes = list(data["alarms"])
    kinds = sorted({kind for tally in data["alarms"].values() for kind in tally["over"] if kind})
    rows = [(kind, _checks(data, kind), *(_spread(data, dtype, kind) for dtype in dtypes)) for kind in kinds]
    return Table(
        "Largest error over bound, by kind of layer: median, 99% and largest of the checks whose case has it",
        ("layer", "checks", *dtypes),
        tuple(rows),
        "The bound is its deterministic part where the error is within that, otherwise the whole bound.",
    )


def _checks(data: Mapping[str, Any], kind: str) -> int:
    return sum(int(tally["layers"].get(kind, 0)) for tally in data["alarms"].values())


def _spread(data: Mapping[str, Any], dtype: str, kind: str) -> str | None:
    if (counted := data["alarms"][dtype]["over"].get(kind)) is None:
        return None
    spread = spread_from_json(counted)
    values = (spread.quantile(0.5), spread.quantile(0.99), spread.largest)
    return " / ".join(f"{value:.2f}" for value in values if value is not None)


def _figures(data: Mapping[str, Any]) -> tuple[Figure, ...]:
    return tuple(
        _figure(dtype, curve, summary.rival_alarms(data, dtype))
        for dtype, found in data["curves"].items()
        if PLOTTED in (curve := curve_from_json(found)).smallest
    )


def _figure(dtype: str, curve: Curve, alarms: Mapping[str, int | None]) -> Figure:
    rules = curve.smallest[PLOTTED]
    names = {rule: f"{rule} *" if alarms.get(rule) else rule for rule in (OURS, *RIVALS)}
    rows = [
        {"rule": name, "size": 2.0**-k, "share": 100 * share_found(rules[rule], k)}
        for rule, name in names.items()
        for k in exponents(dtype)
    ]
    return Figure(
        f"detection-{dtype}",
        detection_plot(rows, tuple(names.values())),
        f"Share of cases in which an error of a size is found against the size, one line per rule, {dtype}",
        f"{dtype}: how often a gradient that is wrong by the factor 1 + s or 1 - s is found, in "
        f"{sum(rules[OURS].values())} cases. "
        "* also blames right loops.",
    )
