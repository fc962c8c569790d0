"""The numbers that plots show, against torch and against mathematics."""

from __future__ import annotations

import math

import pytest
import torch

from gradcheck_suite.core.results import Weight
from gradcheck_suite.page.charts import DARK, LIGHT, SERIES
from gradcheck_suite.page.violation import SIZES, deviation_size, elements_plot, weights_plot
from studies.report import charts
from studies.report.charts import (
    CATEGORIES,
    bars_plot,
    peaks_plot,
    ratio_plot,
    times_plot,
    window_memory_plot,
)
from studies.reset_modes import RESET_MODES

MODE = {"zero_": "zero_", "None": "set_to_none"}


@pytest.mark.parametrize("name", MODE)
def test_the_drawing_of_an_unused_parameter_is_what_torch_does(name):
    p = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=charts.LEARNING_RATE, momentum=charts.MOMENTUM)
    path = []
    for step in range(charts.STEPS):
        if step == 0:
            (1.0 * p).backward()
        optimizer.step()
        path.append(p.item())
        RESET_MODES[MODE[name]].reset([p], optimizer)
    assert charts.unused_parameter()[name] == pytest.approx(path, rel=1e-14)


@pytest.mark.parametrize("name", MODE)
def test_the_drawing_of_a_kept_gradient_is_what_torch_does(name):
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([p], lr=0.1)
    first, second = charts.GIVEN
    (first * p).sum().backward()
    kept = p.grad
    read = [kept.item()]
    RESET_MODES[MODE[name]].reset([p], optimizer)
    read.append(kept.item())
    (second * p).sum().backward()
    read.append(kept.item())
    assert charts.kept_gradient()[name] == read


def test_the_memory_of_both_modes_has_one_scale_and_one_axis_of_operations():
    spec = window_memory_plot(
        {"zero_": {"gradients": [2**20, 2**21]}, "None": {"gradients": [0, 2**22]}}
    )
    for axis, domain in (("x", [0, 2]), ("y", [0, 4.0])):
        scales = [panel["layer"][0]["encoding"][axis]["scale"] for panel in spec["hconcat"]]
        assert [scale["domain"] for scale in scales] == [domain, domain]
    rows = spec["hconcat"][1]["data"]["values"]
    # the last moment is drawn as wide as the others
    assert [(row["operation"], row["MiB"]) for row in rows] == [(0, 0.0), (1, 4.0), (2, 4.0)]


def test_a_reset_mode_has_one_colour_in_every_plot_and_nothing_else_has_it():
    def scale(spec):
        found = spec["layer"][0]["encoding"]["color"]["scale"]
        return dict(zip(found["domain"], found["range"], strict=True))

    plots = [
        times_plot(
            [{"x": 1, "y": 1, "mode": m, "layout": "few"} for m in ("zero_grad", "zero_")],
            x="x",
            y="y",
        ),
        times_plot(
            [{"x": 1, "y": 1, "mode": m, "layout": "few"} for m in ("set_to_none", "zero_")],
            x="x",
            y="y",
        ),
        peaks_plot(
            [{"setting": "s", "mode": m, "MiB": 1.0} for m in ("set_to_none", "zero_", "zero_grad")]
        ),
        bars_plot(
            [{"group": "g", "name": m, "value": 1.0, "text": "1"} for m in ("None", "zero_")]
        ),
        charts.unused_parameter_plot(),
        charts.kept_gradient_plot(),
    ]
    for plot in plots:
        found = scale(plot)
        assert found["zero_"] == "var(--zero)"
        assert {found.get("None"), found.get("set_to_none")} <= {None, "var(--none)"}
        assert len(set(found.values())) == len(found)
    assert not {"zero", "none"} & {*SERIES, *(shade for _, shade in CATEGORIES.values())}
    for palette in (LIGHT, DARK):
        assert not {palette["zero"], palette["none"]} & {palette[shade] for shade in SERIES}


def test_what_is_thinner_than_a_line_has_no_entry_in_the_legend():
    def legend(other):
        spec = window_memory_plot(
            {"zero_": {"gradients": [100], "other": [other], "optimizer state": [50]}}
        )
        return spec["hconcat"][0]["layer"][0]["encoding"]["color"]["scale"]["domain"]

    assert legend(1) == ["gradients", "optimizer state"]
    assert legend(10) == ["gradients", "optimizer state", "micro-batches and scalars"]


def test_ratios_and_their_intervals_are_within_the_axis():
    rows = [{"size": "1 M", "setting": "s", "ratio": 0.9, "low": 0.5, "high": 1.6}]
    domains = [
        layer["encoding"]["y"].get("scale", {}).get("domain") for layer in ratio_plot(rows)["layer"]
    ]
    assert domains == [None, [0.5, 1.6], [0.5, 1.6]]


def test_elements_are_told_by_how_many_bounds_they_are_off():
    within, small, large, above = SIZES
    assert [deviation_size(0.0, x, 1.0) for x in (1.0, 1.1, 1e3, 1.1e3, 1e6, 1.1e6)] == [
        within, small, small, large, large, above]  # fmt: skip
    assert deviation_size("nan", "nan", 1.0) == within
    assert deviation_size(1.0, "inf", 1.0) == above
    part = {"rows": [4, 5], "columns": [2, 4], "expected": [[1.0, 2.0]], "observed": [[1.0, 5.0]],
            "allowed": [[1e-9, 1e-9]]}  # fmt: skip
    cells = elements_plot(part)["data"]["values"]
    assert [(c["row"], c["column"], c["off"]) for c in cells] == [(4, 2, within), (4, 3, above)]


def test_a_weight_that_is_not_finite_has_no_bar():
    weight = Weight(micro_batches="0", count=2.0, expected=0.5, observed=math.nan)
    rows = weights_plot([weight])["data"]["values"]
    assert [row["weight"] for row in rows] == [None, 0.5]


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(palette):
    grounds = {"text": ("page", "card", "band", "good-soft", "warn-soft", "bad-soft"), "soft": ("page", "card", "band"),
               "link": ("card",), **{name: ("card", f"{name}-soft") for name in ("good", "bad", "warn")}}  # fmt: skip
    for ink, shades in grounds.items():
        for ground in shades:
            high, low = sorted(
                (_luminance(palette[ink]), _luminance(palette[ground])), reverse=True
            )
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)
