"""The plots of the report: plain numbers in, Vega-Lite specifications out.

Nothing here reads records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.page.charts import (
    LINES,
    ROW,
    SERIES,
    Rows,
    Spec,
    colour,
    colours,
    layer,
    layers,
    name,
    number,
    row_height,
    sized,
    tooltip,
    wrapped,
)

COLOURS = {
    "zero_": "zero",
    "None": "none",
    "set_to_none": "none",
    "zero_grad": "c4",
    "zero_grad_foreach": "c5",
    "flat_buffer": "c3",
    "grad_none": "c1",
    "jax_scan_carry": "c6",
}
"""Reset mode -> its colour in every plot. No other series has the colours of `zero_` and None."""


def shades(modes: Sequence[str]) -> dict[str, str]:
    """Return the colour of each reset mode, the same in every plot.

    Other names get the remaining colours in turn.
    """
    rest = [shade for shade in SERIES if shade not in {COLOURS.get(mode) for mode in modes}]
    unknown = [mode for mode in modes if mode not in COLOURS]
    return {mode: COLOURS.get(mode) or rest[unknown.index(mode) % len(rest)] for mode in modes}


# Plots of time and memory.


CATEGORIES = {
    "parameters": ("parameters", "c6"), "gradients": ("gradients", "c3"), "optimizer state": ("optimizer state", "c4"),
    "activations": ("activations", "c5"), "temporaries": ("temporaries", "c1"),
    "other": ("micro-batches and scalars", "c2"),
}  # fmt: skip
"""Category of the ledger -> what the plot calls it, and its colour."""
RATIO = "time, None / zero_"
SMALLEST = 0.01
"""Share of the peak below which a category is left out: it would be thinner than a line."""


def ratio_plot(rows: Rows, height: int = 200) -> Spec:
    """Return the plot of step times under None over those under `zero_`, with intervals where they
    are known.

    Args:
        rows: with `size`, `setting`, `ratio`, and `low` and `high` or None in their place.
        height: of the plot.
    """
    settings = list(dict.fromkeys(str(row["setting"]) for row in rows))
    place: dict[str, Any] = {
        "x": {
            "field": "size", "type": "ordinal", "sort": None, "title": "parameters", "axis": {"labelAngle": 0},
            "scale": {"paddingInner": 0.5, "paddingOuter": 0.25},
        },
        "xOffset": {"field": "setting", "sort": settings}, "color": colours("setting", settings),
    }  # fmt: skip
    place["color"]["legend"]["columns"] = 2
    low = min([0.9, *(row["low"] or row["ratio"] for row in rows)])
    high = max([1.1, *(row["high"] or row["ratio"] for row in rows)])
    scale = {"domain": [low, high], "zero": False, "nice": True}
    told = tooltip(setting="setting", ratio="ratio", from_="low", to="high")
    axis = {"tickCount": 5, "format": ".2f"}
    return layers(
        rows,
        layer("rule", {"y": {"datum": 1}}, color=colour("soft"), strokeDash=[4, 3]),
        layer("rule", {**place, "y": number("low", RATIO, scale=scale), "y2": {"field": "high"}}, strokeWidth=2),
        layer("point", {**place, "y": number("ratio", RATIO, scale=scale, axis=axis), "tooltip": told}, filled=True,
              size=30, opacity=1),
        height=height,
    )  # fmt: skip


def window_memory_plot(
    traces: Mapping[str, Mapping[str, Sequence[int]]], height: int = 200
) -> Spec:
    """Return the plots of the bytes alive after each operation of one window, one beside the other.

    What takes less than a hundredth of the peak is left out.

    Args:
        traces: mode -> category -> bytes alive, operation by operation.
        height: of the plots.
    """
    top = max(
        sum(column) for trace in traces.values() for column in zip(*trace.values(), strict=True)
    )
    largest = {c: max(max(trace.get(c) or (0,)) for trace in traces.values()) for c in CATEGORIES}
    drawn = [category for category, size in largest.items() if size > SMALLEST * top]
    longest = max(len(column) for trace in traces.values() for column in trace.values())
    ends = (longest, top / 2**20)
    panels = [_memory_panel(mode, trace, drawn, ends, height) for mode, trace in traces.items()]
    return {"hconcat": panels, "spacing": 12, "resolve": {"scale": {"color": "shared"}}}


def _memory_panel(
    mode: str,
    trace: Mapping[str, Sequence[int]],
    drawn: Sequence[str],
    ends: tuple[int, float],
    height: int,
) -> Spec:
    rows = [
        {"operation": i, "category": CATEGORIES[category][0], "MiB": count / 2**20, "order": order}
        for order, category in enumerate(drawn)
        # the last moment is drawn as wide as the others
        for i, count in enumerate((*trace.get(category, ()), *trace.get(category, ())[-1:]))
    ]
    encoding: dict[str, Any] = {
        "x": number(
            "operation",
            "operations of one window",
            scale={"domain": [0, ends[0]], "nice": False},
            axis={"grid": False, "tickCount": 4},
        ),
        "y": number(
            "MiB",
            "MiB alive",
            stack="zero",
            scale={"domain": [0, ends[1]], "nice": True},
            axis={"tickCount": 4},
        ),
        "color": colours("category", dict(CATEGORIES[category] for category in drawn)),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": tooltip(after_operation="operation", category="category", MiB="MiB"),
    }
    return layers(
        rows, layer("area", encoding, interpolate="step-after"), height=height, title=mode
    )


def times_plot(rows: Rows, *, x: str, y: str, height: int = 260) -> Spec:
    """Return times against sizes on logarithmic axes.

    Rows have `x`, `y`, `mode` (a colour) and `layout` (a dash).
    """
    modes, layouts = (
        list(dict.fromkeys(str(row[which]) for row in rows)) for which in ("mode", "layout")
    )
    # Vega-Lite gives the samples no colour of their own beside a colour legend
    ink = {
        "stroke": {"value": colour("text")},
        "strokeWidth": {"value": 2},
        "opacity": {"value": 1},
    }
    line = {
        "x": number("x", x, scale={"type": "log"}, axis={"tickCount": 5, "format": "~s"}),
        "y": number("y", y, scale={"type": "log"}, axis={"tickCount": 5, "format": "~g"}),
        "color": colours("mode", shades(modes)),
        "strokeDash": {
            "field": "layout", "type": "nominal", "sort": layouts,
            "legend": {
                "title": None, "symbolType": "stroke", "symbolSize": 300, "encode": {"symbols": {"update": ink}},
            },
        },
        "tooltip": tooltip(mode="mode", tensors="layout", x="x", y="y"),
    }  # fmt: skip
    return layers(rows, layer("line", line, point={"filled": True, "size": 30}), height=height)


def peaks_plot(rows: Rows, height: int = 220) -> Spec:
    """Return bars of memory; rows have `setting`, `mode` and `MiB`."""
    modes = list(dict.fromkeys(str(row["mode"]) for row in rows))
    bar = {
        "x": {
            "field": "setting",
            "type": "ordinal",
            "sort": None,
            "title": None,
            "axis": {"labelAngle": 0},
        },
        "xOffset": {"field": "mode", "sort": modes},
        "y": number("MiB", "peak above zero, MiB", axis={"tickCount": 5}),
        "color": colours("mode", shades(modes)),
        "tooltip": tooltip(setting="setting", mode="mode", MiB="MiB"),
    }
    return layers(rows, layer("bar", bar), height=height)


# Two small drawings of where zeroing and releasing differ. Their numbers follow from the definition
# of SGD.
#
# `studies/tests/report/test_charts.py` runs the same steps in torch.


LEARNING_RATE, MOMENTUM = 0.1, 0.9
STEPS = 8
MODES = ("zero_", "None")
GIVEN = (2.0, 3.0)
"""The gradients of two windows; a reference to the first one's `.grad` is kept."""


