"""The parts that a GPU runs: that they end, that nothing is lost when they are cut, and that
nothing passes unseen.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from gradcheck_suite.cli.exit_status import BAD_USAGE
from gradcheck_suite.core.records import append_record, read_lines, records_path
from studies.commands.gpu import MINUTES, PARTS
from studies.records import KINDS
from studies.tests import device_run
from studies.tests.device_run import (
    STOPPING,
    Stage,
    StageRun,
    Task,
    ended_by_a_signal,
    judged,
    keep,
    stages,
)
from studies.tests.report.made_up import build, record

SUMMARY = "==== {} in 2.00s ===="
PYTEST = Task("tests", "-m pytest", says=" passed")
WAITS = "import time; print('begun', flush=True); time.sleep(90)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize(
    "part", [pytest.param(one, marks=[pytest.mark.full] * (i > 0)) for i, one in enumerate(PARTS)]
)
def test_without_a_device_nothing_runs(run, tmp_path, part):
    outcome = run("gpu", "--out", tmp_path / "out", "--part", part)
    assert outcome.status == BAD_USAGE
    assert "a CUDA device for torch and JAX is needed" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "status", "output", "stopped", "result"),
    [
        (PYTEST, 0, SUMMARY.format("3 passed, 1 skipped"), False, "3 passed, 1 skipped"),
        (PYTEST, 0, SUMMARY.format("4 skipped"), False, None),
        (PYTEST, 1, SUMMARY.format("1 failed, 3 passed"), False, None),
        (
            PYTEST,
            2,
            "!!!! --minutes 1 are over, before a.py::test !!!!\n" + SUMMARY.format("3 passed"),
            False,
            None,
        ),
        (PYTEST, 0, SUMMARY.format("3 passed"), True, None),
        (PYTEST, -9, "a.py::test PASSED", False, None),
        (Task("verify", "verify"), 0, "", False, "status 0"),
        (Task("verify", "verify"), 3, "", False, None),
        (
            Task("fault", "audit", 1, "mean-of-means"),
            1,
            "gradient: mean-of-means",
            False,
            "status 1, mean-of-means",
        ),
        (Task("fault", "audit", 1, "mean-of-means"), 1, "gradient: wrong-scale", False, None),
        (Task("fault", "audit", 1, "mean-of-means"), 0, "mean-of-means", False, None),
    ],
)
def test_only_what_ended_by_itself_with_the_expected_words_is_as_expected(
    task, status, output, stopped, result
):
    found = judged(task, status, output, stopped=stopped)
    assert found["as_expected"] == (result is not None)
    if result is not None:
        assert found["result"] == result


def test_of_a_run_of_pytest_that_was_killed_the_tests_are_counted():
    output = (
        "[gw0] [ 3%] PASSED a.py::one\n[gw1] [ 5%] PASSED a.py::two\na.py::three FAILED [ 7%]\n"
    )
    found = judged(PYTEST, -9, output, stopped=True)
    assert (found["result"], found["as_expected"]) == (
        "2 passed, 1 failed, stopped before its end",
        False,
    )


@pytest.fixture
def stage_run(tmp_path):
    """Return a function that makes the run of a stage of Python programs."""
    with (tmp_path / "log").open("a") as log:

        def made(*programs):
            tasks = tuple(
                Task(f"task {number}", f'-c "{program}"') for number, program in enumerate(programs)
            )
            return StageRun(Stage(1, tasks), "cpu", tmp_path, log, time.monotonic() + 90)

        yield made


def _once_logged(tmp_path, lines, act):
    """Call `act` in another thread as soon as the log has all lines."""

    def wait():
        while not lines <= set((tmp_path / "log").read_text().splitlines()):
            time.sleep(0.1)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.share(4)
def test_what_runs_when_the_time_is_over_is_stopped_and_its_log_is_kept(
    stage_run, tmp_path, monkeypatch
):
    """Planted: a command that waits, and one that ignores the request and leaves a process with the
    pipe behind.
    """
    monkeypatch.setattr(device_run, "STOPPING", 2.0)
    child = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True); "
    )
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {child}{WAITS}"
    ran = stage_run(WAITS, deaf, "print('done')")
    _once_logged(
        tmp_path, {"task 0: begun", "task 1: begun", "task 2: done"}, lambda: setattr(ran, "end", 0)
    )
    found = ran.run()
    assert [one["as_expected"] for one in found] == [False, False, True]
    assert found[1]["status"] == -signal.SIGKILL
    assert all(one["seconds"] < 60 for one in found)


@pytest.mark.full
def test_sigterm_stops_the_commands_and_what_they_found_is_still_returned(stage_run, tmp_path):
    ran = stage_run(WAITS)
    with ended_by_a_signal():
        _once_logged(tmp_path, {"task 0: begun"}, lambda: os.kill(os.getpid(), signal.SIGTERM))
        (found,) = ran.run()
    assert ran.interrupted
    assert not found["as_expected"]
    assert found["seconds"] < 60


def test_of_what_a_verdict_stores_only_the_records_are_kept(tmp_path):
    """So that a part leaves at most a log for each part and a file for each kind of record."""
    (tmp_path / "made" / "counterexamples").mkdir(parents=True)
    command = f"gradcheck-suite verify --reports {tmp_path / 'made'}"
    append_record(
        tmp_path / "made", KINDS["verify"], {"loop": "zero_"}, environment={}, command=command
    )
    keep(tmp_path / "made", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == ["verify.jsonl"]
    ((_, found),) = read_lines(records_path(tmp_path / "out", "verify"))
    assert found["data"]["loop"] == "zero_"
    assert found["command"] == "gradcheck-suite verify --reports reports"
    kinds = {"verify", "audit", "gpu", "benchmark", "memory"}
    assert len(PARTS) + len(kinds) <= 8


@pytest.mark.parametrize(
    "part", [pytest.param(one, marks=[pytest.mark.full] * (i > 0)) for i, one in enumerate(PARTS)]
)
def test_every_stage_can_end_within_eight_minutes(part):
    assert 60 * MINUTES + 2 * STOPPING <= 8 * 60
    for device in ("cuda", "cpu"):
        commands = [task.command for stage in stages(part, device) for task in stage.tasks]
        assert all("{minutes}" in command for command in commands if "pytest" in command)
        files = re.findall(r"(?:studies|tests|properties)[\w/]*(?:\.py)?", " ".join(commands))
        assert files
        assert all(
            (Path(__file__).parents[2] / file).exists()
            for file in files
            if "." in file or "/" in file
        )
    assert sum("--require-cuda" in command for command in commands) == 0


def test_the_report_starts_with_what_ran_on_a_gpu(tmp_path):
    about = {
        "part": "correctness",
        "task": "tests",
        "result": "3 passed",
        "as_expected": True,
        "seconds": 61.2,
    }
    record(tmp_path, "verify", loop="zero_", verdict="holds", dtype="float64", device="cpu")
    record(tmp_path, "gpu", **about, device="cpu", gpu="no GPU: rehearsed on the CPU")
    assert "gpu" not in {section.key for section in build(tmp_path).sections}
    record(tmp_path, "gpu", **about, device="cuda", gpu="NVIDIA H100 80GB HBM3")
    first = build(tmp_path).sections[0]
    (shown,) = first.tables
    assert shown.caption == "What ran on NVIDIA H100 80GB HBM3"
    assert shown.rows == (("correctness", "tests", "3 passed", "yes", 61),)
