"""Plots of one violation: the weights of the items, and the elements of the gradient that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.charts.base import Rows, Spec, at_most, colours, layer, layers, name, number, tooltip
from gradcheck_suite.report.charts.theme import colour

WEIGHTS = {"expected": "c6", "observed": "c4"}
SIZES = {
    "within the bound": "good-soft",
    "up to 1e3 bounds": "warn-soft",
    "up to 1e6 bounds": "c5",
    "more": "bad",
}
"""How far an element is off -> its colour."""
CELL = 24


def weights_plot(weights: Rows) -> Spec:
    """Return the expected and the observed weight of each item as bars; rows have those of a violation's `weights`."""
    rows = [
        {
            "micro-batch": micro_batch(weight),
            "which": which,
            "weight": finite(weight[which]),
            "count": weight["count"],
        }
        for weight in weights
        for which in WEIGHTS
    ]
    bar = {
        "x": name("micro-batch", "micro-batch", axis={"labelAngle": 0}),
        "xOffset": {"field": "which", "sort": list(WEIGHTS)},
        "y": number("weight", "weight of each item", axis={"tickCount": 5}),
        "color": colours("which", WEIGHTS),
        "tooltip": tooltip(micro_batch="micro-batch", count="count", what="which", weight="weight"),
    }
    found = layers(rows, layer("bar", bar), layer("rule", {"y": {"datum": 0}}, color=colour("line")), height=200)
    return at_most(90 * len(weights) + 60, found)


def elements_plot(part: Mapping[str, Any]) -> Spec:
    """Return the heat map of a parameter's elements: how far each is off, in its bounds.

    Args:
        part: of a violation's evidence: `rows`, `columns`, `expected`, `observed`, `allowed`.
    """
    rows = [
        {
            "row": part["rows"][0] + i,
            "column": part["columns"][0] + j,
            "expected": expected,
            "observed": part["observed"][i][j],
            "allowed": part["allowed"][i][j],
            "off": size_of(expected, part["observed"][i][j], part["allowed"][i][j]),
        }
        for i, line in enumerate(part["expected"])
        for j, expected in enumerate(line)
    ]
    quiet = {"ticks": False, "domain": False, "grid": False, "labelAngle": 0, "labelOverlap": True}
    cell = {
        "x": name("column", "column", axis={**quiet, "orient": "top"}),
        "y": name("row", "row", axis=quiet),
        "color": {
            **colours("off", SIZES),
            "legend": {"title": "off by", "columns": 2, "symbolStrokeColor": colour("soft"), "symbolStrokeWidth": 1},
        },
        "tooltip": tooltip(row="row", column="column", expected="expected", observed="observed", allowed="allowed"),
    }
    count, columns = len(part["expected"]), part["columns"][1] - part["columns"][0]
    found = layers(rows, layer("rect", cell, stroke=colour("card"), strokeWidth=1), height=CELL * max(1, count))
    return at_most(max(320, 2 * CELL * columns + 40), found)


def size_of(expected: float | str, observed: float | str, allowed: float | str) -> str:
    """Return how far an element is off, a key of `SIZES`. Numbers that JSON does not have are strings."""
    within, small, large, above = SIZES
    if isinstance(expected, str) or isinstance(observed, str) or isinstance(allowed, str):
        return within if expected == observed else above
    error = abs(observed - expected)
    if error <= allowed:
        return within
    return small if error <= 1e3 * allowed else large if error <= 1e6 * allowed else above


def micro_batch(weight: Mapping[str, Any]) -> str:
    """Return the name of a micro-batch, with the rank that gets it where there are several."""
    rank = "" if weight.get("rank") is None else f", rank {weight['rank']}"
    return f"{weight['micro_batches']}{rank}"


def finite(value: float | str) -> float | None:
    """Return a number, or None in place of one that a plot cannot show."""
    return None if isinstance(value, str) else value


def table_rows(weights: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float | str, float | str, float | str], ...]:
    """Return the weights as the rows of a table."""
    return tuple((micro_batch(w), w["count"], w["expected"], w["observed"]) for w in weights)
