"""Accumulated = one large batch, as torch computes it and as JAX computes it, for every built-in
loop.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import event, given, target
from hypothesis import strategies as st

from gradcheck_suite import Case, Plan, cases, check
from gradcheck_suite.core.comparison import quick_bound, worst_difference
from gradcheck_suite.core.contract import assumptions_of
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference import programs
from gradcheck_suite.reference.large_batch import Reference, opinions
from gradcheck_suite.reference.programs import CompiledPrograms
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.optimizers import FOR_ANY_LOOP
from properties.assertions import assert_holds, assert_within_rounding
from properties.devices import DEVICES, JAX_PLATFORMS
from properties.helpers import REGRESSION, scaled
from studies.zoo import BUGS

ASSUMING = {name: loop for name, loop in BUILT_IN.items() if assumptions_of(loop)}
EVERYWHERE = {name: loop for name, loop in BUILT_IN.items() if not assumptions_of(loop)}
UNEQUAL = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)
FAULTS = (
    "mean-of-means",
    "no-divide",
    "double-divide",
    "tail-divided-by-steps",
    "reset-per-micro-batch",
    "no-reset",
    "rescaled-accumulator",
    "first-only",
)


def _note(case: Case) -> None:
    plan = case.plan
    event(f"unequal micro-batches: {len(set(plan.micro_batches)) > 1}")
    event(f"short last window: {plan.has_short_window}")
    event(
        f"windows: {min(len(plan.windows), 2)}, epochs: {min(plan.epochs, 2)} (2 stands for more)"
    )
    event(f"some micro-batch has no valid targets: {bool(plan.masked)}")


# all loops share the cases, so that the references of a case are computed once
@pytest.mark.share(4)
@pytest.mark.parametrize("device", DEVICES)
@scaled(2)
@given(case=cases())
def test_every_built_in_loop_gives_the_large_batch_gradient(device, case):
    _note(case)
    for name, loop in EVERYWHERE.items():
        assert_holds(verdict=check(loop, case.replace(device=device)), name=name)


@scaled(5)
@given(case=cases())
def test_holds_where_the_error_is_driven_up(case):
    verdict = check(BUILT_IN["zero_"], case)
    target(verdict.ratio, label="error over allowed")
    assert_holds(verdict=verdict)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ASSUMING)
@scaled(4)
@given(data=st.data())
def test_a_loop_that_assumes_holds_inside_its_assumptions(name, device, data):
    case = data.draw(cases(device=device, assumes=assumptions_of(ASSUMING[name])), label="case")
    _note(case)
    assert_holds(verdict=check(ASSUMING[name], case))


@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(case=st.sampled_from(FOR_ANY_LOOP).flatmap(lambda optimizer: cases(optimizer=optimizer)))
def test_holds_along_the_path_of_a_real_optimizer(device, case):
    event(f"optimizer: {case.optimizer}")
    for name in ("zero_", "set_to_none", "flat_buffer"):
        assert_holds(verdict=check(BUILT_IN[name], case.replace(device=device)), name=name)


@scaled(10)
@given(case=cases())
def test_torch_and_jax_agree_whole_and_accumulated(case):
    reference = Reference(generated_instance(case))
    assert reference.finding is None, f"{reference.finding}\n{case!r}"
    window = reference.window(len(case.plan.windows) - 1)
    found = opinions(window, window.jax)
    expected = found.pop("torch large batch")
    for name, gradient in found.items():
        difference = worst_difference(
            gradient, expected, quick_bound(expected, len(window.members))
        )
        if difference.ratio > 1:
            difference = window.compare(gradient).worst
        assert_within_rounding(
            what=f"{name} against torch's large batch", difference=difference, case=case
        )


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
    assert_within_rounding(
        what=f"JAX on the {platform} against JAX here", difference=difference, case=case
    )


def test_a_platform_that_is_off_is_noticed():
    reference = Reference(generated_instance(UNEQUAL))
    window = reference.window(0)
    off = window.jax * (1 + 1e-9)
    assert worst_difference(off, window.jax, quick_bound(window.jax, len(window.members))).ratio > 1
    assert window.compare(off).ratio > 1


def _jax_gradient(reference, platform):
    """Return JAX's gradient of the first window, computed by programs compiled for a platform."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "PROGRAMS", _programs(platform))
        return reference.by_jax(reference.values64, [reference.window(0).items])[0]


@cache
def _programs(platform):
    return CompiledPrograms(platform=platform)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, device):
    violation = check(BUGS[name].loop, UNEQUAL.replace(device=device)).violation
    assert violation is not None
    assert violation.kind == "gradient"


@pytest.mark.parametrize("device", DEVICES)
def test_a_fault_behind_an_optimizer_is_caught(device):
    violation = check(
        BUGS["mean-of-means"].loop, UNEQUAL.replace(optimizer="adamw", device=device)
    ).violation
    assert violation is not None
    assert violation.diagnosis == "mean-of-means"


@pytest.mark.parametrize("name", ASSUMING)
def test_an_assumption_that_does_not_hold_is_caught(name):
    assert check(ASSUMING[name], UNEQUAL).violation is not None
