"""A window's gradient does not depend on the data of other windows, NaN and infinity included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, cases, plans
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.instance import Instance, generated_instance
from properties.assertions import assert_gradients_equal
from properties.devices import DEVICES
from properties.helpers import TWO_WINDOWS, observe, on_leaves, scaled, with_loss
from studies.reset_modes import RESET_MODES
from studies.zoo import BUGS

several_windows = cases(plan=plans(min_windows=2, max_accumulation_steps=4))
NO_RESET, BY_MULTIPLICATION = BUGS["no-reset"].loop, BUGS["reset-by-multiplication"].loop


def _elsewhere(instance: Instance, window: int) -> torch.Tensor:
    """Return (items,), True outside the window."""
    where = torch.ones(instance.case.plan.total_items, dtype=torch.bool, device=instance.device)
    items = instance.case.plan.window_items(window)
    where[items.start : items.stop] = False
    return where


def other_data(instance: Instance, window: int) -> Instance:
    """Return the instance with every item outside the window drawn anew."""
    where, drawn = _elsewhere(instance, window), generated_instance(instance.case.replace(seed=instance.case.seed ^ 1))

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor[where] = drawn.data[name][where]
        return tensor

    return on_leaves(instance, change)


def poisoned_data(instance: Instance, window: int, value: float) -> Instance:
    """Return the instance with `value` for every floating input and target outside the window."""
    where = _elsewhere(instance, window)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in ("x", "target") and tensor.is_floating_point():
            tensor[where] = value
        return tensor

    return on_leaves(instance, change)


def is_refused(instance: Instance) -> bool:
    """Return whether torch refuses the data, as `binary_cross_entropy` refuses a probability that is NaN."""
    try:
        instance.problem.loss(instance.model(), instance.batch(range(instance.case.plan.total_items)))
    except (RuntimeError, ValueError):
        return True
    return False


def poisoned_loss(instance: Instance, window: int, value: float) -> Instance:
    """Return the instance with the loss times `value` outside the window: reaches models that take integers too."""
    factor = torch.ones(instance.case.plan.total_items, dtype=instance.dtype, device=instance.device)
    factor[_elsewhere(instance, window)] = value
    loss = instance.problem.loss
    instance.data["factor"] = factor
    return with_loss(instance, lambda model, batch: loss(model, batch) * batch["factor"][0])


def assert_isolated(
    loop: Loop, instance: Instance, changed: Instance, window: int, *, name: str = "the loop", to_the_bit: bool = False
) -> None:
    """Fail unless a loop gives the same gradients of a window on both instances, which differ in the other windows."""
    __tracebackhide__ = True
    per_epoch = len(instance.case.plan.windows)
    pairs = list(zip(observe(loop, instance), observe(loop, changed), strict=True))
    for epoch, (a, b) in enumerate(pairs[window::per_epoch]):
        assert_gradients_equal(
            what=f"{name}, epoch {epoch}, window {window}, other data in other windows",
            observed=b.gradients,
            expected=a.gradients,
            case=instance.case,
            to_the_bit=to_the_bit,
        )


def assert_all_modes_isolated(instance: Instance, changed: Instance, window: int) -> None:
    """Fail unless every reset mode gives the same gradients of a window on both instances.

    A zeroed accumulator turns -0.0 into +0.0, where a parameter that no earlier window reached takes -0.0 as it is. So
    modes that zero are compared by `==`, and modes that release to the bit.
    """
    __tracebackhide__ = True
    for name, loop in MODES.items():
        assert_isolated(loop, instance, changed, window, name=name, to_the_bit=RESET_MODES[name].releases)


def _windows(case: Case) -> st.SearchStrategy[int]:
    return st.integers(0, len(case.plan.windows) - 1)


@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(case=several_windows, data=st.data())
def test_other_values_leave_no_trace(device, case, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case.replace(device=device))
    assert_all_modes_isolated(instance, other_data(instance, window), window)


@pytest.mark.full
@scaled(5)
@given(case=several_windows, value=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_non_finite_data_leave_no_trace(case, value, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case)
    event(f"floating inputs: {instance.data['x'].is_floating_point()}")
    changed = poisoned_data(instance, window, value)
    assume(not is_refused(changed))
    assert_all_modes_isolated(instance, changed, window)


@pytest.mark.parametrize("device", DEVICES)
@scaled(5)
@given(case=several_windows, value=st.sampled_from([math.nan, math.inf]), data=st.data())
def test_non_finite_gradients_leave_no_trace(device, case, value, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case.replace(device=device))
    assert_all_modes_isolated(instance, poisoned_loss(instance, window, value), window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reset_by_multiplication_is_caught(value, device):
    instance = generated_instance(TWO_WINDOWS.replace(device=device))
    with pytest.raises(pytest.fail.Exception, match="other data in other windows"):
        assert_isolated(BY_MULTIPLICATION, instance, poisoned_data(instance, 1, value), window=1)


def test_reset_by_multiplication_is_sound_on_finite_data():
    instance = generated_instance(TWO_WINDOWS)
    assert_isolated(BY_MULTIPLICATION, instance, other_data(instance, 1), window=1)


@pytest.mark.parametrize("device", DEVICES)
def test_no_reset_is_caught(device):
    instance = generated_instance(TWO_WINDOWS.replace(device=device))
    with pytest.raises(pytest.fail.Exception, match="other data in other windows"):
        assert_isolated(NO_RESET, instance, other_data(instance, 1), window=1)


def test_the_poison_arrives():
    instance = poisoned_data(generated_instance(TWO_WINDOWS), 1, math.nan)
    assert all(observe(MODES["set_to_none"], instance)[0].gradients["0.weight"].isnan().flatten())
