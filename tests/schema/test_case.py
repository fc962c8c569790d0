"""Cases: what is drawn can be stored, pasted, named by its digest, and not be tampered with unnoticed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given

import gradcheck_suite
from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, UsageError, case_from_json, cases

CASE = Case(
    ProblemSpec(Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")),
    Plan((1, 2), 2),
    seed=7,
)
USERS = Case("model.py:PROBLEM", Plan((3, 1, 1), 2, 2), dtype="float32", optimizer="adamw", seed=2**32 - 1)


@given(cases())
def test_json_round_trip(case):
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case


@given(cases())
def test_the_repr_evaluates_to_an_equal_case_with_the_public_names_alone(case):
    public = {
        name: getattr(gradcheck_suite, name) for name in ("Case", "Plan", "ProblemSpec", "Input", "Layer", "Loss")
    }
    assert set(public) <= set(gradcheck_suite.__all__)
    again = eval(repr(case), {**public, "__builtins__": {}})
    assert again == case
    assert hash(again) == hash(case)
    assert again.digest == case.digest


@pytest.mark.parametrize(("case", "digest"), [(CASE, "833a72879a75"), (USERS, "31682533d3ea")])
def test_digests_stay_what_they_are(case, digest):
    """A digest names files and appears in reports: the same case has the same one in every version of schema 1."""
    assert case.digest == digest
    assert case_from_json(json.loads(json.dumps(case.to_json()))).digest == digest


OTHERS = {
    "problem": USERS.problem,
    "plan": Plan((2, 1), 2),
    "dtype": "float32",
    "device": "cuda",
    "seed": 8,
    "optimizer": "sgd",
    "groups": 2,
}
"""Another value of every field than that of `CASE`."""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CASE)])
def test_every_field_has_a_part_in_the_digest(field):
    assert dataclasses.replace(CASE, **{field: OTHERS[field]}).digest != CASE.digest


def test_a_users_problem_is_named():
    assert case_from_json(USERS.to_json()) == USERS


def test_cases_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CASE.seed = 1


def _without(name):
    return {key: value for key, value in CASE.to_json().items() if key != name}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "not a gradcheck-suite case: expected an object with 'problem', 'plan' and 'digest'"),
        ([1, 2], "not a gradcheck-suite case"),
        ({"name": "something else"}, "not a gradcheck-suite case"),
        (_without("plan"), "not a gradcheck-suite case"),
        (_without("problem"), "not a gradcheck-suite case"),
        (_without("schema"), "case schema must be 1, got None: it comes from another version"),
        ({**CASE.to_json(), "schema": 2}, "case schema must be 1, got 2: it comes from another version"),
        ({**CASE.to_json(), "colour": "red"}, "case has unknown fields ['colour']"),
        ({**CASE.to_json(), "seed": 8}, f"case was edited: its digest is {CASE.digest!r} but its content has"),
        (_without("seed"), "case was edited"),
        ({**CASE.to_json(), "digest": None}, "case was edited"),
        ({**CASE.to_json(), "seed": "8"}, "seed must be an integer from 0 to 4294967295, got '8'"),
        ({**CASE.to_json(), "problem": 3}, "problem: expected an object with 'input', 'layers' and 'loss'"),
        ({**CASE.to_json(), "plan": []}, "plan: expected an object, got []"),
    ],
)
def test_edited_foreign_and_truncated_data_is_refused(data, message):
    with pytest.raises(UsageError) as error:
        case_from_json(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_edit_is_accepted_once_its_digest_is_removed():
    assert case_from_json({**_without("digest"), "seed": 8}) == CASE.replace(seed=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": 3}, "Case: problem must be a ProblemSpec or 'FILE.py:NAME', got 3"),
        ({"plan": (1, 2)}, "Case: plan must be a Plan, got (1, 2)"),
        ({"dtype": "int8"}, "dtype must be one of float64, float32, bfloat16, float16; got 'int8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ({"seed": True}, "seed must be an integer from 0 to 4294967295, got True"),
        ({"optimizer": 3}, "optimizer must be a name or None, got 3"),
    ],
)
def test_a_bad_case_is_refused(change, message):
    with pytest.raises(UsageError) as error:
        CASE.replace(**change)
    assert message in str(error.value)


def test_groups_are_written_and_read_where_there_are_several():
    several = CASE.replace(groups=3)
    assert case_from_json(json.loads(json.dumps(several.to_json()))) == several
    assert eval(repr(several)) == several
    assert several.digest != CASE.digest
    assert "groups" not in CASE.to_json()
    assert "groups" not in repr(CASE)


@pytest.mark.parametrize("groups", [0, -1, 1.5, True, "2"])
def test_number_of_groups_that_is_no_positive_integer_is_refused(groups):
    with pytest.raises(UsageError, match="groups must be a positive integer"):
        CASE.replace(groups=groups)
