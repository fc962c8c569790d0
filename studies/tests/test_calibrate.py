"""The command: its figures, its record, its exit status."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import strategies as st

from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.case import ProblemSpec, case_from_json
from gradcheck_suite.reference import large_batch, rounding
from gradcheck_suite.strategies.cases import cases
from gradcheck_suite.verification import judge_run
from studies import calibration
from studies.calibration import drawn_layers
from tests.cli.conftest import files
from tests.one_problem import LINEAR

SMALL = ("calibrate", "--reports", "reports", "--checks", 40, "--planted", 1, "--dtypes", "float32")
FEWER = ("calibrate", "--reports", "reports", "--checks", 8, "--planted", 1, "--dtypes", "float32")
"""For a bound that nothing is within: every check then makes all draws."""


@pytest.fixture(autouse=True)
def _only_linear(monkeypatch):
    def drawn(**options):
        reduction = "sum" if "sum-reduction" in options["assumes"] else "mean"
        loss = type(LINEAR.loss)("mse", reduction=reduction)
        return cases(**options, problem=st.just(ProblemSpec(LINEAR.input, LINEAR.layers, loss)))

    monkeypatch.setattr(calibration, "cases", drawn)
    monkeypatch.setattr(large_batch.REFERENCES, "_kept", type(large_batch.REFERENCES._kept)())


def _record(project):
    (line,) = (project / "reports" / "records" / "calibration.jsonl").read_text().splitlines()
    return json.loads(line)


def test_no_false_alarm_is_status_0_with_a_record_and_figures(run, project):
    outcome = run(*SMALL)
    assert outcome.status == 0
    assert outcome.err == ""
    for text in (
        "40 checks of sound loops",
        "0 false alarms in 40 checks",
        "the largest element",
        f"of {len(drawn_layers())} kinds of",
    ):
        assert text in outcome.out
    record = _record(project)
    assert record["kind"] == "calibration"
    assert record["data"]["asked"] == {"checks": 40, "planted": 1, "seed": 0, "dtypes": ["float32"]}
    assert record["data"]["alarms"]["float32"]["judged"] == 40
    assert files(project / "reports") == ["records/calibration.jsonl"]


@pytest.fixture
def too_tight(monkeypatch):
    """Let the bound allow nothing."""
    for name in ("accumulation_bound", "coarse_bound"):
        monkeypatch.setattr(large_batch, name, lambda vector, *_, **__: np.zeros_like(vector))
    for name in ("likely_bound", "noise_bound"):
        monkeypatch.setattr(rounding, name, lambda vector, *_: np.zeros_like(vector))


@pytest.mark.usefixtures("too_tight")
def test_a_fault_of_torch_is_status_3(run):
    outcome = run(*FEWER)
    assert outcome.status == exit_status.DISAGREEMENT == 3
    assert "the float32 computation of torch is wrong" in outcome.out


@pytest.mark.usefixtures("too_tight")
def test_a_false_alarm_is_status_1_and_its_case_is_in_the_record(run, project, monkeypatch):
    monkeypatch.setattr(judge_run, "precision_fault", lambda window: None)
    outcome = run(*FEWER)
    assert outcome.status == exit_status.VIOLATED == 1
    assert "FALSE ALARM in float32" in outcome.out
    alarm = _record(project)["data"]["alarms"]["float32"]["alarms"][0]
    assert case_from_json(alarm["case"]).dtype == "float32"


def test_an_interrupted_run_says_so_and_what_goes_on_later(run, project, monkeypatch):
    interrupted = calibration.alarms_in_chunk
    monkeypatch.setattr(calibration, "CHUNK", 20)

    def stops(dtype, chunk, limit, seed, progress):
        if chunk == 1:
            raise KeyboardInterrupt
        return interrupted(dtype, chunk, limit, seed, progress)

    monkeypatch.setattr(calibration, "alarms_in_chunk", stops)
    outcome = run(*SMALL)
    assert outcome.status == exit_status.INTERRUPTED
    assert "0 false alarms in 20 checks" in outcome.out
    assert (
        "not recorded: python -m studies campaign calibrate goes on where it was stopped"
        in outcome.out
    )
    assert not (project / "reports" / "records").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--checks -1", "--checks: expected 0 or a positive integer, got '-1'"),
        ("--planted x", "--planted: expected 0 or a positive integer, got 'x'"),
        (
            "--dtypes int8",
            "--dtypes: expected one of float64, float32, bfloat16, float16; got 'int8'",
        ),
        ("--dtypes", "--dtypes: expected at least one argument"),
        ("--seed -1", "--seed: expected an integer from 0"),
        ("--reports loops.py", "--reports loops.py: loops.py is not a folder"),
        ("float32", "unrecognized arguments: float32"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_bad_usage_is_status_2_in_one_line(run, arguments, said):
    outcome = run("calibrate", *arguments.split())
    assert outcome.status == exit_status.BAD_USAGE
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
