"""Nothing remains from a window: gradients carry no graph into the next window, and no tensor
outlives its window.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, TrainingRun, cases, plans
from gradcheck_suite.loops.reset_modes import (
    Parameters,
    Reset,
    backward_window,
    windows,
    zero_grad_none,
)
from gradcheck_suite.run.instance import generated_instance
from properties.assertions import assert_equal
from properties.helpers import scaled
from studies.reset_modes import RESET_MODES

# `create_graph` makes autograd add out of place, so gradients leave a preallocated buffer: such
# modes are left out
RESETS = {
    mode.reset: mode.name
    for mode in reversed(RESET_MODES.values())
    if mode.reset and not mode.preallocate
}
RESET_FUNCTIONS = [pytest.param(reset, id=name) for reset, name in RESETS.items()]
shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**31 - 1)


def assert_no_graph(case: Case, reset: Reset, *, create_graph: bool = False) -> None:
    """Fail where a gradient carries a graph at a step, from the second window on, which is the
    first after a reset.
    """
    __tracebackhide__ = True
    run = generated_instance(case).run()
    parameters = dict(run.model.named_parameters())
    for step, window in enumerate(windows(run)):
        if create_graph and step == 0:
            run.loss(run.model, window[0]).backward(create_graph=True)
        else:
            backward_window(run, window)
        held = [
            name for name, p in parameters.items() if p.grad is not None and p.grad.requires_grad
        ]
        if step:
            what = f"step {step}, parameters whose gradients carry a graph"
            assert_equal(what=what, observed=held, expected=[], case=case)
        run.optimizer.step()
        reset(list(parameters.values()), run.optimizer)
    run.optimizer.zero_grad()


@scaled(5)
@given(case=cases(plan=plans(min_windows=2, max_windows=3)))
def test_gradients_carry_no_graph_at_any_step(case):
    for reset in RESETS:
        assert_no_graph(case, reset)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("reset", RESET_FUNCTIONS)
def test_every_reset_cuts_the_graph_of_the_window_before(reset):
    assert_no_graph(FOUR_WINDOWS, reset, create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_reset_that_keeps_the_graph_is_caught():
    def bare_zero(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for p in parameters:
                p.grad.zero_()

    with pytest.raises(AssertionError, match=r"gradients carry a graph=.*but should be"):
        assert_no_graph(FOUR_WINDOWS, bare_zero, create_graph=True)


# --- memory from window to window


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def live_after_each_window(run: TrainingRun, reset: Reset) -> list[int]:
    """Return the number of tensors made since the start that are alive after every window's reset."""
    counts, parameters = [], list(run.model.parameters())
    gc.collect()
    gc.freeze()  # existing objects are neither visited nor counted, here and in the tests that follow
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        reset(parameters, run.optimizer)
        window.clear()
        counts.append(_live_tensors())
    return counts


def assert_live_tensors_are_constant(case: Case, reset: Reset) -> None:
    """Fail where the number of live tensors changes from the second window on."""
    __tracebackhide__ = True
    counts = live_after_each_window(generated_instance(case).run(), reset)[1:]
    assert_equal(
        what="live tensors after each window",
        observed=counts,
        expected=counts[:1] * len(counts),
        case=case,
    )


DENSE = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=3, bias=True), Layer("tanh"), Layer("linear", features=1, bias=True)),
    Loss("mse", reduction="mean"),
)
FOUR_WINDOWS = Case(DENSE, Plan((1, 2, 1, 2), 1))
WHOLE = plans(min_windows=2, max_accumulation_steps=4, assumes=("whole-windows",)).filter(
    lambda plan: plan.epochs > 1
)


@pytest.mark.parametrize("reset", RESET_FUNCTIONS)
@scaled(20)
@given(case=cases(problem=st.just(DENSE), plan=WHOLE))
def test_live_tensors_are_constant_from_the_second_window_on(reset, case):
    assert_live_tensors_are_constant(case, reset)


def test_a_tensor_kept_from_every_window_is_caught():
    kept: list[torch.Tensor] = []

    def reset(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        kept.extend(p.grad.clone() for p in parameters if p.grad is not None)
        zero_grad_none(parameters, optimizer)

    with pytest.raises(AssertionError, match=r"live tensors after each window=.*but should be"):
        assert_live_tensors_are_constant(FOUR_WINDOWS, reset)
