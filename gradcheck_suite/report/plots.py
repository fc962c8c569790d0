"""Plots, drawn by matplotlib as SVG in the colour of the surrounding text, for light and dark pages alike."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.report.content import Figure

MARKERS = "osD^vPX*"
STYLES = ("-", "--", ":", "-.")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#5a8fc0", "#888888", "#7a5195")
"""Colours that colour-blind readers can distinguish (after Okabe and Ito); each has a marker of its own."""


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise CannotRunHere("the report's plots need matplotlib: pip install 'gradcheck-suite[report]'") from None
    mpl.use("svg")
    import matplotlib.pyplot as plt

    # text stays text, so that it can be read aloud and searched; ids do not change from run to run
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradcheck-suite", "font.size": 10})
    return plt


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    alt: str,
    caption: str,
    log_y: bool = True,
) -> Figure:
    """Draw one line with markers per series of (x, y) points."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for i, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        axes.plot(
            [p[0] for p in ordered],
            [p[1] for p in ordered],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=STYLES[i % len(STYLES)],
            color=COLOURS[i % len(COLOURS)],
            label=name,
            markersize=5,
        )
    axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return Figure(_svg(plt, figure), alt, caption)


def _svg(plt: Any, figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # axes and text are drawn in black: they take the colour of the page's text
    svg = svg.replace("#000000", "currentColor").replace("#262626", "currentColor")
    # the labels of logarithmic axes have no style of their own
    return re.sub(r"<text(?=[\s>])", '<text fill="currentColor"', svg)
