"""The precision that a loop is held to is declared by the loop or its user, never read from the run."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite.loops.precision import autocast_bfloat16, grad_scaler
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.verification.check import check

SPEC = ProblemSpec(
    Input("vector", size=8),
    (Layer("linear", features=8, bias=True), Layer("tanh"), Layer("linear", features=3, bias=True)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((2, 3, 1), 2), dtype="float32", seed=3)


def under(dtype, wrong=1.0):
    def undeclared(run):
        for window in windows(run):
            total = window_count(run, window) * wrong
            for batch in window:
                with torch.autocast(run.device.type, dtype=dtype):
                    loss = part_of_window(run, batch, total)
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return undeclared


@pytest.mark.parametrize("shrinking", [False, True])
def test_undeclared_autocast_is_named(shrinking):
    violation = check(under(torch.bfloat16), CASE, shrinking=shrinking).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "undeclared-autocast")
    assert "under torch.autocast in bfloat16 in a float32 run" in violation.explanation
    assert "--autocast bfloat16" in violation.explanation


def test_declared_autocast_holds():
    assert check(under(torch.bfloat16), CASE, autocast="bfloat16").holds
    assert check(autocast_bfloat16, CASE).holds
    assert check(grad_scaler, CASE).holds


def test_a_finer_declaration_does_not_cover_a_coarser_autocast():
    assert check(under(torch.float16), CASE, autocast="bfloat16").holds
    # the errors of bfloat16 are 8 times those of float16, and the bound is as wide: not every gradient shows it
    violations = [
        check(under(torch.bfloat16), CASE.replace(seed=seed), autocast="float16").violation for seed in range(8)
    ]
    assert {violation.diagnosis for violation in violations if violation} == {"undeclared-autocast"}


def test_a_fault_under_autocast_keeps_its_own_name():
    for autocast in (None, "bfloat16"):
        violation = check(under(torch.bfloat16, wrong=2.0), CASE, autocast=autocast).violation
        assert violation.diagnosis == "wrong-scale"


def test_autocast_that_changes_nothing_needs_no_declaration():
    assert check(under(torch.bfloat16), CASE.replace(dtype="float64")).holds
    assert check(under(torch.bfloat16), CASE.replace(dtype="bfloat16")).holds
