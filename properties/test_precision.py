"""Lower precisions: sound loops hold within the derived bounds, and faults are still far outside
them.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, target

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, check
from gradcheck_suite.loops.reset_modes import BUILT_IN
from properties.assertions import assert_holds
from properties.devices import DEVICES
from properties.helpers import REGRESSION, scaled
from studies.zoo import BUGS

LOW = ("float32", "bfloat16", "float16")
LOOPS = ("zero_", "set_to_none", "flat_buffer", "plain", "rescale_at_the_end")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@scaled(4)
@given(case=cases())
def test_sound_loops_hold(dtype, device, case):
    for name in LOOPS:
        verdict = check(BUILT_IN[name], case.replace(dtype=dtype, device=device))
        event(f"error over allowed: {'above' if verdict.ratio > 0.5 else 'below'} a half")
        assert_holds(verdict=verdict, name=name)


@pytest.mark.parametrize("dtype", LOW)
@scaled(10)
@given(case=cases())
def test_holds_where_the_error_is_driven_up(dtype, case):
    verdict = check(BUILT_IN["zero_"], case.replace(dtype=dtype))
    target(verdict.ratio, label="error over allowed")
    assert_holds(verdict=verdict)


def test_what_torch_cannot_run_in_a_dtype_is_no_fault_of_the_loop():
    spec = ProblemSpec(
        Input("vector", size=2),
        (Layer("linear", features=2, bias=True),),
        Loss("multi_margin", class_weights=False, margin=1.0, p=1, reduction="mean"),
    )
    # torch has no multi_margin_loss for bfloat16 on the CPU
    verdict = check(BUILT_IN["zero_"], Case(spec, Plan((1, 3), 2), dtype="bfloat16"))
    assert verdict.violation is None
    assert "the plain large batch fails in bfloat16" in verdict.skipped


def test_two_sparse_gradients_that_torch_cannot_add_are_no_fault_of_the_loop():
    embedding = Layer("embedding", features=2, padding_idx=False, sparse=True)
    spec = ProblemSpec(
        Input("tokens", length=3, padded=False, vocabulary=5),
        (embedding,),
        Loss("mse", reduction="mean"),
    )
    verdict = check(BUILT_IN["zero_"], Case(spec, Plan((1, 1), 2), dtype="float16"))
    assert verdict.violation is None
    assert "accumulating plain gradients fails in float16" in verdict.skipped
    assert check(BUILT_IN["zero_"], Case(spec, Plan((1, 1), 1), dtype="float16")).holds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "name", ["mean-of-means", "no-divide", "no-reset", "reset-per-micro-batch"]
)
def test_a_planted_fault_is_caught(name, dtype, device):
    # one item against three: a mean of means is off by far more than the 2**-8 of bfloat16
    case = Case(REGRESSION, Plan((1, 3, 2, 2), 2, 2), dtype=dtype, device=device, seed=1)
    violation = check(BUGS[name].loop, case).violation
    assert violation is not None
    assert violation.kind == "gradient"
