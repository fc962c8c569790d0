"""Plots of what the suite is judged by: coverage, claims, known bugs, detection, architectures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.charts.base import (
    Rows,
    Spec,
    at_least,
    colours,
    layer,
    layers,
    name,
    number,
    shades,
    tooltip,
)
from gradcheck_suite.report.charts.theme import colour

LINES = "split(datum.label, '\\n')"
"""Vega's expression for a label in lines."""
WRAP = 28
"""Letters of a line."""
ROW = 17
"""Pixels of a row in a plot of many rows."""
COLUMN, LABELS = 28, 300
"""Pixels of a column of the scoreboard, at least, and of the names beside the columns."""
FOUND = {"found": "good-soft", "missed": "bad-soft"}


def counts_plot(counts: Mapping[str, float], title: str) -> Spec:
    """Return one bar for each name, the numbers at their ends."""
    names = [_wrapped(key) for key in counts]
    rows = [{"name": key, "count": count} for key, count in zip(names, counts.values(), strict=True)]
    axis = {"grid": False, "ticks": False, "domain": False, "labelExpr": LINES}
    # beside the longest bar is room for its number
    scale = {"domain": [0, 1.3 * max(counts.values(), default=1) or 1], "nice": False}
    place = {"y": name("name", axis=axis), "x": number("count", title, axis=None, scale=scale)}
    return layers(
        rows,
        layer("bar", {**place, "tooltip": tooltip(name="name", count="count")}, color=colour("c6"), height=ROW - 6),
        layer("text", {**place, "text": {"field": "count", "format": ",~g"}}, align="left", dx=4),
        height=_row(names, ROW) * len(rows),
    )


def bars_plot(rows: Rows) -> Spec:
    """Return labelled bars in groups, all on one scale from 0; rows have `group`, `name`, `value` and `text`.

    Where there are several names, they are reset modes and have their colours.
    """
    rows = [{**row, "group": _wrapped(str(row["group"]))} for row in rows]
    groups = list(dict.fromkeys(str(row["group"]) for row in rows))
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    axis = {"ticks": False, "domain": False, "labelLimit": 300, "grid": False, "labelExpr": LINES}
    top = 1.5 * max(float(row["value"]) for row in rows) or 1.0
    place = {
        "y": name("group", axis=axis),
        "x": number("value", None, axis=None, scale={"domain": [0, top], "nice": False}),
    }
    if len(names) > 1:
        place["yOffset"] = {"field": "name", "sort": names}
    shade = {"color": colours("name", shades(names))} if len(names) > 1 else {}
    told = tooltip(what="group", mode="name", value="text")
    return layers(
        rows,
        layer("bar", {**place, **shade, "tooltip": told}, **({} if shade else {"color": colour("c6")})),
        layer("text", {**place, "text": {"field": "text"}}, align="left", dx=4, fontSize=10),
        height=_row(groups, 13 * max(2, len(names))) * len(groups),
    )


def _wrapped(text: str) -> str:
    """Return a name in lines that leave room for the plot on a narrow screen."""
    return "\n".join(textwrap.wrap(text, WRAP, break_on_hyphens=False)) or text


def _row(names: Sequence[str], least: int) -> int:
    """Return the pixels of a row that has room for the lines of every name."""
    return max([least, *(13 * len(key.splitlines()) + 8 for key in names if "\n" in key)])


def scoreboard_plot(rows: Rows, methods: Sequence[str]) -> Spec:
    """Return the heat map of known bugs and of what finds them; rows have `bug`, `method` and `state`."""
    bugs = list(dict.fromkeys(str(row["bug"]) for row in rows))
    marks = {"found": "\N{CHECK MARK}", "missed": "\N{MULTIPLICATION SIGN}"}
    place: dict[str, Any] = {
        "y": name("bug", axis={"ticks": False, "domain": False, "grid": False, "labelFontSize": 10.5}),
        "x": name("method", axis={"orient": "top", "labelAngle": -50, "ticks": False, "domain": False, "grid": False},
                  scale={"domain": list(methods)}),
    }  # fmt: skip
    place["tooltip"] = tooltip(bug="bug", method="method", result="state")
    fill = {**place, "color": colours("state", FOUND)}
    fill["color"]["legend"] = {"title": None, "symbolStrokeColor": colour("soft"), "symbolStrokeWidth": 1}
    rows = [{**row, "sign": marks[row["state"]]} for row in rows]
    ink = {"field": "state", "type": "nominal", "legend": None,
           "scale": {"domain": list(FOUND), "range": [colour("good"), colour("bad")]}}  # fmt: skip
    found = layers(
        rows,
        layer("rect", fill, stroke=colour("card"), strokeWidth=1),
        layer("text", {**place, "text": {"field": "sign"}, "color": ink}, fontSize=10),
        height=ROW * len(bugs),
    )
    # the slanted names of the last columns need room
    apart = {"resolve": {"scale": {"color": "independent"}, "legend": {"color": "independent"}}}
    found = at_least(LABELS + COLUMN * len(methods), found)
    return {**found, **apart, "padding": {"left": 2, "right": 90, "top": 4, "bottom": 2}}


def detection_plot(rows: Rows, rules: Sequence[str], height: int = 190) -> Spec:
    """Return the share of cases in which each rule finds an error of a size; rows have `size`, `share` and `rule`."""
    line: dict[str, Any] = {
        "x": number("size", "s: relative size of the error", scale={"type": "log"},
                    axis={"format": ".0e", "tickCount": 6, "grid": False}),
        "y": number("share", "% of cases found", scale={"domain": [0, 100]}, axis={"tickCount": 5}),
        "color": colours("rule", rules),
        "strokeDash": {"field": "rule", "type": "nominal", "sort": list(rules)},
        "tooltip": tooltip(rule="rule", size="size", percent="share"),
    }  # fmt: skip
    line["color"]["legend"] = {"title": None, "columns": 2}
    return layers(rows, layer("line", line, strokeWidth=2), height=height)


def against_bound_plot(rows: Rows, title: str) -> Spec:
    """Return errors as points beside their bounds on a logarithmic axis; rows have `name`, `error` and `bound`."""
    rows = [{**row, "error": max(float(row["error"]), 1e-17)} for row in rows]
    place = {"y": name("name", axis={"grid": True, "ticks": False, "domain": False, "labelFontSize": 10.5})}
    scale = {"type": "log", "domainMin": 1e-17}
    axis = {"format": ".0e", "tickCount": 6, "titleAnchor": "end"}
    told = tooltip(architecture="name", error="error", bound="bound")
    return layers(
        rows,
        layer("tick", {**place, "x": number("bound", title, scale=scale, axis=axis), "tooltip": told},
              color=colour("bad"), thickness=2, height=ROW - 5),
        layer("point", {**place, "x": number("error", title, scale=scale, axis=axis), "tooltip": told},
              color=colour("c1"), filled=True, size=42),
        height=ROW * len(list(dict.fromkeys(str(row["name"]) for row in rows))),
    )  # fmt: skip
