"""The plugin in repositories of its users: each test runs pytest on a small one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gradcheck_suite

LOOPS = """
import pytest

def sound(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        for first in range(0, len(batches), run.accumulation_steps):
            window = batches[first : first + run.accumulation_steps]
            total = sum(run.count(batch) for batch in window)
            for batch in window:
                loss = run.loss(run.model, batch)
                (loss * run.count(batch) / total if run.reduction == "mean" else loss).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

def faulty(run):
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                run.optimizer.step()
                run.optimizer.zero_grad()
"""


def _pytest(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_mine.py").write_text(LOOPS + tests)
    root = Path(gradcheck_suite.__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    if "gradcheck-suite" not in _installed():
        command += ["-p", "gradcheck_suite.pytest_plugin"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**_environment(), "PYTHONPATH": str(root)},
    )
    return done.returncode, done.stdout + done.stderr


def _installed() -> set[str]:
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="pytest11")}


def _environment() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")}


def test_a_sound_loop_passes_and_a_faulty_one_fails_with_its_explanation(tmp_path):
    status, text = _pytest(
        tmp_path,
        """
def test_sound(verify_training_loop):
    result = verify_training_loop(sound, examples=10)
    assert result.holds and result.cases == 10

def test_faulty(verify_training_loop):
    verify_training_loop(faulty, examples=50)
""",
    )
    assert status == 1
    assert "1 failed, 1 passed" in text
    assert "faulty is violated" in text
    assert "mean-of-means" in text or "wrong-scale" in text
    assert "@example(Case(" in text
    assert "Traceback" not in text
    assert "sound: holds, 10 cases" in text
    assert "faulty: VIOLATED (" in text


def test_the_marker_and_the_command_line_set_what_the_call_does_not(tmp_path):
    tests = """
@pytest.mark.gradcheck(examples=7, assumes=("equal-micro-batches", "whole-windows"))
def test_marked(verify_training_loop):
    print("cases", verify_training_loop(faulty).cases)
"""
    status, text = _pytest(tmp_path, tests, "-s")
    assert status == 0, text
    assert "cases 7" in text
    status, text = _pytest(tmp_path, tests, "-s", "--gradcheck-examples", "4")
    assert "cases 4" in text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("verify_training_loop(sound, exampels=3)", "expected some of examples, seed"),
        ("verify_training_loop(sound, examples=0)", "examples must be a positive integer, got 0"),
        ("verify_training_loop(3)", "a loop must be callable with one TrainingRun, got int"),
    ],
)
def test_a_wrong_call_is_one_clear_failure(tmp_path, call, says):
    status, text = _pytest(tmp_path, f"\ndef test_it(verify_training_loop):\n    {call}\n")
    assert status == 1
    assert says in text
    assert "Traceback" not in text
    assert "During handling" not in text


def test_jax_has_its_say_on_a_problem_and_export_leaves_no_logs(tmp_path):
    status, text = _pytest(
        tmp_path,
        """
import torch
from gradcheck_suite import Problem

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(1, 1)

problem = Problem(model, lambda items, seed: torch.ones(items, 1), lambda m, b: m(b).pow(2).mean())

def test_first(verify_training_loop):
    verify_training_loop(sound, problem=problem, examples=1, second_opinion_s=0)

def test_second(verify_training_loop):
    verify_training_loop(sound, problem=problem, examples=1, second_opinion_s=0)
    assert False, "so that pytest shows what was logged"
""",
    )
    assert status == 1
    assert text.count("; JAX gave a second opinion on 1 of ") == 2
    assert "so that pytest shows what was logged" in text
    assert "torch.__trace" not in text


def test_reports_are_stored_on_demand_and_workers_are_summed_up(tmp_path):
    tests = """
@pytest.mark.parametrize("number", range(2))
def test_faulty(verify_training_loop, number):
    verify_training_loop(faulty, examples=50, name=f"faulty{number}")
"""
    status, text = _pytest(tmp_path, tests, "-n", "2", "--gradcheck-reports", "kept")
    assert status == 1
    assert "faulty0: VIOLATED" in text
    assert "faulty1: VIOLATED" in text
    assert len(list((tmp_path / "kept" / "counterexamples").glob("*.json"))) == 2
    assert len((tmp_path / "kept" / "records" / "verify.jsonl").read_text().splitlines()) == 2


def test_importing_the_plugin_imports_no_framework():
    code = "import sys, gradcheck_suite.pytest_plugin; print([m for m in ('torch', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_where_nothing_could_be_judged_the_test_fails(tmp_path):
    """In float16 a loss of 1e9 overflows, in the plain large batch too: nothing is known of the loop."""
    status, output = _pytest(
        tmp_path,
        """
import torch
from gradcheck_suite import Problem

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(1, 1)

huge = Problem(model, lambda items, seed: torch.ones(items, 1), lambda m, b: (1e9 * m(b)).sum(), reduction="sum")

def test_it(verify_training_loop):
    verify_training_loop(sound, problem=huge, examples=2, dtype="float16")
""",
    )
    assert status == 1
    assert "none of 2 cases could be judged" in output
