"""Plots of what the suite is judged by: coverage, claims, known bugs, detection, architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.charts.base import Rows, Spec, colours, layer, layers, name, number, tooltip
from gradcheck_suite.report.charts.theme import colour

ROW = 17
"""Pixels of a row in a plot of many rows."""
FOUND = {"found": "good-soft", "missed": "bad-soft"}


def counts_plot(counts: Mapping[str, float], title: str) -> Spec:
    """Return one bar for each name, the numbers at their ends."""
    rows = [{"name": key, "count": count} for key, count in counts.items()]
    place = {"y": name("name", axis={"grid": False, "ticks": False, "domain": False}), "x": number("count", title)}
    quiet = {**place, "x": number("count", title, axis=None)}
    return layers(
        rows,
        layer("bar", {**quiet, "tooltip": tooltip(name="name", count="count")}, color=colour("none"), height=ROW - 6),
        layer("text", {**quiet, "text": {"field": "count", "format": ",~g"}}, align="left", dx=4),
        height=ROW * len(rows),
    )


def bars_plot(rows: Rows, series: Mapping[str, str] | Sequence[str] = ()) -> Spec:
    """Return labelled bars in groups, each group on a scale of its own.

    Args:
        rows: with `group`, `name`, `share` (of the group's largest) and `text`.
        series: colours of the names; one colour for all if empty.
    """
    groups = list(dict.fromkeys(str(row["group"]) for row in rows))
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    place = {
        "y": name("group", axis={"ticks": False, "domain": False, "labelLimit": 300, "grid": False}),
        "x": number("share", None, axis=None, scale={"domain": [0, 1.35]}),
    }
    if len(names) > 1:
        place["yOffset"] = {"field": "name", "sort": names}
    shade = {"color": colours("name", series or names)} if len(names) > 1 else {}
    told = tooltip(what="group", mode="name", value="text")
    return layers(
        rows,
        layer("bar", {**place, **shade, "tooltip": told}, **({} if shade else {"color": colour("none")})),
        layer("text", {**place, "text": {"field": "text"}}, align="left", dx=4, fontSize=10),
        height=max(2, len(names)) * 13 * len(groups),
    )


def series_plot(series: Mapping[str, Sequence[float]], x: str, height: int = 90) -> Spec:
    """Return short series of numbers as lines over their index, from 1."""
    rows = [{"i": i + 1, "value": v, "series": key} for key, values in series.items() for i, v in enumerate(values)]
    line: dict[str, Any] = {
        "x": number("i", x, axis={"tickMinStep": 1, "grid": False, "format": "d"}),
        "y": number("value", None, axis={"tickCount": 4}),
        "color": colours("series", list(series)),
        "tooltip": tooltip(what="series", x="i", value="value"),
    }
    line["color"]["legend"] = {"title": None, "columns": 1}
    return layers(rows, layer("line", line, point={"filled": True, "size": 30}), height=height)


def scoreboard_plot(rows: Rows, methods: Sequence[str]) -> Spec:
    """Return the heat map of known bugs and of what finds them; rows have `bug`, `method` and `state`."""
    bugs = list(dict.fromkeys(str(row["bug"]) for row in rows))
    marks = {"found": "\N{CHECK MARK}", "missed": "\N{MULTIPLICATION SIGN}"}
    place = {
        "y": name("bug", axis={"ticks": False, "domain": False, "grid": False, "labelFontSize": 10.5}),
        "x": name("method", axis={"orient": "top", "labelAngle": -50, "ticks": False, "domain": False, "grid": False},
                  scale={"domain": list(methods)}),
    }  # fmt: skip
    fill = {**place, "color": colours("state", FOUND), "tooltip": tooltip(bug="bug", method="method", result="state")}
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
    axis = {"format": ".0e", "tickCount": 6}
    told = tooltip(architecture="name", error="error", bound="bound")
    return layers(
        rows,
        layer("tick", {**place, "x": number("bound", title, scale=scale, axis=axis), "tooltip": told},
              color=colour("bad"), thickness=2, height=ROW - 5),
        layer("point", {**place, "x": number("error", title, scale=scale, axis=axis), "tooltip": told},
              color=colour("none"), filled=True, size=42),
        height=ROW * len(list(dict.fromkeys(str(row["name"]) for row in rows))),
    )  # fmt: skip
