"""Counterexamples: where they are stored, under which name, and that they come back."""

from __future__ import annotations

import json

import pytest

from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.counterexamples import (
    counterexample_path,
    read_case_file,
    store_counterexample,
)
from gradcheck_suite.core.results import Result, Violation

CASE = Case("model.py:PROBLEM", Plan((1, 2), 2), seed=1)


def test_a_violation_comes_back(tmp_path):
    violation = Violation(
        "gradient",
        "stale-window",
        "why",
        CASE,
        "w",
        0,
        1,
        float("inf"),
        1e-12,
        ("a", "b"),
        found_after=3,
    )
    result = Result("my.py:train", 3, 1.0, violations=(violation,), assumes=("whole-windows",))
    path = store_counterexample(tmp_path, result, {"torch": "2"})
    assert path == tmp_path / "counterexamples" / f"my.py-train-{CASE.digest}.json"
    stored = read_case_file(path)
    assert (stored.case, stored.loop) == (CASE, "my.py:train")
    data = json.loads(path.read_text())
    assert data["violation"]["error"] == "inf"
    assert data["violation"]["found_after"] == 3
    assert data["violation"]["details"] == ["a", "b"]
    assert (data["assumes"], data["environment"]) == (["whole-windows"], {"torch": "2"})


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        ("zero_", "zero_"),
        ("my.py:train", "my.py-train"),
        ("/home/a b/my.py:train", "home-a-b-my.py-train"),
        ("../../etc/x.py:f", "etc-x.py-f"),
        ("package.module:f", "package.module-f"),
        ("é:ü", "loop"),
        ("d" * 300 + "/my.py:f", ("d" * 300 + "-my.py-f")[-100:]),
    ],
)
def test_names_are_safe_and_stay_in_the_folder(tmp_path, loop, name):
    path = counterexample_path(tmp_path, loop, CASE)
    assert path.parent == tmp_path / "counterexamples"
    assert path.name == f"{name}-{CASE.digest}.json"


def test_loops_of_one_name_in_two_folders_have_files_of_their_own(tmp_path):
    assert counterexample_path(tmp_path, "a/x.py:f", CASE) != counterexample_path(
        tmp_path, "b/x.py:f", CASE
    )
