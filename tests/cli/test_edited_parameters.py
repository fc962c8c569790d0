"""`--assume edits-parameters` through the command line: the verdict, the script and the replay."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOP = """
import torch


def clips_weights(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        for i in range(0, len(batches), run.accumulation_steps):
            window = batches[i : i + run.accumulation_steps]
            total = sum(run.count(batch) for batch in window)
            for batch in window:
                loss = run.loss(run.model, batch)
                (loss * run.count(batch) / total if run.reduction == "mean" else loss).backward()
            run.optimizer.step()
            with torch.no_grad():
                for p in run.model.parameters():
                    p.clamp_(-0.1, 0.1)
            RESET
"""


def _gradcheck(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "gradcheck_suite", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.full
def test_edited_parameters_on_the_command_line(tmp_path):
    (tmp_path / "sound.py").write_text(LOOP.replace("RESET", "run.optimizer.zero_grad()"))
    (tmp_path / "leaks.py").write_text(LOOP.replace("RESET", "pass"))
    assume = ("--examples", "20", "--assume", "edits-parameters")
    status, said = _gradcheck("verify", "sound.py:clips_weights", "--examples", "20", cwd=tmp_path)
    assert status == 1
    assert "assume edits-parameters" in said
    assert _gradcheck("verify", "sound.py:clips_weights", *assume, cwd=tmp_path)[0] == 0
    status, said = _gradcheck("verify", "leaks.py:clips_weights", *assume, cwd=tmp_path)
    assert status == 1
    assert "gradient: stale-window" in said
    (script,) = (tmp_path / "reports" / "counterexamples").glob("leaks*.py")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "the fault is there" in done.stdout) == (1, True), done.stdout + done.stderr
    status, said = _gradcheck("replay", str(script.with_suffix(".json")), cwd=tmp_path)
    assert status == 1
    assert "gradient: stale-window" in said
