"""Two small drawings of where zeroing and releasing differ. Their numbers follow from the definition of SGD.

`tests/report/test_charts.py` runs the same steps in torch.
"""

from __future__ import annotations

from gradcheck_suite.report.charts.base import Spec, colours, layer, layers, number, shades, tooltip
from gradcheck_suite.report.charts.theme import colour

LEARNING_RATE, MOMENTUM = 0.1, 0.9
STEPS = 8
MODES = ("zero_", "None")
GIVEN = (2.0, 3.0)
"""The gradients of two windows; a reference to the first one's `.grad` is kept."""


def unused_parameter() -> dict[str, list[float]]:
    """Return a parameter after each step of SGD with momentum; only the first window reaches it, with gradient 1.

    Zeros are a gradient: the momentum decays and moves the parameter on. None is none: the optimizer skips it.
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
    """Return what a kept reference to `.grad` reads after the backward, after the reset and after the next backward."""
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
        rows,
        layer("line", shared, strokeWidth=2),
        layer("point", shared, filled=True, size=40, opacity=1),
        layer("rule", {"y": {"datum": 0}}, color=colour("line")),
        height=height,
    )
