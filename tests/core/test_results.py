"""The JSON that other programs read: its fields, and that it is JSON even where a number is none."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, Result, Verdict, Violation
from gradcheck_suite.core.results import json_number, results_to_json

CASE = Case(
    ProblemSpec(Input("vector", size=1), (Layer("linear", features=1, bias=False),), Loss("mse")),
    Plan((1,), 1),
)
VIOLATION = Violation("gradient", "mean-of-means", "each micro-batch's mean weighs 1/2", CASE)


def _strict(document):
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize(
    ("number", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_what_is_no_json_number_is_a_string(number, written):
    assert json_number(number) == written
    violation = Violation("non-finite", "not-linear", "", CASE, error=number, allowed=number)
    document = _strict(
        results_to_json([Result("f", 1, 0.0, (violation,), worst_error_over_allowed=number)], {})
    )["results"][0]
    assert document["violation"]["error"] == written
    assert document["violation"]["allowed"] == written
    assert document["worst_error_over_allowed"] == written


@pytest.mark.parametrize("number", [None, 0.0, -0.0, 1e-300, 5e-324, 1e308])
def test_other_numbers_are_left_alone(number):
    assert json_number(number) is number


def test_what_holds():
    assert Verdict(CASE).holds
    assert Verdict(CASE, finding="torch and JAX differ").holds
    assert not Verdict(CASE, VIOLATION).holds
    assert Result("f", 1, 0.0).holds
    assert not Result("f", 1, 0.0, (VIOLATION,)).holds


def test_the_lines_shown_are_those_of_the_file_as_it_is_now(tmp_path, monkeypatch):
    found = replace(VIOLATION, where="my_loop.py:1")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "my_loop.py").write_text(f"loss = {name}\n")
        assert found.words[1] == f"  1 | loss = {name}"
