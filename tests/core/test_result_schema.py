"""`result.schema.json` and what the commands really write."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from importlib.resources import files

import pytest

from gradcheck_suite import Result, Violation
from gradcheck_suite.cli import run
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.results import (
    BOTH,
    MovedByZeros,
    Unknown,
    Weight,
    result_from_json,
    results_to_json,
)
from tests.auditing.running import audited
from tests.auditing.scripts import write
from tests.one_problem import MEAN_OF_MEANS

# a machine that is lent to run tests of CUDA may lack it, and collects every file
Draft202012Validator = pytest.importorskip("jsonschema").Draft202012Validator
SCHEMA = json.loads(files("gradcheck_suite.core").joinpath("result.schema.json").read_text())
PARTS = SCHEMA["$defs"]
DERIVED = {"verdict", "violation"}


def valid(document):
    Draft202012Validator(SCHEMA).validate(document)
    return document["results"]


def properties(kind, command):
    return {part.name for part in fields(kind) if command in part.metadata.get("json", BOTH)}


def optional(kind, command):
    return {part.name for part in fields(kind) if command in part.metadata.get("optional", ())}


def test_it_is_a_schema():
    Draft202012Validator.check_schema(SCHEMA)
    assert PARTS["fault"]["enum"] == list(FAULTS)


@pytest.mark.parametrize(
    ("part", "kind", "command"),
    [
        ("weight", Weight, "verify"),
        ("weight_of_call", Weight, "audit"),
        ("violation", Violation, "verify"),
        ("violation_of_step", Violation, "audit"),
        ("of_verify", Result, "verify"),
        ("of_audit", Result, "audit"),
    ],
)
def test_its_properties_are_the_fields(part, kind, command):
    derived = DERIVED if kind is Result else set()
    assert PARTS[part]["properties"].keys() == properties(kind, command) | derived
    assert set(PARTS[part]["required"]) >= PARTS[part]["properties"].keys() - optional(
        kind, command
    )


def test_so_are_those_of_what_could_not_be_judged_and_of_what_zeros_moved():
    unknown = PARTS["of_audit"]["properties"]["unknown"]["items"]
    moved, _ = PARTS["of_verify"]["properties"]["moved_by_zeros"]["anyOf"]
    assert unknown["properties"].keys() == properties(Unknown, "audit")
    assert moved["properties"].keys() == properties(MovedByZeros, "verify")


LOOPS = f"""{MEAN_OF_MEANS}
def infinite(run):
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                p.grad = p.grad and p.grad.fill_(float("inf"))
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                run.optimizer.step()
                run.optimizer.zero_grad()

def raises(run):
    raise ValueError
"""


@pytest.fixture
def verified(tmp_path, monkeypatch):
    """The file that `verify --json` wrote, and its document."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(LOOPS)

    def verify(*arguments):
        run(["verify", *arguments, "--examples", "2", "--json", "out.json"])
        return json.loads((tmp_path / "out.json").read_text())

    return verify


@pytest.mark.parametrize(
    "loop",
    [
        "my.py:halves",
        *(pytest.param(f"my.py:{name}", marks=pytest.mark.full) for name in ("infinite", "raises")),
    ],
)
def test_verify_writes_it_and_replay_reads_it(loop, verified, capsys):
    (result,) = valid(verified(loop))
    assert result["verdict"] == "violated"
    assert json.loads(json.dumps(result_from_json(result).to_json())) == result
    assert run(["replay", "out.json"]) == 1
    assert f": {result['violation']['diagnosis']}: " in capsys.readouterr().out


@pytest.mark.full
def test_verify_writes_it_of_a_loop_that_holds(verified):
    (result,) = valid(verified("zero_"))
    assert result["verdict"] == "holds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("sound_equal", {}),
        ("faulty_mean_of_means", {}),
        ("faulty_mean_of_means", {"accept": ("mean-of-means",)}),
        ("faulty_tail_dropped", {}),
        ("unjudged_by_func_grad", {}),
    ],
)
def test_audit_writes_it(folder, script, options):
    result, _ = audited(folder / f"{script}.py", **options)
    (written,) = valid(json.loads(json.dumps(results_to_json([result], {}), allow_nan=False)))
    assert written["verdict"] == result.verdict
    read = result_from_json(written)
    assert replace(read, seconds=result.seconds) == result
