"""The JSON that other programs read: its fields, and that it is JSON even where a number is none."""

from __future__ import annotations

import json
import math

import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, Result, Verdict, Violation, case_from_json
from gradcheck_suite.core.results import json_number, results_to_json

CASE = Case(
    ProblemSpec(Input("vector", size=1), (Layer("linear", features=1, bias=False),), Loss("mse")), Plan((1,), 1)
)
VIOLATION = Violation(
    kind="gradient",
    diagnosis="mean-of-means",
    explanation="each micro-batch's mean weighs 1/2",
    case=CASE,
    parameter="0.weight",
    epoch=0,
    window=1,
    error=0.18,
    allowed=1e-12,
    details=("a line",),
    found_after=3,
)
FIELDS = {"kind", "diagnosis", "explanation", "parameter", "epoch", "window", "error", "allowed", "found_after", "case"}


def _strict(document):
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(json.dumps(document, allow_nan=False))


def test_a_result_that_holds():
    document = _strict(
        results_to_json([Result("my_loop.py:train", cases=200, judged=200, seconds=12.3456)], {"torch": "2.13"})
    )
    assert document["schema"] == 1
    assert document["environment"] == {"torch": "2.13"}
    (result,) = document["results"]
    assert result["loop"] == "my_loop.py:train"
    assert result["verdict"] == "holds"
    assert result["cases"] == 200
    assert result["seconds"] == 12.346
    assert result["violation"] is None


def test_the_steps_that_were_and_were_not_judged_are_counted():
    found = Result("x.py:f", cases=3, seconds=1.0, windows=7, windows_skipped={"diverged": 2}).to_json()
    assert (found["windows"], found["windows_skipped"]) == (7, {"diverged": 2})
    none = _strict(Result("x.py:f", cases=3, seconds=1.0).to_json())
    assert (none["windows"], none["windows_skipped"]) == (0, {})


def test_a_result_that_is_violated():
    result = Result("x.py:f", cases=3, seconds=1.0, violations=(VIOLATION,), assumes=("whole-windows",))
    document = _strict(results_to_json([result], {}))["results"][0]
    assert document["verdict"] == "violated"
    assert document["assumes"] == ["whole-windows"]
    violation = document["violation"]
    assert violation.keys() >= FIELDS
    assert (violation["kind"], violation["diagnosis"]) == ("gradient", "mean-of-means")
    assert (violation["parameter"], violation["epoch"], violation["window"]) == ("0.weight", 0, 1)
    assert (violation["error"], violation["allowed"]) == (0.18, 1e-12)
    assert violation["found_after"] == 3
    assert case_from_json(violation["case"]) == CASE


@pytest.mark.parametrize(("number", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_is_no_json_number_is_a_string(number, written):
    assert json_number(number) == written
    violation = Violation("non-finite", "not-linear", "", CASE, error=number, allowed=number)
    document = _strict(results_to_json([Result("f", 1, 0.0, (violation,), worst_error_over_allowed=number)], {}))[
        "results"
    ][0]
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
