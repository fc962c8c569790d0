"""The short story as Markdown, its pictures, the JSON, and the command that writes them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradcheck_suite.cli import run
from gradcheck_suite.page import render
from studies.commands import PROGRAM
from studies.tests.report.made_up import build, claim, counterexample, fill, verdict

MOST_LINES = 300
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    fill(folder)
    counterexample(folder)
    return folder


def test_markdown_is_short_and_its_tables_keep_their_columns(tmp_path):
    for i in range(20):
        verdict(tmp_path, f"loop {i} | <b>")
        claim(tmp_path, f"C9.{i}", text="<script>alert(1)</script> | `a|b` *c*")
    text = render.report_markdown(build(tmp_path), lambda figure: f"{figure.key}.svg")
    assert "<script>" not in text
    assert len(text.splitlines()) <= MOST_LINES
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(tables) > 20
    assert all(line.count("|") - line.count("\\|") in (5, 4, 3) for line in tables)


def test_the_command_writes_the_page_the_story_and_its_pictures(reports, capsys):
    (reports / "pictures").mkdir(exist_ok=True)
    (reports / "pictures" / "of-an-earlier-report.svg").write_text("")
    assert run(["report", "--reports", str(reports)], PROGRAM) == 0
    data = json.loads((reports / "report.json").read_text())
    assert [s["key"] for s in data["sections"]] == [
        "verified", "decision", "memory", "costs", "compiled", "claims", "zoo", "calibration", "bridge", "trainers",
        "provenance",
    ]  # fmt: skip
    assert data["schema"] == 2
    assert data["environments"][0]["processor"] == "a processor, 2 cores"
    figures = [figure for section in data["sections"] for figure in section["figures"]]
    assert figures
    assert {name for figure in figures for name in figure} == {"key", "alt", "caption", "sources"}
    story = (reports / "report.md").read_text()
    drawn = {path.name for path in (reports / "pictures").iterdir()}
    assert drawn == {
        line.rpartition("(pictures/")[2][:-1]
        for line in story.splitlines()
        if line.startswith("![")
    }
    assert {"unused-parameter.svg", "kept-gradient.svg", "zoo-totals.svg"} <= drawn
    for path in (reports / "pictures").iterdir():
        picture = ElementTree.parse(path).getroot()
        assert picture.find("{http://www.w3.org/2000/svg}title").text
        assert "var(--" not in path.read_text()
    assert "report.html" in capsys.readouterr().out


JAX_OF = """
import sys
from gradcheck_suite.__main__ import main
from studies.commands import PROGRAM
status = main(sys.argv[1:], PROGRAM)
sys.exit(f"status {status}, or JAX was imported" if status or "jax" in sys.modules else 0)
"""


@pytest.mark.full
def test_a_report_of_every_kind_of_record_and_of_a_violation_imports_no_jax(reports, tmp_path):
    shutil.copytree(reports, tmp_path / "reports")
    shutil.copytree(
        ROOT / "reports" / "records", tmp_path / "reports" / "records", dirs_exist_ok=True
    )
    command = [sys.executable, "-c", JAX_OF, "report", "--reports", str(tmp_path / "reports")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert "linear" in (tmp_path / "reports" / "report.html").read_text(), (
        "the case of the violation in words"
    )


@pytest.mark.full
def test_a_picture_has_its_text_as_text():
    drawing = render.svg({"data": {"values": [{"a": "<b>&"}]}, "mark": "bar", "encoding": {
        "y": {"field": "a", "type": "nominal"}, "x": {"value": 20}}, "height": 30}, "less < more")  # fmt: skip
    root = ElementTree.fromstring(drawing)
    assert root.find("{http://www.w3.org/2000/svg}title").text == "less < more"
    assert "<b>&" in [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]


def test_without_records_the_command_says_what_makes_them(tmp_path, capsys):
    assert run(["report", "--reports", str(tmp_path)], PROGRAM) == 2
    assert "there are no records" in capsys.readouterr().err
    assert run(["report", "--compare", str(tmp_path), str(tmp_path)], PROGRAM) == 2
    assert f"--compare {tmp_path}: there are no records" in capsys.readouterr().err


@pytest.mark.parametrize("module", render.PACKAGES)
def test_what_a_report_lacks_is_said_before_any_work(reports, module, monkeypatch, capsys):
    find, before = importlib.util.find_spec, sorted(reports.rglob("*"))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == module else find(name, *rest),
    )
    monkeypatch.setattr("gradcheck_suite.page.report.build", None)
    assert run(["report", "--reports", str(reports)], PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"the report needs {render.PACKAGES[module]}: pip install 'gradcheck-suite[report]'\n"
    )
    assert said.count("\n") == 1
    assert sorted(reports.rglob("*")) == before
