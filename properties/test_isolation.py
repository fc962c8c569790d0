"""What earlier windows held, NaN and infinity too, leaves no trace in this window's gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, plans
from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.loops import MODES
from gradcheck_suite.schema.contract import Loop
from properties import faults
from properties.helpers import DEVICES, bit_unequal, observe, on_leaves, scaled, unequal, with_loss

TO_NONE = ("set_to_none", "grad_none")
REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)
TWO_WINDOWS = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)
several_windows = cases(plan=plans(min_windows=2, max_accumulation_steps=4))


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


def assert_isolated(loop: Loop, instance: Instance, changed: Instance, window: int, *, to_the_bit: bool) -> None:
    """Assert that a loop hands over the same gradients of a window whatever the others hold."""
    __tracebackhide__ = True
    compare, per_epoch = bit_unequal if to_the_bit else unequal, len(instance.case.plan.windows)
    pairs = list(zip(observe(loop, instance), observe(loop, changed), strict=True))
    for epoch, (a, b) in enumerate(pairs[window::per_epoch]):
        wrong = compare(a.gradients, b.gradients)
        assert not wrong, (
            f"epoch {epoch}, window {window}: gradients of {wrong} depend on other windows' data [{instance.case!r}]"
        )


def _windows(case: Case) -> st.SearchStrategy[int]:
    return st.integers(0, len(case.plan.windows) - 1)


# `zero_` keeps one bit of the past: a zeroed accumulator turns -0.0 into +0.0, where a parameter that was never
# reached before takes -0.0 as it is; so modes that zero are compared by `==`, modes that release to the bit
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODES)
@scaled(4)
@given(case=several_windows, data=st.data())
def test_other_values_leave_no_trace(name, device, case, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case.replace(device=device))
    assert_isolated(MODES[name], instance, other_data(instance, window), window, to_the_bit=name in TO_NONE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MODES)
@scaled(10)
@given(case=several_windows, data=st.data())
def test_non_finite_data_leave_no_trace(name, value, case, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case)
    event(f"floating inputs: {instance.data['x'].is_floating_point()}")
    changed = poisoned_data(instance, window, value)
    assume(not is_refused(changed))
    assert_isolated(MODES[name], instance, changed, window, to_the_bit=name in TO_NONE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", MODES)
@scaled(10)
@given(case=several_windows, data=st.data())
def test_non_finite_gradients_leave_no_trace(name, value, device, case, data):
    window = data.draw(_windows(case), label="window")
    instance = generated_instance(case.replace(device=device))
    changed = poisoned_loss(instance, window, value)
    assert_isolated(MODES[name], instance, changed, window, to_the_bit=name in TO_NONE)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reset_by_multiplication_is_caught(value):
    instance = generated_instance(TWO_WINDOWS)
    with pytest.raises(AssertionError, match="depend on other windows"):
        assert_isolated(
            faults.reset_by_multiplication, instance, poisoned_data(instance, 1, value), window=1, to_the_bit=False
        )


def test_reset_by_multiplication_is_sound_on_finite_data():
    instance = generated_instance(TWO_WINDOWS)
    assert_isolated(faults.reset_by_multiplication, instance, other_data(instance, 1), window=1, to_the_bit=False)


def test_no_reset_is_caught():
    instance = generated_instance(TWO_WINDOWS)
    with pytest.raises(AssertionError, match="depend on other windows"):
        assert_isolated(faults.no_reset, instance, other_data(instance, 1), window=1, to_the_bit=False)


def test_the_poison_arrives():
    instance = poisoned_data(generated_instance(TWO_WINDOWS), 1, math.nan)
    assert all(observe(MODES["set_to_none"], instance)[0].gradients["0.weight"].isnan().flatten())