def unused_parameter() -> dict[str, list[float]]:
    """Return a parameter after each step of SGD with momentum.

    Only the first window reaches it, with gradient 1. Zeros are a gradient: the momentum decays and
    moves the parameter on. None is none: the optimizer skips it.
    """
    found: dict[str, list[float]] = {}
    for mode in MODES:
        value, velocity, path = 1.0, 0.0, []
        for step in range(STEPS):
            if step == 0 or mode == "zero_":
                velocity = MOMENTUM * velocity + (1.0 if step == 0 else 0.0)
                value -= LEARNING_RATE * velocity
            path.append(value)
        found[mode] = path
    return found


def kept_gradient() -> dict[str, list[float]]:
    """Return what a kept reference to `.grad` reads after the backward, after the reset and after
    the next backward.
    """
    first, second = GIVEN
    return {"zero_": [first, 0.0, second], "None": [first, first, first]}


def unused_parameter_plot(height: int = 120) -> Spec:
    """Return the plot of an unused parameter under both modes."""
    rows = [
        {"step": step + 1, "value": value, "mode": mode}
        for mode, path in unused_parameter().items()
        for step, value in enumerate(path)
    ]
    line = {
        "x": number("step", "step", axis={"tickMinStep": 1, "grid": False, "format": "d"}),
        "y": number("value", "parameter", scale={"domainMin": 0}, axis={"tickCount": 4}),
        "color": colours("mode", shades(MODES)),
        "tooltip": tooltip(mode="mode", step="step", value="value"),
    }
    return layers(rows, layer("line", line, point={"filled": True, "size": 22}), height=height)


