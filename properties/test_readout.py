"""The weight probe: the accumulated gradient is the vector of weights that a loop gives to each
item.

The expected weights are written down by hand, from what each loop's lines say, never computed by
the suite.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Plan
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.contract import Loop, assumptions_of
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.run.instance import generated_instance
from properties.assertions import assert_equal
from properties.devices import DEVICES
from properties.helpers import observe, scaled
from studies.zoo import BUGS

EVERYWHERE = {name: loop for name, loop in BUILT_IN.items() if not assumptions_of(loop)}


def weights(
    loop: Loop, plan: Plan, reduction: str = "mean", device: str = "cpu"
) -> list[list[float]]:
    """Return, for every step, the weight that a loop gave each item."""
    instance = generated_instance(probe_case(plan, reduction, device=device))
    gradients = [observation.gradients["0.weight"] for observation in observe(loop, instance)]
    return [[0.0] * plan.total_items if g is None else g.tolist() for g in gradients]


def assert_weights(
    loop: Loop,
    plan: Plan,
    expected: list[list[float]],
    reduction: str = "mean",
    device: str = "cpu",
) -> None:
    """Fail unless a loop gives exactly these weights."""
    __tracebackhide__ = True
    observed = weights(loop, plan, reduction, device)
    assert_equal(what=f"weights ({reduction})", observed=observed, expected=expected, case=plan)


@st.composite
def power_of_two_plans(draw: st.DrawFn) -> Plan:
    """Draw plans whose windows all count a power of two, however their micro-batches are cut."""
    k = draw(st.integers(1, 6))
    windows = draw(st.integers(1, 4))
    sizes: list[int] = []
    for w in range(windows):
        total = 2 ** draw(st.integers(math.ceil(math.log2(k)), 5))
        count = draw(st.integers(1, k)) if w == windows - 1 else k
        cuts = (
            draw(st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1))
            if count > 1
            else ()
        )
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
    event(
        f"micro-batches of other sizes than powers of two: {any(n & (n - 1) for n in plan.micro_batches)}"
    )
    steps = weights(EVERYWHERE[name], plan, reduction, device)
    for step, got in enumerate(steps):
        items = plan.window_items(step % len(plan.windows))
        due = 1.0 if reduction == "sum" else 1.0 / len(items)
        expected = [due if i in items else 0.0 for i in range(plan.total_items)]
        assert_equal(what=f"step {step}, weights", observed=got, expected=expected, case=plan)


# two windows of K = 2 and a short one: items 0 | 1 2 3 // 4 5 | 6 7 // 8 9
PLAN = Plan((1, 3, 2, 2, 2), 2)


def test_sound_weights_by_hand():
    quarter = [0.25] * 4
    assert_weights(
        BUILT_IN["zero_"],
        PLAN,
        [[*quarter, *[0.0] * 6], [*[0.0] * 4, *quarter, 0, 0], [*[0.0] * 8, 0.5, 0.5]],
    )


def test_no_reset_counts_a_second_epoch_twice():
    assert_weights(BUGS["no-reset"].loop, Plan((1, 1), 2, 2), [[0.5, 0.5], [1.0, 1.0]])
