"""Plots of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.charts.base import Rows, Spec, colours, layer, layers, number, shades, tooltip
from gradcheck_suite.report.charts.theme import colour

CATEGORIES = {
    "parameters": ("parameters", "c6"),
    "gradients": ("gradients", "c3"),
    "optimizer state": ("optimizer state", "c4"),
    "activations": ("activations", "c5"),
    "temporaries": ("temporaries", "c1"),
    "other": ("micro-batches and scalars", "c2"),
}
"""Category of the ledger -> what the plot calls it, and its colour."""
RATIO = "time, None / zero_"
SMALLEST = 0.01
"""Share of the peak below which a category is left out: it would be thinner than a line."""


def ratio_plot(rows: Rows, height: int = 200) -> Spec:
    """Return the plot of step times under None over those under `zero_`, with intervals where they are known.

    Args:
        rows: with `size`, `setting`, `ratio`, and `low` and `high` or None in their place.
        height: of the plot.
    """
    settings = list(dict.fromkeys(str(row["setting"]) for row in rows))
    place: dict[str, Any] = {
        "x": {
            "field": "size",
            "type": "ordinal",
            "sort": None,
            "title": "parameters",
            "axis": {"labelAngle": 0},
            "scale": {"paddingInner": 0.5, "paddingOuter": 0.25},
        },
        "xOffset": {"field": "setting", "sort": settings},
        "color": colours("setting", settings),
    }
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


def window_memory_plot(traces: Mapping[str, Mapping[str, Sequence[int]]], height: int = 200) -> Spec:
    """Return the plots of the bytes alive after each operation of one window, one beside the other.

    What takes less than a hundredth of the peak is left out.

    Args:
        traces: mode -> category -> bytes alive, operation by operation.
        height: of the plots.
    """
    top = max(sum(column) for trace in traces.values() for column in zip(*trace.values(), strict=True))
    largest = {c: max(max(trace.get(c) or (0,)) for trace in traces.values()) for c in CATEGORIES}
    drawn = [category for category, size in largest.items() if size > SMALLEST * top]
    longest = max(len(column) for trace in traces.values() for column in trace.values())
    ends = (longest, top / 2**20)
    panels = [_memory_panel(mode, trace, drawn, ends, height) for mode, trace in traces.items()]
    return {"hconcat": panels, "spacing": 12, "resolve": {"scale": {"color": "shared"}}}


def _memory_panel(
    mode: str, trace: Mapping[str, Sequence[int]], drawn: Sequence[str], ends: tuple[int, float], height: int
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
            "MiB", "MiB alive", stack="zero", scale={"domain": [0, ends[1]], "nice": True}, axis={"tickCount": 4}
        ),
        "color": colours("category", dict(CATEGORIES[category] for category in drawn)),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": tooltip(after_operation="operation", category="category", MiB="MiB"),
    }
    return layers(rows, layer("area", encoding, interpolate="step-after"), height=height, title=mode)


def times_plot(rows: Rows, *, x: str, y: str, height: int = 260) -> Spec:
    """Return times against sizes on logarithmic axes; rows have `x`, `y`, `mode` (a colour) and `layout` (a dash)."""
    modes, layouts = (list(dict.fromkeys(str(row[which]) for row in rows)) for which in ("mode", "layout"))
    # Vega-Lite gives the samples no colour of their own beside a colour legend
    ink = {"stroke": {"value": colour("text")}, "strokeWidth": {"value": 2}, "opacity": {"value": 1}}
    line = {
        "x": number("x", x, scale={"type": "log"}, axis={"tickCount": 5, "format": "~s"}),
        "y": number("y", y, scale={"type": "log"}, axis={"tickCount": 5, "format": "~g"}),
        "color": colours("mode", shades(modes)),
        "strokeDash": {
            "field": "layout",
            "type": "nominal",
            "sort": layouts,
            "legend": {
                "title": None,
                "symbolType": "stroke",
                "symbolSize": 300,
                "encode": {"symbols": {"update": ink}},
            },
        },
        "tooltip": tooltip(mode="mode", tensors="layout", x="x", y="y"),
    }
    return layers(rows, layer("line", line, point={"filled": True, "size": 30}), height=height)


def peaks_plot(rows: Rows, height: int = 220) -> Spec:
    """Return bars of memory; rows have `setting`, `mode` and `MiB`."""
    modes = list(dict.fromkeys(str(row["mode"]) for row in rows))
    bar = {
        "x": {"field": "setting", "type": "ordinal", "sort": None, "title": None, "axis": {"labelAngle": 0}},
        "xOffset": {"field": "mode", "sort": modes},
        "y": number("MiB", "peak above zero, MiB", axis={"tickCount": 5}),
        "color": colours("mode", shades(modes)),
        "tooltip": tooltip(setting="setting", mode="mode", MiB="MiB"),
    }
    return layers(rows, layer("bar", bar), height=height)
