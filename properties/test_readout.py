"""The weight read-out probe: the accumulated gradient is the vector of weights that a loop gives to each item.

The expected weights are written down by hand, from what each loop's lines say, never computed by the suite.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Plan
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.loops import BUILT_IN
from gradcheck_suite.schema.contract import Loop, assumptions_of
from gradcheck_suite.schema.weight_probe import probe_case
from properties import faults
from properties.helpers import DEVICES, observe, scaled

EVERYWHERE = {name: loop for name, loop in BUILT_IN.items() if not assumptions_of(loop)}


def weights(loop: Loop, plan: Plan, reduction: str = "mean", device: str = "cpu") -> list[list[float]]:
    """Return, for every step, the weight that a loop gave each item."""
    instance = generated_instance(probe_case(plan, reduction, device=device))
    gradients = [observation.gradients["0.weight"] for observation in observe(loop, instance)]
    return [[0.0] * plan.total_items if g is None else g.tolist() for g in gradients]


def assert_weights(loop: Loop, plan: Plan, expected: list[list[float]], reduction: str = "mean") -> None:
    """Assert that a loop gives exactly these weights, bit for bit."""
    __tracebackhide__ = True
    got = weights(loop, plan, reduction)
    assert got == expected, f"weights {got}, should be {expected} [{plan!r}, {reduction}]"


@st.composite
def power_of_two_plans(draw: st.DrawFn) -> Plan:
    """Draw plans whose windows all count a power of two, however their micro-batches are cut."""
    k = draw(st.integers(1, 6))
    windows = draw(st.integers(1, 4))
    sizes: list[int] = []
    for w in range(windows):
        total = 2 ** draw(st.integers(math.ceil(math.log2(k)), 5))
        count = draw(st.integers(1, k)) if w == windows - 1 else k
        cuts = draw(st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1)) if count > 1 else ()
        ends = [0, *sorted(cuts), total]
        sizes += [end - start for start, end in pairwise(ends)]
    return Plan(tuple(sizes), k, draw(st.integers(1, 3)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", EVERYWHERE)
@scaled(3)
@given(plan=power_of_two_plans())
def test_every_item_weighs_exactly_one_over_the_count(name, reduction, device, plan):
    event(f"short last window: {plan.has_short_window}")
    event(f"micro-batches of other sizes than powers of two: {any(n & (n - 1) for n in plan.micro_batches)}")
    steps = weights(EVERYWHERE[name], plan, reduction, device)
    for step, got in enumerate(steps):
        items = plan.window_items(step % len(plan.windows))
        due = 1.0 if reduction == "sum" else 1.0 / len(items)
        expected = [due if i in items else 0.0 for i in range(plan.total_items)]
        assert got == expected, f"step {step}: weights {got}, should be {expected} [{plan!r}]"


# two windows of K = 2 and a short one: items 0 | 1 2 3 // 4 5 | 6 7 // 8 9
PLAN = Plan((1, 3, 2, 2, 2), 2)
THIRD = 1 / 3


def test_sound_weights_by_hand():
    quarter = [0.25] * 4
    assert_weights(
        BUILT_IN["zero_"], PLAN, [[*quarter, *[0.0] * 6], [*[0.0] * 4, *quarter, 0, 0], [*[0.0] * 8, 0.5, 0.5]]
    )


def test_mean_of_means_weighs_one_over_k_times_its_own_size():
    expected = [[1 / 2, *[(1 / 2) / 3] * 3, *[0.0] * 6], [*[0.0] * 4, *[1 / 4] * 4, 0, 0], [*[0.0] * 8, 1 / 2, 1 / 2]]
    assert_weights(faults.mean_of_means, PLAN, expected)


def test_no_divide_weighs_one_over_its_own_size():
    expected = [[1.0, *[THIRD] * 3, *[0.0] * 6], [*[0.0] * 4, *[1 / 2] * 4, 0, 0], [*[0.0] * 8, 1 / 2, 1 / 2]]
    assert_weights(faults.no_divide, PLAN, expected)


def test_double_divide_weighs_one_over_k_squared_times_its_own_size():
    expected = [[1 / 4, *[(1 / 4) / 3] * 3, *[0.0] * 6], [*[0.0] * 4, *[1 / 8] * 4, 0, 0], [*[0.0] * 8, 1 / 2, 1 / 2]]
    assert_weights(faults.double_divide, PLAN, expected)


def test_a_tail_divided_by_k_weighs_r_over_k_too_little():
    # one micro-batch of two items in the last window: 1/(K * 2) where 1/2 is right
    expected = [[1 / 2, *[(1 / 2) / 3] * 3, *[0.0] * 6], [*[0.0] * 4, *[1 / 4] * 4, 0, 0], [*[0.0] * 8, 1 / 4, 1 / 4]]
    assert_weights(faults.tail_over_steps, PLAN, expected)


def test_reset_per_micro_batch_keeps_the_last_one_only():
    expected = [[0.0, *[THIRD] * 3, *[0.0] * 6], [*[0.0] * 6, 1 / 2, 1 / 2, 0, 0], [*[0.0] * 8, 1 / 2, 1 / 2]]
    assert_weights(faults.reset_per_micro_batch, PLAN, expected)


def test_no_reset_keeps_every_earlier_window():
    first = [*[0.25] * 4, *[0.0] * 6]
    assert_weights(faults.no_reset, PLAN, [first, [*[0.25] * 8, 0, 0], [*[0.25] * 8, 0.5, 0.5]])


def test_no_reset_counts_a_second_epoch_twice():
    assert_weights(faults.no_reset, Plan((1, 1), 2, 2), [[0.5, 0.5], [1.0, 1.0]])


def test_first_only_keeps_the_first_mean():
    expected = [[1.0, *[0.0] * 9], [*[0.0] * 4, 1 / 2, 1 / 2, *[0.0] * 4], [*[0.0] * 8, 1 / 2, 1 / 2]]
    assert_weights(faults.first_only, PLAN, expected)


def test_a_rescaled_running_sum_weighs_geometrically():
    assert_weights(faults.running_sum_rescaled, Plan((1, 1, 1, 1), 4), [[1 / 16, 1 / 8, 1 / 4, 1 / 2]])


def test_sums_need_no_division():
    assert_weights(faults.no_divide, PLAN, weights(BUILT_IN["summed"], PLAN, "sum"), "sum")
    assert_weights(BUILT_IN["summed"], Plan((1, 3), 2), [[1.0] * 4], "sum")


@pytest.mark.parametrize("loop", [faults.mean_of_means, faults.no_divide, faults.no_reset, faults.first_only])
def test_a_fault_is_caught(loop):
    with pytest.raises(AssertionError, match="should be"):
        assert_weights(loop, Plan((1, 3, 4), 2), [[0.25] * 4 + [0.0] * 4, [0.0] * 4 + [0.25] * 4])
