"""A folder with loops in it, and the command line called in this process."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.core.case import Case, Plan
from tests.one_problem import LINEAR

ENVIRONMENT = ("HYPOTHESIS_STORAGE_DIRECTORY", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE")
LOOPS = """
import torch
from gradcheck_suite import Problem, training_loop

def sound(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        for start in range(0, len(batches), run.accumulation_steps):
            window = batches[start : start + run.accumulation_steps]
            run.optimizer.zero_grad()
            total = sum(run.count(batch) for batch in window)
            for batch in window:
                loss = run.loss(run.model, batch)
                (loss * run.count(batch) / total if run.reduction == "mean" else loss).backward()
            run.optimizer.step()

def chatty(run):
    print("the loop says hello")
    sound(run)

def no_reset(run):
    zero_grad, run.optimizer.zero_grad = run.optimizer.zero_grad, lambda: None
    sound(run)

def raises(run):
    raise ValueError("two\\nlines")

CALLS = []

def tires(run):
    "In a process of its own, this loop is sound for a while."
    CALLS.append(run)
    (no_reset if len(CALLS) > 5 else sound)(run)

def needs_more(run):
    import nowhere_to_be_found

def instead(run):
    try:
        import nowhere_to_be_found
    except ImportError:
        raise RuntimeError("please install it")

def never(run):
    pass

def autocast(run):
    for _ in range(run.epochs):
        for batch in run.loader:
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                loss = run.loss(run.model, batch)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

@training_loop(assumes=("sum-reduction",))
def summed(run):
    sound(run)

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)

def batch(items, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(items, 2, generator=generator), "y": torch.randn(items, 1, generator=generator)}

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

PROBLEM = Problem(model, batch, loss)
CENTRED = Problem(model, batch, lambda m, b: (m(b["x"]) - b["y"]).std(correction=0))
"""


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    status: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory, with `loops.py` in it."""
    (tmp_path / "loops.py").write_text(textwrap.dedent(LOOPS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else str(tmp_path.parent / name))
    return tmp_path


@pytest.fixture
def run(project, capsys):
    """Call the command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


@pytest.fixture
def script_runs():
    """For a test about the script of a violation: a process of its own runs it, as for a user."""


@pytest.fixture(autouse=True)
def scripts_that_do_not_run(request, monkeypatch):
    """Save other tests the seconds in which a process of its own imports torch."""
    if "script_runs" not in request.fixturenames:
        monkeypatch.setattr("gradcheck_suite.script.script_failure", lambda *_: None)


@pytest.fixture
def untouched(project):
    """Hold that the test leaves the working directory as it was."""
    before = sorted(project.rglob("*"))
    yield
    after = [p for p in sorted(project.rglob("*")) if "__pycache__" not in p.parts]
    assert after == before


def files(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    )


@pytest.fixture
def a_case():
    """One small case."""
    return Case(LINEAR, Plan((1, 2), 2), seed=1)
