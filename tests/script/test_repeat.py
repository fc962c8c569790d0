"""A script is run before it is announced, and says so where it does not repeat the fault."""

from __future__ import annotations

import pytest

from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.results import Violation
from gradcheck_suite.script import unrepeatable
from tests.script.test_violations import LINEAR

CASE = Case(LINEAR, Plan((1, 2), 1))
SCRIPTS = {
    "print('the fault is there'); raise SystemExit(1)": None,
    "print('the fault is gone')": "in a process of its own the loop does not show the fault (status 0)",
    "print('working'); raise TypeError('own mistake')": "it ends with status 1: TypeError: own mistake",
    "import sys; print('cannot import x', file=sys.stderr); raise SystemExit(2)": (
        "it ends with status 2: cannot import x"
    ),
}


@pytest.mark.full
def test_only_a_script_that_shows_the_fault_repeats_it(tmp_path):
    violation = Violation("step-count", "never-stepped", "planted", CASE)
    for text, said in SCRIPTS.items():
        (tmp_path / "script.py").write_text(text)
        assert unrepeatable(tmp_path / "script.py", violation, 30.0) == said


@pytest.mark.full
def test_a_script_that_is_killed_by_its_own_limit_repeats_a_hang(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(1)")
    assert unrepeatable(tmp_path / "script.py", Violation("raised", "timed-out", "planted", CASE), 30.0) is None


def test_a_script_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("gradcheck_suite.script.processes.START_S", 0.1)
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    said = unrepeatable(tmp_path / "script.py", Violation("raised", "raised", "planted", CASE), 0.2)
    assert said == "it did not end within 0.3 s"


@pytest.mark.full
@pytest.mark.parametrize("missing", [pytest.param("script.py", marks=pytest.mark.full), "folder/script.py"])
def test_a_script_that_is_gone_is_not_repeatable(tmp_path, missing):
    said = unrepeatable(tmp_path / missing, Violation("raised", "raised", "planted", CASE), 0.2)
    assert said.startswith("it ends with status ")
