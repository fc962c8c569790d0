"""A gradient scaler may skip the step of a window whose gradient overflows, and no other."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.loops.precision import grad_scaler
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.verification.judge_run import SCALER_SKIPPED

SPEC = ProblemSpec(
    Input("sequence", length=3, padded=False, size=2),
    (Layer("attention", causal=False, heads=1),),
    Loss("mse", reduction="sum"),
)
# momentum takes the parameters where the gradient of the third window exceeds float16's largest number
OVERFLOWS = Case(SPEC, Plan((1, 1, 2, 1, 1, 1, 1, 1), 3), seed=81569260, optimizer="momentum")
SMALL = OVERFLOWS.replace(
    problem=ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), SPEC.loss)
)


def _grows(run):
    """Scale by a factor that grows after every step, until it overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=2.0**18, growth_interval=1)
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = part_of_window(run, batch, total)
            scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skip_at_parameters_where_the_gradient_overflows_is_right(dtype):
    verdict = check(grad_scaler, OVERFLOWS.replace(dtype=dtype), autocast="float16")
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (2, {SCALER_SKIPPED: 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skip_where_only_the_scale_overflows_is_found(dtype):
    assert check(grad_scaler, SMALL.replace(dtype=dtype), autocast="float16").windows_skipped == {}
    violation = check(_grows, SMALL.replace(dtype=dtype), autocast="float16").violation
    assert (violation.kind, violation.diagnosis) == ("step-count", "skipped-steps")
