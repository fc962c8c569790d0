"""With one micro-batch a window, every reset mode gives the plain loop's gradients, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Plan, TrainingRun, cases, plans, problems
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.instance import Instance, generated_instance
from gradcheck_suite.run.optimizers import FOR_ANY_LOOP
from properties.assertions import assert_gradients_equal
from properties.devices import DEVICES, repeatable_run
from properties.helpers import REGRESSION, scaled
from studies.reset_modes import RESET_MODES
from studies.zoo import BUGS

EACH_ALONE = Case(REGRESSION, Plan((1, 3, 2), 1, 2), seed=1, optimizer="momentum")
one_at_a_time = plans(max_accumulation_steps=1, max_windows=8)


def plain(run: TrainingRun, *, set_to_none: bool = True) -> None:
    """Forward, backward, step, zero_grad: what every tutorial shows.

    With False it resets as torch did before 2.0.
    """
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=set_to_none)


def assert_is_the_plain_loop(loop: Loop, instance: Instance, *, releases: bool) -> None:
    """Fail unless a loop gives the plain loop's gradients and final parameters.

    Args:
        loop: the loop.
        instance: an instance with one micro-batch a window.
        releases: whether the loop resets to None; its gradients must then equal the plain loop's to
            the sign of a zero.
    """
    __tracebackhide__ = True
    expected, got = (
        repeatable_run(each, instance) for each in (partial(plain, set_to_none=releases), loop)
    )
    assert expected.raised is None, expected.trace
    assert got.raised is None, got.trace
    for step, (a, b) in enumerate(zip(expected.observations, got.observations, strict=True)):
        assert_gradients_equal(
            what=f"step {step}, against the plain loop",
            observed=b.gradients,
            expected=a.gradients,
            case=instance.case,
            to_the_bit=releases,
        )
    assert_gradients_equal(
        what="the parameters at the end, against the plain loop",
        observed=dict(got.parameters),
        expected=dict(expected.parameters),
        case=instance.case,
    )


# a preallocated gradient makes the optimizer step on a parameter that no item reaches, where the
# plain loop's optimizer skips it: with momentum or decay the two move it differently, and both are
# right
SAME_PATH = [name for name in MODES if RESET_MODES[name].preallocate is None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODES)
@scaled(4)
@given(case=cases(plan=one_at_a_time, problem=problems(sparse=False)))
def test_one_micro_batch_a_window_is_the_plain_loop(name, device, case):
    event(f"reduction: {case.problem.loss.reduction}")
    assert_is_the_plain_loop(
        MODES[name],
        generated_instance(case.replace(device=device)),
        releases=RESET_MODES[name].releases,
    )


@pytest.mark.parametrize("name", SAME_PATH)
@scaled(4)
@given(
    case=st.sampled_from(FOR_ANY_LOOP).flatmap(
        lambda optimizer: cases(plan=one_at_a_time, optimizer=optimizer)
    )
)
def test_one_micro_batch_a_window_takes_the_plain_path(name, case):
    event(f"optimizer: {case.optimizer}")
    assert_is_the_plain_loop(
        MODES[name], generated_instance(case), releases=RESET_MODES[name].releases
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["no-reset", "decay-per-micro-batch"])
def test_a_loop_that_is_not_the_plain_one_is_caught(name, device):
    instance = generated_instance(EACH_ALONE.replace(device=device))
    with pytest.raises(pytest.fail.Exception, match="against the plain loop"):
        assert_is_the_plain_loop(BUGS[name].loop, instance, releases=True)


def test_a_last_bit_is_caught():
    def off_by_one_bit(run: TrainingRun) -> None:
        for _ in range(run.epochs):
            for batch in run.loader:
                run.optimizer.zero_grad()
                run.loss(run.model, batch).backward()
                for p in run.model.parameters():
                    p.grad.copy_(torch.nextafter(p.grad, torch.full_like(p.grad, torch.inf)))
                run.optimizer.step()

    with pytest.raises(pytest.fail.Exception, match="against the plain loop"):
        assert_is_the_plain_loop(off_by_one_bit, generated_instance(EACH_ALONE), releases=True)
