"""Accumulated = one large batch, as torch computes it and as JAX computes it, for every built-in loop."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import event, given, target
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, check
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.loops import BUILT_IN
from gradcheck_suite.numerics.bounds import quick_bound
from gradcheck_suite.numerics.comparison import worst_difference
from gradcheck_suite.references import jax_reference
from gradcheck_suite.references.programs import Programs
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.schema.contract import assumptions_of
from properties import faults
from properties.helpers import DEVICES, JAX_PLATFORMS, assert_holds, scaled

ASSUMING = {name: loop for name, loop in BUILT_IN.items() if assumptions_of(loop)}
EVERYWHERE = {name: loop for name, loop in BUILT_IN.items() if not assumptions_of(loop)}
REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)
UNEQUAL = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)
FAULTS = (
    faults.mean_of_means,
    faults.no_divide,
    faults.double_divide,
    faults.tail_over_steps,
    faults.reset_per_micro_batch,
    faults.no_reset,
    faults.running_sum_rescaled,
    faults.first_only,
    faults.clip_per_micro_batch,
)


def _note(case: Case) -> None:
    plan = case.plan
    event(f"unequal micro-batches: {len(set(plan.micro_batches)) > 1}")
    event(f"short last window: {plan.has_short_window}")
    event(f"windows: {min(len(plan.windows), 2)}, epochs: {min(plan.epochs, 2)} (2 stands for more)")
    event(f"some micro-batch counts nothing: {bool(plan.masked)}")


# every loop is held to the same cases: their references, the dearer half, are computed once
@pytest.mark.parametrize("device", DEVICES)
@given(case=cases())
def test_every_built_in_loop_gives_the_large_batch_gradient(device, case):
    _note(case)
    for name, loop in EVERYWHERE.items():
        assert_holds(check(loop, case.replace(device=device)), name)


@scaled(5)
@given(case=cases())
def test_holds_where_the_error_is_driven_up(case):
    verdict = check(BUILT_IN["zero_"], case)
    target(verdict.ratio, label="error over allowed")
    assert_holds(verdict)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ASSUMING)
@scaled(4)
@given(data=st.data())
def test_a_loop_that_assumes_holds_inside_its_assumptions(name, device, data):
    case = data.draw(cases(device=device, assumes=assumptions_of(ASSUMING[name])), label="case")
    _note(case)
    assert_holds(check(ASSUMING[name], case))


@pytest.mark.parametrize("device", DEVICES)
@scaled(2)
@given(case=st.sampled_from(sorted(OPTIMIZERS)).flatmap(lambda optimizer: cases(optimizer=optimizer)))
def test_holds_along_the_path_of_a_real_optimizer(device, case):
    event(f"optimizer: {case.optimizer}")
    for name in ("zero_", "set_to_none", "flat_buffer"):
        assert_holds(check(BUILT_IN[name], case.replace(device=device)), name)


@scaled(10)
@given(case=cases())
def test_torch_and_jax_agree_whole_and_accumulated(case):
    reference = Reference(generated_instance(case))
    assert reference.finding is None, f"{reference.finding}\n{case!r}"
    window = reference.window(len(case.plan.windows) - 1)
    opinions = window.opinions(window.jax)
    expected = opinions.pop("torch large batch")
    for name, gradient in opinions.items():
        difference = worst_difference(gradient, expected, quick_bound(expected, len(window.members)))
        if difference.ratio > 1:
            difference = window.compare(gradient).worst
        assert difference.ratio <= 1, f"{name} is off by {difference.error:.3g} from torch's large batch\n{case!r}"


@pytest.mark.parametrize("platform", JAX_PLATFORMS)
@scaled(20)
@given(case=cases())
def test_the_jax_reference_is_the_same_on_every_platform(platform, case):
    reference = Reference(generated_instance(case))
    window = reference.window(0)
    there = _jax_gradient(reference, platform)
    difference = worst_difference(there, window.jax, quick_bound(window.jax, len(window.members)))
    if difference.ratio > 1:
        difference = window.compare(there).worst
    assert difference.ratio <= 1, f"on the {platform}, JAX is off by {difference.error:.3g}\n{case!r}"


def test_a_platform_that_is_off_is_noticed():
    reference = Reference(generated_instance(UNEQUAL))
    window = reference.window(0)
    off = window.jax * (1 + 1e-9)
    assert worst_difference(off, window.jax, quick_bound(window.jax, len(window.members))).ratio > 1
    assert window.compare(off).ratio > 1


def _jax_gradient(reference, platform):
    """Return JAX's gradient of the first window, computed by programs compiled for a platform."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_reference, "PROGRAMS", _programs(platform))
        return Window(reference, 0, None, None).jax


@cache
def _programs(platform):
    return Programs(platform=platform)


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_a_planted_fault_is_caught(loop):
    violation = check(loop, UNEQUAL).violation
    assert violation is not None
    assert violation.kind == "gradient"


def test_a_fault_behind_an_optimizer_is_caught():
    violation = check(faults.mean_of_means, UNEQUAL.replace(optimizer="adamw")).violation
    assert violation is not None
    assert violation.diagnosis == "mean-of-means"


@pytest.mark.parametrize("name", ASSUMING)
def test_an_assumption_that_does_not_hold_is_caught(name):
    assert check(ASSUMING[name], UNEQUAL).violation is not None
