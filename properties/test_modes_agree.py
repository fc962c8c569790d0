"""The reset modes give equal gradients.

They differ in None against zeros, exactly where their records say.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import TrainingRun, cases, problems
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.reset_modes import MODES, backward_window, windows
from gradcheck_suite.reference.large_batch import gradients_of
from gradcheck_suite.run.instance import Instance, generated_instance
from gradcheck_suite.run.observer import Observation
from properties.assertions import assert_equal, assert_gradients_equal
from properties.devices import DEVICES
from properties.helpers import TWO_WINDOWS, observe, scaled
from properties.routed import EXPERTS, routed_instance
from studies.reset_modes import RESET_MODES, ResetMode
from studies.zoo import BUGS

routes = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=1, max_size=8
)


def reached(instance: Instance) -> list[set[str]]:
    """Return, for each window of an epoch, the parameters that some micro-batch of it reaches, by
    autograd alone.
    """
    plan, model = instance.case.plan, instance.model()
    names = [
        {name for name, g in gradients_of(instance, model, plan.items(j)).items() if g is not None}
        for j in range(len(plan.micro_batches))
    ]
    return [set().union(*(names[j] for j in window)) for window in plan.windows]


def assert_none_pattern(
    mode: ResetMode, instance: Instance, observations: list[Observation]
) -> None:
    """Fail unless gradients are None exactly where the mode's record says, and zeros where the
    window does not reach.

    Every parameter has a gradient from the start where the mode preallocates them. Otherwise a
    parameter has one from the first window that reaches it, and under a release only in windows
    that reach it.
    """
    __tracebackhide__ = True
    per_window, case = reached(instance), instance.case
    trainable = {name for name, p in instance.model().named_parameters() if p.requires_grad}
    present = set(trainable) if mode.preallocate is not None else set[str]()
    for step, observation in enumerate(observations):
        now = per_window[step % len(per_window)]
        present = set(now) if mode.releases else present | now
        gradients = {name: g for name, g in observation.gradients.items() if g is not None}
        what = f"{mode.name}, step {step}, parameters"
        assert_equal(
            what=f"{what} with a gradient", observed=set(gradients), expected=present, case=case
        )
        leaked = {name for name in present - now if gradients[name].count_nonzero()}
        assert_equal(
            what=f"{what} with a stale gradient", observed=leaked, expected=set(), case=case
        )


def assert_modes_agree(
    instance: Instance, loops: dict[str, Loop], *, check_none: bool = False
) -> None:
    """Fail unless all loops give equal gradients at every step, by `==`.

    With `check_none`, check None as well.
    """
    __tracebackhide__ = True
    first = next(iter(loops))
    expected = observe(loops[first], instance)
    for name, loop in loops.items():
        seen = expected if name == first else observe(loop, instance)
        for step, (a, b) in enumerate(zip(expected, seen, strict=True)):
            what = f"step {step}, {name} against {first}"
            assert_gradients_equal(
                what=what, observed=b.gradients, expected=a.gradients, case=instance.case
            )
        if check_none:
            assert_none_pattern(RESET_MODES[name], instance, seen)


@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(case=cases(problem=problems(sparse=False)))
def test_all_modes_agree(device, case):
    event(f"windows: {min(case.plan.steps, 2)} (2 stands for more)")
    assert_modes_agree(generated_instance(case.replace(device=device)), MODES, check_none=True)


@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(routes=routes, k=st.integers(1, 4), epochs=st.integers(1, 2))
def test_all_modes_agree_where_parameters_are_missed(device, routes, k, epochs):
    instance = routed_instance(routes, k, epochs=epochs, device=device)
    event(
        f"some window misses a parameter: {any(len(names) < 2 * EXPERTS for names in reached(instance))}"
    )
    assert_modes_agree(instance, MODES, check_none=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_forgotten_reset_is_caught(device):
    instance = generated_instance(TWO_WINDOWS.replace(device=device))
    with pytest.raises(
        pytest.fail.Exception, match=r"step 1, fault against zero_: the gradients of .* differ"
    ):
        assert_modes_agree(
            instance, {"zero_": MODES["zero_"], "fault": BUGS["own-groups-only"].loop}
        )


def zeros_for_none(run: TrainingRun) -> None:
    """Reset to zeros where None was promised."""
    for window in windows(run):
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        backward_window(run, window)
        run.optimizer.step()


@pytest.mark.parametrize(
    ("promised", "loop", "message"),
    [
        ("set_to_none", zeros_for_none, "with a gradient"),
        ("zero_", MODES["set_to_none"], "with a gradient"),
        ("flat_buffer", MODES["zero_"], "with a gradient"),
        ("zero_", BUGS["no-reset"].loop, "with a stale gradient"),
    ],
)
def test_a_wrong_none_pattern_is_caught(promised, loop, message):
    instance = routed_instance([[0], [1]], 1)
    with pytest.raises(AssertionError, match=message):
        assert_none_pattern(RESET_MODES[promised], instance, observe(loop, instance))
