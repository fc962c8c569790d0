"""The script of a loop on several ranks starts them itself; of what it cannot show there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.results import Violation
from gradcheck_suite.script import NoScriptError, script_text
from gradcheck_suite.verification.check import check
from tests.script.test_violations import LINEAR

pytestmark = pytest.mark.usefixtures("ranks")
LOOP = """
import torch
import torch.distributed as dist

def train(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        while window := [batches.pop(0) for _ in batches[: run.accumulation_steps]]:
            total = sum(run.count(batch) for batch in window)
            dist.all_reduce(total)
            for batch in window:
                (run.loss(run.model, batch) * run.count(batch) / total).backward()
            for p in run.model.parameters():
                {reduce}
            {step}
            run.optimizer.zero_grad()
"""
SOUND = {"reduce": "dist.all_reduce(p.grad)", "step": "run.optimizer.step()"}
CASE = Case(LINEAR, Plan((1, 2, 3, 1), 2, ranks=(2, 2)))


@pytest.mark.full  # each script imports torch three times
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"reduce": "dist.all_reduce(p.grad) if run.rank else dist.all_reduce(p.grad.clone())"}, 0),
        ({"step": "run.optimizer.step(); run.optimizer.step()"}, 1),
    ],
)
def test_a_script_of_ranks_ends_with_1_for_the_fault_and_with_0_for_the_sound_loop(
    tmp_path, monkeypatch, changes, kind
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    file, violation = tmp_path / "mine.py", None
    for told, planted in ((1, changes), (0, {})):
        file.write_text(LOOP.format(**{**SOUND, **planted}))
        loop = resolve_loop("mine.py:train")
        violation = violation or check(loop, CASE).violation
        assert violation.kind == ("gradient", "step-count")[kind]
        script = tmp_path / f"script{told}.py"
        script.write_text(script_text(loop, "mine.py:train", violation))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        assert done.returncode == told, (done.stdout, done.stderr)
        assert done.stdout.endswith("the fault is there\n" if told else "the fault is gone\n")


def test_without_a_script_of_ranks_there_is_a_reason():
    violation = Violation("raised", "deadlock", "planted", CASE)
    with pytest.raises(NoScriptError, match="does not show an exception or ranks that wait"):
        script_text(lambda run: None, "mine.py:train", violation)
