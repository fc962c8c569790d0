"""The look of all charts, and their common parts: Vega-Lite specifications out.

Nothing here reads records.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

# Colours and fonts of page and plots. Plots name colours as CSS variables, so that a page can
# change them at once.


LIGHT = {
    "text": "#1a1c1f",
    "soft": "#55595f",
    "page": "#f6f7f9",
    "card": "#ffffff",
    "line": "#d9dce1",
    "band": "#eef0f3",
    "link": "#0b57a4",
    "good": "#0a6b2d",
    "bad": "#a4161a",
    "warn": "#7a4d00",
    "good-soft": "#dff2e4",
    "bad-soft": "#fbdfe0",
    "warn-soft": "#fdf0d2",
    "zero": "#c2500a",
    "none": "#0b62b0",
    "c1": "#5b3fa8",
    "c2": "#9aa1ab",
    "c3": "#00795a",
    "c4": "#a8487f",
    "c5": "#8a6d00",
    "c6": "#5f6670",
}
DARK = {
    "text": "#e6e8eb",
    "soft": "#a7adb5",
    "page": "#121417",
    "card": "#1b1e22",
    "line": "#3a3f46",
    "band": "#25292e",
    "link": "#82b7f0",
    "good": "#74d492",
    "bad": "#ff8f8f",
    "warn": "#ecbd5c",
    "good-soft": "#173823",
    "bad-soft": "#4a1f22",
    "warn-soft": "#42340f",
    "zero": "#f0934e",
    "none": "#6db1f5",
    "c1": "#b7a3f7",
    "c2": "#6f767f",
    "c3": "#4fc7a2",
    "c4": "#e492c0",
    "c5": "#d9b63d",
    "c6": "#a7adb5",
}
"""Text on each ground has a contrast of at least 4.5 to 1 in both palettes (WCAG 2.2, 1.4.3)."""
SERIES = ("c1", "c3", "c4", "c5", "c6", "c2")
"""Colours of what is not a reset mode; colour-blind readers can distinguish them (after Okabe and Ito)."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
_VARIABLE = re.compile(r"var\(--([a-z0-9-]+)\)")


def colour(name: str) -> str:
    """Return a colour by its name in the palettes."""
    assert name in LIGHT, name
    return f"var(--{name})"


def with_palette(drawing: str, palette: Mapping[str, str] = LIGHT) -> str:
    """Return an SVG with the colours of one palette, for a file that stands outside of the page."""
    return _VARIABLE.sub(lambda found: palette[found[1]], drawing)


def style_sheet() -> str:
    """Return the palettes as CSS: the reader's system chooses, and `data-theme` on the root element
    overrules it.
    """
    light, dark = (
        " ".join(f"--{k}: {v};" for k, v in palette.items()) for palette in (LIGHT, DARK)
    )
    return (
        # on paper the light palette is used whatever the screen has
        f":root {{ color-scheme: light; {light} }}\n@media (prefers-color-scheme: dark) {{"
        f" :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }}"
        f" }}\n:root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n@media print {{ :root,"
        f" :root[data-theme=dark], :root:not([data-theme=light]) {{ color-scheme: light; {light} }}"
        " }\n"
    )


def config() -> dict[str, Any]:
    """Return the Vega-Lite configuration that all plots share."""
    soft = colour("soft")
    line = colour("line")
    text = colour("text")
    return {
        "background": None,
        "font": FONT,
        "padding": {"left": 2, "right": 6, "top": 4, "bottom": 2},
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": soft,
            "gridColor": line,
            "gridOpacity": 0.7,
            "domainColor": line,
            "tickColor": line,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "labelLimit": 240,
        },
        "legend": {
            "labelColor": text,
            "titleColor": soft,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "orient": "top",
            "offset": 4,
            "labelLimit": 260,
            "symbolStrokeWidth": 2,
        },
        "title": {"color": text, "fontSize": 12, "fontWeight": 600, "anchor": "start", "offset": 6},
        "header": {"labelColor": text, "titleColor": soft},
        "text": {"color": text, "fontSize": 11},
        "rule": {"color": soft},
    }


# The parts that every specification is put together from.


Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def layers(rows: Rows, *parts: Spec, height: int, title: str | None = None) -> Spec:
    """Return a plot of layers over the same rows, as wide as its place."""
    found: Spec = {
        "data": {"values": list(rows)},
        "width": "container",
        "height": height,
        "layer": list(parts),
    }
    return {**found, "title": title} if title else found


def sized(plot: Spec, **pixels: int) -> Spec:
    """Return a plot no wider than `width` pixels, or no narrower than `least`: on a narrow screen
    it then scrolls.
    """
    return {**plot, "usermeta": pixels}


def layer(mark: str, encoding: Mapping[str, Any], **options: Any) -> Spec:
    """Return one layer: a mark with its options, and what its channels encode."""
    return {"mark": {"type": mark, **options}, "encoding": dict(encoding)}


def number(field: str, title: str | None, **options: Any) -> Spec:
    """Return a channel of a number; `scale` and `axis` may be given."""
    return {"field": field, "type": "quantitative", "title": title, **options}


def name(field: str, title: str | None = None, **options: Any) -> Spec:
    """Return a channel of a name, in the order of the rows unless `sort` is given."""
    return {"field": field, "type": "nominal", "title": title, "sort": None, **options}


def colours(field: str, names: Mapping[str, str] | Sequence[str]) -> Spec:
    """Return the colour channel of a series.

    Args:
        field: of the rows.
        names: series -> colour of the palette, or the series in the order of the palette.
    """
    if not isinstance(names, Mapping):
        names = {series: SERIES[i % len(SERIES)] for i, series in enumerate(names)}
    scale = {"domain": list(names), "range": [colour(shade) for shade in names.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None}}


def tooltip(**fields: str) -> list[Spec]:
    """Return the tooltip channel: title -> field."""
    return [{"field": field, "title": title.replace("_", " ")} for title, field in fields.items()]


# One bar for each name.


LINES = "split(datum.label, '\\n')"
"""Vega's expression for a label in lines."""
WRAP = 28
"""Letters of a line."""
ROW = 17
"""Pixels of a row in a plot of many rows."""


def wrapped(text: str) -> str:
    """Return a name in lines that leave room for the plot on a narrow screen."""
    return "\n".join(textwrap.wrap(text, WRAP, break_on_hyphens=False)) or text


def row_height(names: Sequence[str], least: int) -> int:
    """Return the pixels of a row that has room for the lines of every name."""
    return max([least, *(13 * len(key.splitlines()) + 8 for key in names if "\n" in key)])


def counts_plot(counts: Mapping[str, float], title: str) -> Spec:
    """Return one bar for each name, the numbers at their ends."""
    names = [wrapped(key) for key in counts]
    rows = [
        {"name": key, "count": count} for key, count in zip(names, counts.values(), strict=True)
    ]
    axis = {"grid": False, "ticks": False, "domain": False, "labelExpr": LINES}
    # beside the longest bar is room for its number
    scale = {"domain": [0, 1.3 * max(counts.values(), default=1) or 1], "nice": False}
    place = {"y": name("name", axis=axis), "x": number("count", title, axis=None, scale=scale)}
    return layers(
        rows,
        layer(
            "bar",
            {**place, "tooltip": tooltip(name="name", count="count")},
            color=colour("c6"),
            height=ROW - 6,
        ),
        layer("text", {**place, "text": {"field": "count", "format": ",~g"}}, align="left", dx=4),
        height=row_height(names, ROW) * len(rows),
    )
