"""What a verdict says to do helps: the loop that is changed as its fix says holds."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest

from gradcheck_suite.verification.verify import verify

LOOP = """
import torch

def train(run):
    {begin}
    for epoch in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches), k):
            window = batches[first : first + k]
            {window}
            total = sum(run.count(batch) for batch in window)
            for batch in window:
                {batch}
                loss = run.loss(run.model, batch)
                weight = {weight} if run.reduction == "mean" else 1.0
                (loss * weight).backward()
            {step}
            {after}
"""
SOUND = {
    "begin": "run.optimizer.zero_grad()",
    "window": "pass",
    "batch": "pass",
    "weight": "run.count(batch) / total",
    "step": "run.optimizer.step()",
    "after": "run.optimizer.zero_grad()",
}


@dataclass(frozen=True)
class Fix:
    """A fault, a part of what its verdict says to do, and the loop changed as it says.

    Attributes:
        diagnosis: the name of the fault.
        faulty: slots of the loop with the fault.
        says: words of the fix.
        fixed: slots of the loop that is changed as the fix says.
    """

    diagnosis: str
    faulty: dict[str, str]
    says: str
    fixed: dict[str, str]


SKIPS = "if len(window) < k: continue"
CLIPS = "torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)"
FIXES = [
    Fix(
        "mean-of-means",
        {"weight": "1 / len(window)"},
        "divide each micro-batch's summed loss by the number of targets in the whole window",
        {"weight": "run.count(batch) / total"},
    ),
    Fix(
        "wrong-scale",
        {"weight": "run.count(batch)"},
        "divide each summed loss by the window's count",
        {"weight": "run.count(batch) / total"},
    ),
    Fix("stale-window", {"after": "pass"}, "reset once after every step", {}),
    Fix(
        "reset-inside-window",
        {"batch": "run.optimizer.zero_grad()"},
        "reset once per window, not once per micro-batch",
        {"window": "run.optimizer.zero_grad()"},
    ),
    Fix(
        "tail-dropped",
        {"window": SKIPS},
        "step after the last micro-batch of an epoch too",
        {},
    ),
    Fix("clipped", {"step": f"{CLIPS}; run.optimizer.step()"}, "switch", {}),
    Fix(
        "no-gradient",
        {"step": "run.optimizer.zero_grad(); run.optimizer.step()"},
        "do not reset between backward and step",
        {},
    ),
    Fix(
        "repeated-step",
        {"step": "run.optimizer.step(); run.optimizer.step()"},
        "step once, where a window has been accumulated",
        {},
    ),
    Fix(
        "wrong-mode",
        {"begin": "run.optimizer.zero_grad(); run.model.eval()"},
        "call `model.train()`",
        {"begin": "run.optimizer.zero_grad(); run.model.eval(); run.model.train()"},
    ),
]
DEFAULT = ("mean-of-means", "tail-dropped")


@pytest.mark.parametrize(
    "fix",
    [
        pytest.param(
            fix, marks=() if fix.diagnosis in DEFAULT else pytest.mark.full, id=fix.diagnosis
        )
        for fix in FIXES
    ],
)
def test_a_loop_that_is_changed_as_its_fix_says_holds(fix, tmp_path):
    results = []
    for name, slots in (("faulty", fix.faulty), ("fixed", fix.fixed)):
        file = tmp_path / f"{name}.py"
        file.write_text(LOOP.format(**{**SOUND, **slots}))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        results.append(verify(module.train, examples=40, quiet=True))
    faulty, fixed = results
    assert fix.diagnosis in faulty.violation.diagnosis, faulty.violation.explanation
    assert fix.says in faulty.violation.fix
    assert fixed.violation is None, fixed.violation.explanation
