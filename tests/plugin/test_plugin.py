"""The plugin in a repository of its user, on which each test runs pytest in this process."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from dataclasses import replace
from importlib.metadata import entry_points

import pytest
import torch

from gradcheck_suite.__main__ import main
from gradcheck_suite.core.records import KINDS, read_records
from gradcheck_suite.verification import verify as verification
from tests.cli.conftest import ENVIRONMENT, LOOPS
from tests.one_problem import draw_only_linear

NUMBERS = itertools.count()
"""Of test modules: each has a name of its own, since all are imported into this process."""
BEGINNING = """
import pytest
from loops import *
"""


@pytest.fixture
def run_pytest(tmp_path, monkeypatch):
    """Return a function that runs pytest on the text of a test module.

    It returns the exit status and the output.
    """
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    draw_only_linear(monkeypatch)
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else str(tmp_path.parent / name))
    plugin = [] if _is_installed() else ["-p", "gradcheck_suite.pytest_plugin"]

    def run(tests: str, *arguments: str) -> tuple[int, str]:
        name = f"test_user_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(BEGINNING + tests)
        command = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *plugin,
            *arguments,
            f"{name}.py",
        ]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = pytest.main(command)
        sys.modules.pop(name, None)
        sys.modules.pop("loops", None)
        return int(status), printed.getvalue()

    return run


def _is_installed() -> bool:
    return "gradcheck-suite" in {point.name for point in entry_points(group="pytest11")}


@pytest.mark.share(4)
def test_verdicts_markers_and_wrong_calls(run_pytest):
    status, text = run_pytest(
        """
def test_sound(verify_training_loop):
    result = verify_training_loop(sound, examples=3)
    assert result.holds and result.cases == 3

def test_faulty(verify_training_loop):
    verify_training_loop(no_reset, examples=20)

@pytest.mark.gradcheck(examples=1, dtype="float32", assumes=("equal-micro-batches",))
@pytest.mark.gradcheck(examples=9)
def test_marked(verify_training_loop):
    result = verify_training_loop(sound, examples=2)
    assert (result.cases, result.assumes) == (2, ("equal-micro-batches",))

@pytest.mark.gradcheck(5)
def test_positional(verify_training_loop):
    verify_training_loop(sound)

@pytest.mark.parametrize("options", [{"exampels": 3}, {"examples": 0}])
def test_wrong_option(verify_training_loop, options):
    verify_training_loop(sound, **options)

def test_wrong_loop(verify_training_loop):
    verify_training_loop(3)

def test_unjudged(verify_training_loop):
    '''In float16 a loss of 1e9 overflows, in the plain large batch too: nothing is known of the loop.'''
    huge = Problem(model, batch, lambda m, b: (1e9 * m(b["x"])).sum(), reduction="sum")
    verify_training_loop(sound, problem=huge, examples=2, dtype="float16")
"""
    )
    assert status == 1
    assert "6 failed, 2 passed" in text
    for said in (
        "no_reset is violated",
        "stale-window",
        "@example(Case(",
        "sound: holds, 3 cases",
        "no_reset: VIOLATED (stale-window)",
        "the marker gradcheck takes keywords alone, got (5,)",
        "expected one of examples, seed",
        "examples: expected a positive integer, got 0",
        "is of type int: expected a function of one argument, the TrainingRun",
        "none of 2 cases could be judged",
    ):
        assert said in text, text
    assert "Traceback" not in text
    assert "During handling" not in text


@pytest.mark.full
def test_options_of_the_command_line_override_the_call(run_pytest, tmp_path):
    tests = """
@pytest.mark.gradcheck(examples=7)
def test_it(verify_training_loop):
    verify_training_loop(sound, examples=3, seed=1)
"""
    arguments = (
        "--gradcheck-examples",
        "2",
        "--gradcheck-seed",
        "5",
        "--gradcheck-reports",
        "kept",
    )
    assert run_pytest(tests, *arguments)[0] == 0
    ((record,), _) = read_records(tmp_path / "kept", KINDS["verify"])
    assert (record.data["examples"], record.data["cases"], record.data["seed"]) == (2, 2, 5)


@pytest.mark.full
@pytest.mark.parametrize("loop", ["never", "sound", "no_reset"])
def test_the_command_line_and_the_plugin_record_the_same(run_pytest, tmp_path, loop, capsys):
    tests = f"""
def test_it(verify_training_loop):
    verify_training_loop({loop}, name="loops.py:{loop}", examples=6, seed=3, dtype="float32", optimizer="sgd",
                         assumes=("whole-windows",), time_limit_s=20, second_opinion_s=60)
"""
    options = ("--examples", "6", "--seed", "3", "--dtype", "float32", "--optimizer", "sgd", "--assume",
               "whole-windows", "--time-limit", "20")  # fmt: skip
    assert run_pytest(tests, "--gradcheck-reports", "plugin")[0] == main(
        ["verify", f"loops.py:{loop}", *options, "--reports", "command"]
    )
    kept = []
    for folder in ("plugin", "command"):
        ((record,), problems) = read_records(tmp_path / folder, KINDS["verify"])
        assert problems == []
        files = {
            path.name: path.read_text()
            for path in (tmp_path / folder / "counterexamples").glob("*")
        }
        kept.append(({**record.data, "seconds": None}, record.environment, record.commit, files))
    assert kept[0] == kept[1]
    assert len(kept[0][-1]) == (0 if loop == "sound" else 2)


def test_a_finding_fails_the_test_and_blames_no_loop(run_pytest, monkeypatch):
    verify = verification.verify

    def with_finding(*arguments, **options):
        return replace(verify(*arguments, **options), findings=("torch and JAX differ on case 1",))

    monkeypatch.setattr(verification, "verify", with_finding)
    status, text = run_pytest(
        "def test_it(verify_training_loop):\n    verify_training_loop(sound, examples=1)\n"
    )
    assert status == 1
    assert "sound holds, but torch and JAX disagree:\ntorch and JAX differ on case 1" in text
    assert "violated" not in text


@pytest.mark.full
def test_jax_has_its_say_on_a_problem_and_export_leaves_no_logs(run_pytest):
    status, text = run_pytest(
        """
@pytest.mark.parametrize("failing", [False, True])
def test_it(verify_training_loop, failing):
    verify_training_loop(sound, problem=PROBLEM, examples=1, second_opinion_s=0)
    assert not failing, "so that pytest shows what was logged"
"""
    )
    assert status == 1
    assert text.count("; JAX gave a second opinion on 1 of ") == 2
    assert "so that pytest shows what was logged" in text
    assert "torch.__trace" not in text


def _train(*, reset):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        torch.nn.functional.cross_entropy(
            model(torch.randn(3, 2)), torch.tensor([0, 1, 1])
        ).backward()
        optimizer.step()
        if reset:
            optimizer.zero_grad()


def test_the_fixture_fails_a_test_whose_training_is_violated_or_not_seen(audit_training):
    with audit_training() as audit:
        _train(reset=True)
    assert audit.result.windows == 3
    with pytest.raises(pytest.fail.Exception, match="stale-window"), audit_training():
        _train(reset=False)
    for options, message in (
        ({}, r"no optimizer\.step\(\) was seen"),
        ({"steps": 0}, "steps: expected a positive"),
    ):
        with pytest.raises(pytest.fail.Exception, match=message), audit_training(**options):
            pass
