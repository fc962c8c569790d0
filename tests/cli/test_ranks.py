"""`verify --ranks`: loops and problems of a user's file on two processes, and what cannot start in
one line.
"""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from gradcheck_suite.cli import exit_status
from tests.cli.test_usage import assert_one_line
from tests.script.alone import run_alone

pytestmark = pytest.mark.usefixtures("ranks")
FILE = """
import torch.distributed as dist

def train(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        for start in range(0, len(batches), run.accumulation_steps):
            window = batches[start : start + run.accumulation_steps]
            run.optimizer.zero_grad()
            total = sum(run.count(batch) for batch in window)
            dist.all_reduce(total)
            for batch in window:
                (run.loss(run.model, batch) * run.count(batch) / total).backward()
            for p in run.model.parameters():
                dist.all_reduce(p.grad)
            run.optimizer.step()
"""
TOO_LATE = (
    "import os\nassert 'RANK' not in os.environ, 'no rank may import this'\ndef train(run): pass\n"
)


@pytest.mark.full
def test_a_users_loop_and_problem_run_in_every_rank(run, project):
    (project / "own.py").write_text(FILE)
    options = "--ranks 2 --examples 3 --assume busy-ranks --json result.json"
    outcome = run(*f"verify own.py:train --problem loops.py:PROBLEM {options}".split())
    assert outcome.status == exit_status.HOLDS, outcome.out + outcome.err
    (result,) = json.loads((project / "result.json").read_text())["results"]
    assert (result["verdict"], result["judged"]) == ("holds", 3)


@pytest.mark.full
def test_a_violation_of_ranks_is_stored_as_a_case_to_replay_and_a_script(run, project):
    (project / "own.py").write_text(FILE.replace("dist.all_reduce(total)", "pass"))
    options = "--ranks 2 --examples 1 --assume busy-ranks"
    outcome = run(*f"verify own.py:train --problem loops.py:PROBLEM {options}".split())
    assert outcome.status == exit_status.VIOLATED
    assert "mean-of-means" in outcome.out
    (script,) = project.glob("reports/counterexamples/*.py")
    # the file of the problem imports the suite for its Problem
    shown = run_alone(script.read_text(), missing=("tests", "jax"))
    assert shown.status == exit_status.VIOLATED
    (case,) = project.glob("reports/counterexamples/*.json")
    again = run(*f"replay {case}".split())
    assert again.status == exit_status.VIOLATED
    assert "mean-of-means" in again.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            "late.py:train --ranks 2 --examples 1",
            "no rank may import this",
            marks=pytest.mark.full,
        ),
        ("all_reduce/zero_ --ranks 2 --device cuda", "torch"),
        ("ddp/zero_", "ddp/zero_ trains on several ranks: give --ranks 2, 3 or 4"),
    ],
)
def test_ranks_that_cannot_start_are_one_line(run, project, arguments, said):
    (project / "late.py").write_text(TOO_LATE)
    assert_one_line(run("verify", *arguments.split()), said)


def test_a_backend_that_torch_lacks_is_one_line(run, monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert_one_line(
        run(*["verify", "all_reduce/zero_", "--ranks", "2"]),
        "2 ranks on cpu need the backend gloo, which torch",
    )


@pytest.mark.full
def test_a_loop_of_ones_own_that_needs_ranks_is_told_so(run, project):
    (project / "own.py").write_text(FILE)
    outcome = run("verify", "own.py:train", "--examples", "1")
    assert outcome.status == exit_status.VIOLATED
    assert "the loop needs several ranks: verify it with --ranks 2" in outcome.out
