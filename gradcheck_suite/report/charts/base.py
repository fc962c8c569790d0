"""The parts that every specification is put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.charts.theme import MODES, SERIES, colour

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def layers(rows: Rows, *parts: Spec, height: int, title: str | None = None) -> Spec:
    """Return a plot of layers over the same rows, as wide as its place."""
    found: Spec = {"data": {"values": list(rows)}, "width": "container", "height": height, "layer": list(parts)}
    return {**found, "title": title} if title else found


def at_most(width: int, plot: Spec) -> Spec:
    """Return a plot that is no wider than so many pixels, wherever it stands."""
    return {**plot, "usermeta": {"width": width}}


def at_least(width: int, plot: Spec) -> Spec:
    """Return a plot that is no narrower than so many pixels: on a narrow screen it scrolls within its place."""
    return {**plot, "usermeta": {"least": width}}


def layer(mark: str, encoding: Mapping[str, Any], **options: Any) -> Spec:
    """Return one layer: a mark with its options, and what its channels encode."""
    return {"mark": {"type": mark, **options}, "encoding": dict(encoding)}


def number(field: str, title: str | None, **options: Any) -> Spec:
    """Return a channel of a number; `scale` and `axis` may be given."""
    return {"field": field, "type": "quantitative", "title": title, **options}


def name(field: str, title: str | None = None, **options: Any) -> Spec:
    """Return a channel of a name, in the order of the rows unless `sort` is given."""
    return {"field": field, "type": "nominal", "title": title, "sort": None, **options}


def colours(field: str, names: Mapping[str, str] | Sequence[str], *, legend: bool = True) -> Spec:
    """Return the colour channel of a series.

    Args:
        field: of the rows.
        names: series -> colour of the palette, or the series in the order of the palette.
        legend: whether the plot says which colour is which.
    """
    if not isinstance(names, Mapping):
        names = {series: SERIES[i % len(SERIES)] for i, series in enumerate(names)}
    scale = {"domain": list(names), "range": [colour(shade) for shade in names.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None} if legend else None}


def shades(modes: Sequence[str]) -> dict[str, str]:
    """Return the colour of each reset mode, the same in every plot; other names get the remaining colours in turn."""
    rest = [shade for shade in SERIES if shade not in {MODES.get(mode) for mode in modes}]
    unknown = [mode for mode in modes if mode not in MODES]
    return {mode: MODES.get(mode) or rest[unknown.index(mode) % len(rest)] for mode in modes}


def tooltip(**fields: str) -> list[Spec]:
    """Return the tooltip channel: title -> field."""
    return [{"field": field, "title": title.replace("_", " ")} for title, field in fields.items()]
