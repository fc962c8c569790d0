"""With one micro-batch a window nothing is accumulated: every mode is the plain loop, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, TrainingRun, cases, plans, problems
from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.loops import MODES
from gradcheck_suite.schema.contract import Loop
from properties import faults
from properties.helpers import DEVICES, bit_unequal, scaled, unequal

TO_NONE = ("set_to_none", "grad_none")
REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)
EACH_ALONE = Case(REGRESSION, Plan((1, 3, 2), 1, 2), seed=1, optimizer="momentum")
one_at_a_time = plans(max_accumulation_steps=1, max_windows=8)


def plain(run: TrainingRun) -> None:
    """Forward, backward, step, zero_grad: what every tutorial shows."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def plain_with_zeros(run: TrainingRun) -> None:
    """Run the plain loop as it was before torch 2.0."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)


def assert_is_the_plain_loop(loop: Loop, instance: Instance, *, releases: bool) -> None:
    """Assert that a loop hands over the plain loop's gradients and ends at its parameters, bit for bit.

    Args:
        loop: the subject.
        instance: with one micro-batch a window.
        releases: whether the loop resets to None; it is then held to the plain loop to the sign of a zero.
    """
    __tracebackhide__ = True
    expected, got = (run_loop(each, instance) for each in (plain if releases else plain_with_zeros, loop))
    assert expected.raised is None, expected.trace
    assert got.raised is None, got.trace
    compare = bit_unequal if releases else unequal
    for step, (a, b) in enumerate(zip(expected.observations, got.observations, strict=True)):
        wrong = compare(a.gradients, b.gradients)
        assert not wrong, f"step {step}: the gradients of {wrong} are not the plain loop's [{instance.case!r}]"
    wrong = unequal(dict(expected.parameters), dict(got.parameters))
    assert not wrong, f"{wrong} end up elsewhere than in the plain loop [{instance.case!r}]"


# a flat buffer gives every parameter a gradient from the start, where the plain loop's optimizer skips an unreached
# one: with momentum or decay they part, as they should
SAME_PATH = [name for name in MODES if name != "flat_buffer"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODES)
@scaled(4)
@given(case=cases(plan=one_at_a_time, problem=problems(sparse=False)))
def test_one_micro_batch_a_window_is_the_plain_loop(name, device, case):
    event(f"reduction: {case.problem.loss.reduction}")
    assert_is_the_plain_loop(MODES[name], generated_instance(case.replace(device=device)), releases=name in TO_NONE)


@pytest.mark.parametrize("name", SAME_PATH)
@scaled(4)
@given(
    case=st.sampled_from(sorted(OPTIMIZERS)).flatmap(lambda optimizer: cases(plan=one_at_a_time, optimizer=optimizer))
)
def test_one_micro_batch_a_window_takes_the_plain_path(name, case):
    event(f"optimizer: {case.optimizer}")
    assert_is_the_plain_loop(MODES[name], generated_instance(case), releases=name in TO_NONE)


@pytest.mark.parametrize("loop", [faults.no_reset, faults.running_sum_rescaled])
def test_a_loop_that_is_not_the_plain_one_is_caught(loop):
    with pytest.raises(AssertionError, match="are not the plain loop's"):
        assert_is_the_plain_loop(loop, generated_instance(EACH_ALONE), releases=True)


def test_a_last_bit_is_caught():
    def off_by_one_bit(run: TrainingRun) -> None:
        for _ in range(run.epochs):
            for batch in run.loader:
                run.optimizer.zero_grad()
                run.loss(run.model, batch).backward()
                for p in run.model.parameters():
                    p.grad.copy_(torch.nextafter(p.grad, torch.full_like(p.grad, torch.inf)))
                run.optimizer.step()

    with pytest.raises(AssertionError, match="are not the plain loop's"):
        assert_is_the_plain_loop(off_by_one_bit, generated_instance(EACH_ALONE), releases=True)
