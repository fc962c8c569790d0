"""The reset modes hand over equal gradients; where they may differ is None against zeros, and exactly there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, problems
from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.loops import MODES
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.schema.contract import Loop
from properties import faults
from properties.helpers import DEVICES, observe, scaled, unequal
from properties.routed import EXPERTS, routed_instance
from properties.tally import TALLY

TO_NONE = ("set_to_none", "grad_none")
TO_ZEROS = ("zero_", "zero_grad", "zero_grad_foreach", "zero_before_forward", "zero_between")
REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)
TWO_WINDOWS = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)

routes = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=1, max_size=8)


def reached(instance: Instance) -> list[set[str]]:
    """Return, for each window of an epoch, the parameters that some micro-batch of it reaches, by autograd alone."""
    plan, model = instance.case.plan, instance.model()
    names = [
        {name for name, g in gradients_of(instance, model, plan.items(j)).items() if g is not None}
        for j in range(len(plan.micro_batches))
    ]
    return [set().union(*(names[j] for j in window)) for window in plan.windows]


def assert_modes_agree(instance: Instance, loops: dict[str, Loop]) -> None:
    """Assert that every loop hands over what the first one does, step by step, by `==`."""
    __tracebackhide__ = True
    first, *others = loops
    expected = observe(loops[first], instance)  # warms up what the others would find warm
    with TALLY.timed(first):
        observe(loops[first], instance)
    for name in others:
        with TALLY.timed(name):
            seen = observe(loops[name], instance)
        for step, (a, b) in enumerate(zip(expected, seen, strict=True)):
            wrong = unequal(a.gradients, b.gradients)
            assert not wrong, f"step {step}: {first} and {name} differ on {wrong}, should be equal [{instance.case!r}]"


def assert_none_pattern(instance: Instance, loop: Loop) -> None:
    """Assert that a gradient is None exactly where no micro-batch of the window reaches its parameter."""
    __tracebackhide__ = True
    windows = reached(instance)
    for step, observation in enumerate(observe(loop, instance)):
        present = {name for name, g in observation.gradients.items() if g is not None}
        due = windows[step % len(windows)]
        assert present == due, f"step {step}: gradients on {sorted(present)}, should be on {sorted(due)}"


def assert_zeros_pattern(instance: Instance, loop: Loop) -> None:
    """Assert that a parameter keeps a gradient once it was reached, zeros in windows that do not reach it."""
    __tracebackhide__ = True
    windows, so_far = reached(instance), set[str]()
    for step, observation in enumerate(observe(loop, instance)):
        now = windows[step % len(windows)]
        so_far |= now
        present: dict[str, Any] = {name: g for name, g in observation.gradients.items() if g is not None}
        assert present.keys() == so_far, f"step {step}: gradients on {sorted(present)}, should be on {sorted(so_far)}"
        leaked = [name for name in so_far - now if present[name].count_nonzero()]
        assert not leaked, f"step {step}: {leaked} were not reached, their gradients should be zeros"


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases(problem=problems(sparse=False)))
def test_all_modes_agree(device, case):
    event(f"windows: {min(case.plan.steps, 2)} (2 stands for more)")
    assert_modes_agree(generated_instance(case.replace(device=device)), MODES)


@pytest.mark.parametrize("device", DEVICES)
@scaled(2)
@given(routes=routes, k=st.integers(1, 4), epochs=st.integers(1, 2))
def test_all_modes_agree_where_parameters_are_missed(device, routes, k, epochs):
    instance = routed_instance(routes, k, epochs=epochs, device=device)
    event(f"some window misses a parameter: {any(len(names) < 2 * EXPERTS for names in reached(instance))}")
    assert_modes_agree(instance, MODES)


@pytest.mark.parametrize("name", TO_NONE)
@given(routes=routes, k=st.integers(1, 4), epochs=st.integers(1, 2))
def test_none_exactly_where_no_micro_batch_reaches(name, routes, k, epochs):
    assert_none_pattern(routed_instance(routes, k, epochs=epochs), MODES[name])


@pytest.mark.parametrize("name", TO_NONE)
@scaled(2)
@given(case=cases())
def test_none_pattern_of_drawn_models(name, case):
    instance = generated_instance(case)
    trainable = sum(p.requires_grad for p in instance.model().parameters())
    event(f"some window misses a parameter: {any(len(names) < trainable for names in reached(instance))}")
    assert_none_pattern(instance, MODES[name])


@pytest.mark.parametrize("name", TO_ZEROS)
@scaled(2)
@given(routes=routes, k=st.integers(1, 4), epochs=st.integers(1, 2))
def test_once_reached_stays_zeros(name, routes, k, epochs):
    assert_zeros_pattern(routed_instance(routes, k, epochs=epochs), MODES[name])


def test_a_forgotten_reset_is_caught():
    with pytest.raises(AssertionError, match="differ on"):
        assert_modes_agree(generated_instance(TWO_WINDOWS), {**MODES, "fault": faults.reset_all_but_the_last})


def test_zeros_in_place_of_none_are_caught():
    with pytest.raises(AssertionError, match="should be on"):
        assert_none_pattern(routed_instance([[0], [1]], 1), faults.zeros_for_none)


def test_none_in_place_of_zeros_is_caught():
    with pytest.raises(AssertionError, match="should be on"):
        assert_zeros_pattern(routed_instance([[0], [1]], 1), MODES["set_to_none"])


def test_a_leak_into_an_unreached_parameter_is_caught():
    with pytest.raises(AssertionError, match="should be zeros"):
        assert_zeros_pattern(routed_instance([[0], [1]], 1), faults.no_reset)
