"""`replay`: the files it takes, the ones it refuses, what it prints."""

from __future__ import annotations

import json

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.counterexamples import store_counterexample
from gradcheck_suite.core.results import Result
from gradcheck_suite.verification.check import check
from tests.one_problem import LINEAR

CASE = Case(LINEAR, Plan((1, 2), 2, epochs=2), seed=1)


@pytest.fixture
def stored(project):
    """The file of a counterexample of `loops.py:no_reset`."""
    violation = check(resolve_loop("loops.py:no_reset"), CASE).violation
    assert violation is not None
    result = Result("loops.py:no_reset", 3, 1.0, violations=(violation,))
    return store_counterexample(project / "reports", result, {})


def test_a_violation_is_found_again(run, stored):
    outcome = run("replay", stored)
    assert outcome.status == 1
    assert outcome.out.startswith(f"loops.py:no_reset  VIOLATED  on case {CASE.digest}\n")
    assert ": stale-window: " in outcome.out
    assert "[1 2] items; accumulation_steps = 2, 1 window; 2 epochs" in outcome.out
    assert outcome.err == ""


def test_another_loop_on_the_same_case(run, stored):
    outcome = run("replay", stored, "loops.py:sound")
    assert outcome.status == 0
    assert outcome.out.startswith(f"loops.py:sound  holds  on case {CASE.digest}\n")


def test_a_bare_case_needs_a_loop(run, project):
    (project / "bare.json").write_text(json.dumps(CASE.to_json()))
    assert run("replay", "bare.json", "zero_").status == 0
    outcome = run("replay", "bare.json")
    assert outcome.status == 2
    assert "bare.json holds a bare case, which names no loop: pass LOOP after it" in outcome.err


def results(stored, count):
    data = json.loads(stored.read_text())
    violated = {
        "loop": "loops.py:no_reset",
        "violation": {"kind": "gradient", "case": data["case"]},
    }
    return {"schema": 1, "results": [{"loop": "zero_", "violation": None}, *[violated] * count]}


def test_a_result_file_with_one_violation_is_a_case_too(run, project, stored):
    (project / "out.json").write_text(json.dumps(results(stored, 1)))
    assert run("replay", "out.json").status == 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_result_file_with_another_number_is_not(run, project, stored, count):
    (project / "out.json").write_text(json.dumps(results(stored, count)))
    outcome = run("replay", "out.json")
    assert outcome.status == 2
    assert f"expected the results of exactly one violated loop, got {count}" in outcome.err


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: json.dumps(data)[:200], "is not valid JSON"),
        (
            lambda data: "",
            "is not valid JSON (Expecting value: line 1 column 1",
        ),
        # Python 3.14 limits the size of the stack, earlier ones the depth of recursion
        (lambda data: "[" * 100000, "while decoding a JSON array"),
        (lambda data: [1, 2], "expected a JSON object that holds a case, got list"),
        (
            lambda data: {**data, "schema": 9},
            "schema must be 1, got 9: the file comes from another version",
        ),
        (lambda data: {**data, "loop": 5}, "loop must be a string, got 5"),
    ],
)
def test_truncated_edited_and_foreign_files(run, project, stored, edit, said):
    edited = edit(json.loads(stored.read_text()))
    (project / "bad.json").write_text(edited if isinstance(edited, str) else json.dumps(edited))
    outcome = run("replay", "bad.json")
    assert outcome.status == 2
    assert outcome.err.startswith("gradcheck-suite replay: error: bad.json")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_layer_that_does_not_exist(run, project):
    data = CASE.to_json()
    data["problem"]["layers"][0]["kind"] = "linea"
    del data["digest"]
    (project / "bare.json").write_text(json.dumps(data))
    outcome = run("replay", "bare.json", "zero_")
    assert outcome.status == 2
    assert "got 'linea'" in outcome.err
    assert outcome.err.count("\n") == 1


def without_the_loops(project):
    (project / "loops.py").unlink()


GONE = "names loops.py:no_reset, but loops.py: no such file; pass another LOOP or --problem"


@pytest.mark.parametrize(
    ("arguments", "edit", "said"),
    [
        (["none.json"], None, "cannot read none.json (No such file or directory)"),
        (["."], None, "cannot read . (Is a directory)"),
        (["{stored}"], without_the_loops, GONE),
        (
            ["{stored}", "--problem", "loops.py:PROBLEM"],
            None,
            "has its own generated problem; drop --problem",
        ),
    ],
)
def test_what_cannot_be_replayed(run, project, stored, arguments, edit, said):
    if edit is not None:
        edit(project)
    outcome = run("replay", *(part.format(stored=stored) for part in arguments))
    assert outcome.status == 2
    assert said in outcome.err
