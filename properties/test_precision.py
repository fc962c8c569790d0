"""Lower precisions: sound loops hold within the derived bounds, and faults are still far outside them."""

from __future__ import annotations

import pytest
from hypothesis import event, given, target

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, check
from gradcheck_suite.loops import BUILT_IN
from properties import faults
from properties.helpers import DEVICES, assert_holds, scaled

LOW = ("float32", "bfloat16", "float16")
LOOPS = ("zero_", "set_to_none", "flat_buffer", "plain", "rescale_at_the_end")
REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOOPS)
@scaled(3)
@given(case=cases())
def test_sound_loops_hold(name, dtype, device, case):
    verdict = check(BUILT_IN[name], case.replace(dtype=dtype, device=device))
    event(f"error over allowed: {'above' if verdict.ratio > 0.5 else 'below'} a half")
    target(verdict.ratio, label="error over allowed")
    assert_holds(verdict)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "loop", [faults.mean_of_means, faults.no_divide, faults.no_reset, faults.reset_per_micro_batch]
)
def test_a_planted_fault_is_caught(loop, dtype):
    # one item against three: a mean of means is off by far more than the 2**-8 of bfloat16
    violation = check(loop, Case(REGRESSION, Plan((1, 3, 2, 2), 2, 2), dtype=dtype, seed=1)).violation
    assert violation is not None
    assert violation.kind == "gradient"
