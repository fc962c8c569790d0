"""The command `steps`: prints, records, refuses."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest

from gradcheck_suite.core.records import read_records
from studies.records import KINDS


@pytest.mark.full
def test_steps_are_printed_recorded_and_written(run, tmp_path):
    outcome = run(
        "steps", "sgd", "--seeds", "1", "--json", tmp_path / "rows.json", "--reports", tmp_path
    )
    assert outcome.status == 0
    assert outcome.out.startswith("SGD  agrees, 36 cases, worst error 0")
    assert "    dampening, which torch applies from the second gradient on" in outcome.out
    assert outcome.out.endswith(
        "optimizers: 1; steps of torch and optax differ by more than rounding in 0\n"
    )
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["torch"], row["cases"], row["agree"]) == ("SGD", 36, True)
    assert 0 <= row["error_over_allowed"]["float64"] <= 1
    assert 0 < row["error_over_allowed"]["float32"] <= 1
    (record,), _ = read_records(tmp_path, KINDS["step"])
    assert record.data["rows"] == [row]


@pytest.mark.full
def test_a_step_that_differs_is_a_finding(run, tmp_path, monkeypatch):
    from studies.optimizers import COUNTERPARTS

    wrong = replace(
        COUNTERPARTS["sgd"],
        make=lambda lr: COUNTERPARTS["rprop"].make(
            lr=lr, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), maximize=0.0
        ),
        variants=({},),
    )
    monkeypatch.setitem(COUNTERPARTS, "sgd", wrong)
    outcome = run("steps", "sgd", "--seeds", "1", "--reports", tmp_path)
    assert outcome.status == 3
    assert outcome.out.startswith("SGD  DIFFERS")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["adamm"], "optimizer must be one of sgd, .*lbfgs; got 'adamm'"),
        (["sgd", "--seeds", "0"], "--seeds"),
        (["sgd", "--device", "tpu"], "cpu, cuda"),
    ],
)
def test_bad_arguments_are_one_line(run, arguments, says):
    import re

    outcome = run("steps", *arguments)
    assert outcome.status == 2
    assert re.search(says, outcome.err)


def test_without_optax_the_extra_is_named_and_verify_still_runs(run, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "optax" else find(name, *rest)  # noqa: E731
    # the command's own name first: it is imported here, and keeps the function that it finds
    monkeypatch.setattr("studies.commands.steps.find_spec", hidden)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    outcome = run("steps", "sgd", "--reports", tmp_path)
    assert outcome.status == 2
    assert (
        outcome.err
        == "python -m studies steps: error: the command steps needs optax: pip install optax\n"
    )
