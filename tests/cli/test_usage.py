"""Bad usage and bad input: one clear line on standard error, status 2, and nothing written."""

from __future__ import annotations

import pytest

from gradcheck_suite.cli import exit_status
from gradcheck_suite.run import instance


def assert_one_line(outcome, *said):
    assert outcome.status == exit_status.BAD_USAGE == 2
    assert outcome.err.startswith("gradcheck-suite")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for text in said:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--examples", "--examples: expected one argument"),
        ("--exam 5", "unrecognized arguments: --exam"),
        ("--json missing/out.json", "--json missing/out.json: there is no folder missing"),
        ("--json .", "--json .: expected the path of a file, got a folder"),
        (
            "--json loops.py",
            "--json loops.py: expected a path for the results, such as results.json, got a script",
        ),
        ("--reports loops.py", "--reports loops.py: loops.py is not a folder"),
        ("--problem loops.py", "loops.py names no problem: expected loops.py:NAME; it defines "),
        (
            "--problem loops.py:model",
            "loops.py:model is model(seed): expected a gradcheck_suite.Problem",
        ),
        ("loops.py:soud", "loops.py has no 'soud' (did you mean 'sound'?)"),
        (
            "loops.py:PROBLEM",
            "loops.py:PROBLEM is a Problem, not a loop: pass it as --problem loops.py:PROBLEM",
        ),
        (
            "loops.py:summed --problem loops.py:PROBLEM",
            "loops.py:summed assumes sum-reduction, but the reduction of",
        ),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_bad_arguments_of_verify(run, arguments, said):
    assert_one_line(run("verify", *arguments.split()), "gradcheck-suite verify: error: ", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a command, one of verify, replay, "),
        (["verfy"], "doctor; got 'verfy'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["doctor", "extra"], "unrecognized arguments: extra"),
        (["replay"], "CASE.json"),
    ],
)
def test_bad_commands(run, arguments, said):
    assert_one_line(run(*arguments), said)


@pytest.mark.usefixtures("untouched")
def test_cuda_where_there_is_none(run, monkeypatch):
    monkeypatch.setattr(instance.torch.cuda, "is_available", lambda: False)
    assert_one_line(run("verify", "--device", "cuda"), "sees no CUDA device here: use --device cpu")


@pytest.mark.parametrize("path", ["/proc/nothing", "/proc/nothing/deeper"])
def test_reports_that_cannot_be_written(run, path):
    pytest.importorskip("resource")  # /proc belongs to systems that have it
    assert_one_line(run("verify", "zero_", "--reports", path), f"--reports {path}: ")


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "--list"]])
def test_what_is_missing_is_said_before_anything_is_imported(run, monkeypatch, arguments):
    from gradcheck_suite.run import environment

    monkeypatch.setattr(
        environment, "missing", lambda: ["torch is not installed: pip install 'torch>=2.9'"]
    )
    assert_one_line(run(*arguments), "torch is not installed: pip install")


def test_a_bug_in_the_suite_is_neither_a_verdict_nor_bad_usage(run, monkeypatch):
    from gradcheck_suite.cli import doctor

    def broken(arguments):
        raise RuntimeError("planted")

    monkeypatch.setattr(doctor, "run", broken)
    outcome = run("doctor")
    assert outcome.status == 70
    assert "RuntimeError: planted" in outcome.err
    assert outcome.err.endswith("this is a bug in gradcheck-suite; please report it\n")


def test_version(run):
    from gradcheck_suite import __version__

    assert run("--version").out == f"gradcheck-suite {__version__}\n"


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("lbfgs", "it needs a loop that calls run.optimizer.step(closure)"),
        pytest.param(
            "muon",
            "optimizer muon trains parameters with two dimensions alone",
            marks=pytest.mark.full,
        ),
        ("sparseadam", "optimizer sparseadam trains sparse gradients alone"),
    ],
)
def test_an_optimizer_that_cannot_train_with_a_loop_or_model_is_one_line(run, optimizer, says):
    assert_one_line(run("verify", "zero_", "--optimizer", optimizer, "--examples", "3"), says)