def kept_gradient_plot(height: int = 120) -> Spec:
    """Return the plot of a kept gradient under both modes."""
    places = ("backward", "reset", "backward again")
    rows = [
        {"place": place, "value": value, "mode": mode}
        for mode, values in kept_gradient().items()
        for place, value in zip(places, values, strict=True)
    ]
    shared = {
        "x": {"field": "place", "type": "ordinal", "sort": None, "title": None,
              "axis": {"labelAngle": 0, "labelExpr": "split(datum.label, ' ')"}},
        "y": number("value", "kept", scale={"domain": [0, max(GIVEN) + 0.5]}, axis={"tickCount": 4}),
        "color": colours("mode", shades(MODES)),
        "tooltip": tooltip(mode="mode", after="place", value="value"),
    }  # fmt: skip
    return layers(
        rows, layer("line", shared, strokeWidth=2), layer("point", shared, filled=True, size=40, opacity=1),
        layer("rule", {"y": {"datum": 0}}, color=colour("line")), height=height,
    )  # fmt: skip


# Plots of what the suite is judged by: coverage, claims, known bugs, detection, architectures.


COLUMN, LABELS = 28, 300
"""Pixels of a column of the scoreboard, at least, and of the names beside the columns."""
FOUND = {"found": "good-soft", "missed": "bad-soft"}


def bars_plot(rows: Rows) -> Spec:
    """Return labelled bars in groups, all on one scale from 0.

    Rows have `group`, `name`, `value` and `text`. Where there are several names, they are reset
    modes and have their colours.
    """
    rows = [{**row, "group": wrapped(str(row["group"]))} for row in rows]
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
        layer(
            "bar", {**place, **shade, "tooltip": told}, **({} if shade else {"color": colour("c6")})
        ),
        layer("text", {**place, "text": {"field": "text"}}, align="left", dx=4, fontSize=10),
        height=row_height(groups, 13 * max(2, len(names))) * len(groups),
    )


def scoreboard_plot(rows: Rows, methods: Sequence[str]) -> Spec:
    """Return the heat map of known bugs and of what finds them.

    Rows have `bug`, `method` and `state`.
    """
    bugs = list(dict.fromkeys(str(row["bug"]) for row in rows))
    marks = {"found": "\N{CHECK MARK}", "missed": "\N{MULTIPLICATION SIGN}"}
    place: dict[str, Any] = {
        "y": name("bug", axis={"ticks": False, "domain": False, "grid": False, "labelFontSize": 10.5}),
        "x": name("method", axis={"orient": "top", "labelAngle": -50, "ticks": False, "domain": False, "grid": False},
                  scale={"domain": list(methods)}),
    }  # fmt: skip
    place["tooltip"] = tooltip(bug="bug", method="method", result="state")
    fill = {**place, "color": colours("state", FOUND)}
    fill["color"]["legend"] = {
        "title": None,
        "symbolStrokeColor": colour("soft"),
        "symbolStrokeWidth": 1,
    }
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
    found = sized(found, least=LABELS + COLUMN * len(methods))
    return {**found, **apart, "padding": {"left": 2, "right": 90, "top": 4, "bottom": 2}}


def detection_plot(rows: Rows, rules: Sequence[str], height: int = 190) -> Spec:
    """Return the share of cases in which each rule finds an error of a size.

    Rows have `size`, `share` and `rule`.
    """
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
    """Return errors as points beside their bounds on a logarithmic axis.

    Rows have `name`, `error` and `bound`.
    """
    rows = [{**row, "error": max(float(row["error"]), 1e-17)} for row in rows]
    place = {
        "y": name(
            "name", axis={"grid": True, "ticks": False, "domain": False, "labelFontSize": 10.5}
        )
    }
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
