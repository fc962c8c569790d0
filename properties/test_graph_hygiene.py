"""Nothing is left over: gradients carry no graph from step to step, and no tensor outlives its window."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, TrainingRun, cases, plans
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.loops.modes import none_by_hand, zero_by_hand, zero_grad_false, zero_grad_none
from gradcheck_suite.loops.windows import backward_window, windows
from properties.helpers import scaled

RESETS: dict[str, Callable[[TrainingRun], None]] = {
    "zero_": zero_by_hand,
    "zero_grad": zero_grad_false,
    "set_to_none": zero_grad_none,
    "grad_none": none_by_hand,
}
shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**31 - 1)


def _parameter(shape: tuple[int, ...], seed: int) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))


def _with_graph(p: torch.nn.Parameter) -> torch.Tensor:
    (p**3).sum().backward(create_graph=True)
    assert p.grad is not None
    return p.grad


# torch warns that create_graph=True makes a cycle of parameter and gradient, which is what these two tests look at
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@given(shape=shapes, seed=seeds)
def test_zeroing_by_hand_keeps_the_graph(shape, seed):
    p = _parameter(shape, seed)
    gradient = _with_graph(p)
    with torch.no_grad():
        gradient.zero_()
    assert p.grad.requires_grad
    assert p.grad.grad_fn is not None
    assert p.grad.count_nonzero() == 0
    p.grad = None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("set_to_none", [True, False])
@given(shape=shapes, seed=seeds)
def test_zero_grad_cuts_the_graph(set_to_none, shape, seed):
    p = _parameter(shape, seed)
    _with_graph(p)
    torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=set_to_none)
    assert p.grad is None if set_to_none else p.grad.grad_fn is None
    (2 * p).sum().backward()
    assert p.grad.grad_fn is None
    assert not p.grad.requires_grad


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@given(shape=shapes, seed=seeds)
def test_with_a_graph_accumulation_is_out_of_place(shape, seed):
    p = _parameter(shape, seed)
    held, before = _with_graph(p), p.grad.detach().clone()
    _with_graph(p)
    assert p.grad is not held
    assert torch.equal(held.detach(), before)
    p.grad = None


def assert_no_graph(run: TrainingRun, reset: Callable[[TrainingRun], None], *, create_graph: bool = False) -> None:
    """Assert that no gradient carries a graph at a step, from the second window on: resets are what is judged."""
    __tracebackhide__ = True
    for step, window in enumerate(windows(run)):
        if create_graph and step == 0:
            run.loss(run.model, window[0]).backward(create_graph=True)
        else:
            backward_window(run, window)
        held = [name for name, p in run.model.named_parameters() if p.grad is not None and p.grad.requires_grad]
        assert not (step and held), f"step {step}: the gradients of {held} carry a graph, should carry none"
        run.optimizer.step()
        reset(run)


@pytest.mark.parametrize("name", RESETS)
@scaled(4)
@given(case=cases(plan=plans(min_windows=2)))
def test_gradients_carry_no_graph_at_any_step(name, case):
    assert_no_graph(generated_instance(case).run(), RESETS[name])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", RESETS)
def test_every_reset_cuts_the_graph_of_the_window_before(name):
    assert_no_graph(generated_instance(FOUR_WINDOWS).run(), RESETS[name], create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_reset_that_keeps_the_graph_is_caught():
    def bare_zero(run: TrainingRun) -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                p.grad.zero_()

    run = generated_instance(FOUR_WINDOWS).run()
    with pytest.raises(AssertionError, match="carry a graph, should carry none"):
        assert_no_graph(run, bare_zero, create_graph=True)
    run.optimizer.zero_grad()


# --- memory from window to window


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def live_after_each_window(run: TrainingRun, reset: Callable[[TrainingRun], None]) -> list[int]:
    """Return the number of tensors made since the start that are alive after every window's reset."""
    counts = []
    gc.collect()
    gc.freeze()  # what is there already is neither walked nor counted
    try:
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            reset(run)
            window.clear()
            counts.append(_live_tensors())
    finally:
        gc.unfreeze()
    return counts


def assert_live_tensors_are_constant(run: TrainingRun, reset: Callable[[TrainingRun], None]) -> None:
    """Assert that from the second window on no tensor is left over."""
    __tracebackhide__ = True
    counts = live_after_each_window(run, reset)[1:]
    assert len(set(counts)) <= 1, f"{counts} live tensors after each window from the second on, should be constant"


DENSE = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=3, bias=True), Layer("tanh"), Layer("linear", features=1, bias=True)),
    Loss("mse", reduction="mean"),
)
FOUR_WINDOWS = Case(DENSE, Plan((1, 2, 1, 2), 1))
WHOLE = plans(min_epochs=2, min_windows=2, max_accumulation_steps=4, assumes=("whole-windows",))


@pytest.mark.parametrize("name", RESETS)
@scaled(30)
@given(case=cases(problem=st.just(DENSE), plan=WHOLE))
def test_live_tensors_are_constant_from_the_second_window_on(name, case):
    assert_live_tensors_are_constant(generated_instance(case).run(), RESETS[name])


def test_a_tensor_kept_from_every_window_is_caught():
    kept: list[torch.Tensor] = []

    def reset(run: TrainingRun) -> None:
        kept.extend(p.grad.clone() for p in run.model.parameters() if p.grad is not None)
        zero_grad_none(run)

    with pytest.raises(AssertionError, match="should be constant"):
        assert_live_tensors_are_constant(generated_instance(FOUR_WINDOWS).run(), reset)
