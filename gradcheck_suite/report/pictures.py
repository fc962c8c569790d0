"""Plots as SVG files, for places that run no script: the Markdown report. Vega draws them, through vl-convert."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.report.charts.theme import LIGHT, config, with_palette

WIDTH = 640
"""Pixels of a picture; two plots beside each other share it."""
AXIS = 70
"""Pixels beside each of such plots."""


def svg(spec: Mapping[str, Any], alt: str) -> str:
    """Return a plot as the text of an SVG file, in light colours on a light ground.

    Raises:
        CannotRunHere: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise CannotRunHere("the report's pictures need vl-convert: pip install 'gradcheck-suite[report]'") from None
    sized = copy.deepcopy(dict(spec))
    panels = sized.get("hconcat")
    for panel in panels or [sized]:
        panel["width"] = WIDTH // len(panels) - AXIS if panels else WIDTH
    drawing = vl_convert.vegalite_to_svg({**sized, "config": {**config(), "background": LIGHT["card"]}})
    title = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    named = re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}<title>{title}</title>", drawing, count=1)
    return with_palette(named)
