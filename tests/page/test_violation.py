"""The page of a violation: from a stored counterexample, and from `verify --html`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest

from gradcheck_suite.cli import run
from gradcheck_suite.core.counterexamples import SIDE, evidence_to_json
from gradcheck_suite.core.results import SHOWN_ROWS, WIDTH, Weight, weight_lines
from gradcheck_suite.errors import UsageError
from gradcheck_suite.page.violation import read_violation
from studies.tests.report.made_up import EVIL, build, counterexample
from tests.one_problem import MEAN_OF_MEANS


def test_a_stored_violation_has_its_split_its_plots_and_its_script(tmp_path):
    page = read_violation(counterexample(tmp_path))
    assert (page.title, page.loop, page.wrong) == ("gradient: mean-of-means", "my_loop.py:train", 1)
    assert [[(b.index, b.items, b.masked) for b in window] for window in page.windows] == [
        [(0, 2, True), (1, 2, False)],
        [(2, 1, False), (3, 3, False)],
    ]
    weights, elements = page.figures  # the bias is right
    assert [row["weight"] for row in weights.spec["data"]["values"]] == [
        0.5,
        0.25,
        pytest.approx(1 / 6),
        0.25,
    ]
    assert elements.caption == "0.weight: 2 of 6 elements differ by more than rounding allows."
    assert dict(page.facts)["error"] == "5, where rounding allows 1e-14"
    assert "print('the script')" in page.script
    assert page.replay.startswith("gradcheck-suite replay ")
    assert EVIL in page.explanation


def test_a_file_that_is_no_counterexample_is_left_out_and_named(tmp_path):
    good = counterexample(tmp_path)
    bad = good.with_name("bad.json")
    bad.write_text('{"loop": 1}')
    with pytest.raises(UsageError, match="not a stored counterexample"):
        read_violation(bad)
    report = build(tmp_path)
    assert [page.loop for page in report.violations] == ["my_loop.py:train"]
    (problem,) = report.problems
    assert "bad.json" in problem


def test_of_a_large_parameter_the_elements_around_the_worst_are_kept():
    import numpy as np

    from gradcheck_suite.core.comparison import Comparison, Layout

    expected = np.zeros(100 * 200)
    observed = expected.copy()
    observed[90 * 200 + 3] = np.nan
    layout = Layout(("w",), ((100, 10, 20),))
    (part,) = evidence_to_json(Comparison(layout, expected, observed, np.ones_like(expected)))
    assert part["columns"] == [0, SIDE]
    assert part["rows"] == [100 - SIDE, 100]
    assert part["observed"][90 - (100 - SIDE)][3] == "nan"
    assert (part["wrong"], part["missing"]) == (1, False)
    json.dumps(part, allow_nan=False)


def weight(micro_batches, observed):
    return Weight(micro_batches=micro_batches, count=1, expected=0.5, observed=observed)


def test_bars_on_the_console_are_as_long_as_the_weights():
    _, first, second, third, last = weight_lines(
        [weight("0", 1.0), weight("1", 0.25), weight("2", -0.5), weight("3-4", float("nan"))]
    )
    half = WIDTH // 2
    assert first.endswith(f"  {'#' * half}|{'#' * half}")
    assert second.endswith(f"  {'#' * (half // 2)}{' ' * (half // 2)}|")
    assert third.endswith(f"  {'-' * half}|")
    assert last.split() == ["3-4", "1", "nan", "0.5"]
    assert weight_lines([]) == []
    assert weight_lines([weight("0", 1.0)] * (SHOWN_ROWS + 1))[-1] == "  and 1 more"


@pytest.mark.full
def test_verify_writes_the_page_and_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MEAN_OF_MEANS)
    assert run(["verify", "my.py:halves", "--examples", "5", "--html", "page.html"]) == 1
    out = capsys.readouterr().out
    assert "page    page.html" in out
    assert "|" in next(line for line in out.splitlines() if "#" in line and "observed" not in line)
    html = (tmp_path / "page.html").read_text()
    assert "gradient: mean-of-means" in html
    assert "gradcheck-suite replay reports/counterexamples/" in html
    assert html.count('class="chart"') == 2


@pytest.fixture
def desktop(tmp_path, monkeypatch):
    """Return what a browser was asked to open, where every terminal is a desktop's."""
    asked = tmp_path / "asked"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {asked}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("DISPLAY", ":99")
    monkeypatch.chdir(tmp_path)
    return lambda: asked.read_text().split() if asked.exists() else []


def _at_a_terminal(*arguments):
    """Run a Python process whose output is a terminal, and return its exit status."""
    terminal, other_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=other_end, stderr=subprocess.DEVNULL
    ) as process:
        os.close(other_end)
        with contextlib.suppress(OSError):  # the terminal closes when the process ends
            while os.read(terminal, 4096):
                pass
    os.close(terminal)
    return process.returncode


OPEN = "from pathlib import Path; from gradcheck_suite.page.render import open_page; open_page(Path('page.html'))"


def test_a_page_opens_at_a_desktop_s_terminal_alone(tmp_path, desktop, monkeypatch):
    subprocess.run([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, check=True)
    assert desktop() == []
    assert _at_a_terminal("-c", OPEN) == 0
    assert desktop() == [(tmp_path / "page.html").as_uri()]
    monkeypatch.delenv("DISPLAY")
    assert _at_a_terminal("-c", OPEN) == 0
    assert len(desktop()) == 1


@pytest.mark.full
def test_verify_opens_the_page_of_a_violation_and_none_where_all_holds(tmp_path, desktop):
    (tmp_path / "my.py").write_text(MEAN_OF_MEANS)
    command = ("-m", "gradcheck_suite", "verify", "--examples", "2", "--html", "page.html")
    assert _at_a_terminal(*command, "zero_") == 0
    assert desktop() == []
    assert _at_a_terminal(*command, "my.py:halves") == 1
    assert desktop() == [(tmp_path / "page.html").as_uri()]
