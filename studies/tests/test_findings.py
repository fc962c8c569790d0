"""The script of each finding under `reports/findings/` prints what the finding says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from studies.tests import findings
from studies.tests.findings import FOLDER, INDEX, Finding, row, state

FINDINGS = findings.findings()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.path.stem)
@pytest.mark.full
def test_the_script_prints_what_the_finding_says(finding, tmp_path):
    for package in finding.packages:
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}")
        if package == finding.package and installed != finding.tried:
            pytest.skip(f"needs {package} {finding.tried}")
    (tmp_path / "script.py").write_text(finding.script)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == finding.printed, done.stderr


def test_the_guide_and_the_index_list_every_finding():
    page = (Path(__file__).parents[2] / "docs" / "found.md").read_text()
    index = INDEX.read_text()
    for finding in FINDINGS:
        assert f"`{finding.path.stem}`" in page
        assert row(finding) in index


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.path.stem)
def test_a_finding_is_an_issue_of_no_more_than_a_page(finding):
    text = finding.path.read_text()
    assert len(text.split()) <= 550
    assert text.count("\n## ") == 5, (
        "what happens, what is expected, the script, cause and fix, versions"
    )


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.path.stem)
def test_a_finding_says_who_is_hit_and_what_has_fixed_it(finding):
    assert finding.who, f"end {finding.path.name} with `You are hit if ...`"
    assert finding.fixed(INDEX.read_text()) != "?", "the index has another state: read it again"


def test_since_and_fixed_are_read_from_the_last_section():
    said = "\n\nYou are hit if K > 1, or fp16. Since: 1302c71 (2021-01-19). Fixed in: 0.3.0."
    found = Finding(FOLDER / "optax" / "a.md", "import optax\n", "2.0\n", f"optax 0.2.8{said}")
    assert (found.who, found.since) == ("K > 1, or fp16", "1302c71 (2021-01-19)")
    assert found.fixed("") == "0.3.0"
    bare = Finding(FOLDER / "optax" / "a.md", "import optax\n", "2.0\n", "optax 0.2.8")
    assert (bare.who, bare.since) == ("", "seen in 0.2.8")
    index = "| optax | [a](optax/a.md) | 0.2.8 | 0.2.9 | {} |"
    assert bare.fixed(index.format("still there")) == "not in 0.2.9"
    assert bare.fixed(index.format("prints `1.0`: read it again")) == "?"


def test_what_prints_something_else_is_not_said_to_be_still_there():
    found = Finding(FOLDER / "optax" / "a.md", "import optax\n", "2.0\n", "optax 0.2.8")
    assert (found.package, found.tried) == ("optax", "0.2.8")
    assert state(found, "2.0\n") == "still there"
    assert "1.0" in state(found, "1.0\n")
    assert "still" not in state(found, "1.0\n")
