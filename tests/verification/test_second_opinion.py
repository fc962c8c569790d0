"""JAX's opinion on users' problems: it agrees where it should, a planted error is found, and the loop judged anyway."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from gradcheck_suite.bridge.op_table import _TABLE
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.verification.second_opinion import second_opinion
from gradcheck_suite.verification.verify import verify
from tests.faults.torch_kernels import tanh_backward

CASE = Case("p.py:P", Plan((2, 1, 2, 1), 2))


class _Model(nn.Module):
    """A model that holds a constant which is neither parameter nor buffer."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.constant = torch.full((2,), constant, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.constant


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return _Model(1.0 + seed)


def batch(items: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, 3, generator=generator), torch.randn(items, 2, generator=generator)


def loss(m: nn.Module, b: Any) -> torch.Tensor:
    return (m(b[0]) - b[1]).pow(2).mean()


PROBLEM = Problem(model, batch, loss)


def _tanh(slope: float) -> Any:
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.tanh(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (out,) = ctx.saved_tensors
            return slope * gradient * (1 - out * out)

    return Tanh.apply


@pytest.mark.full
@pytest.mark.parametrize(("slope", "findings"), [(1.0, 0), (1.001, 1)])
def test_a_custom_backward_is_one_finding_where_it_is_not_the_derivative(slope, findings):
    """The windows agree beside it, since JAX takes them with that backward."""
    tanh = _tanh(slope)
    problem = Problem(model, batch, lambda m, b: (tanh(m(b[0])) - b[1]).pow(2).mean())
    opinion = second_opinion([CASE.replace(plan=Plan((2, 1, 2), 1))], problem)
    assert (opinion.windows, opinion.answered) == (4, 4)
    assert opinion.refusal is None
    assert len(opinion.findings) == findings
    assert all("Tanh.backward is not the derivative" in text for text in opinion.findings)
    assert all("argument 0 is 1.001 times the derivative" in text for text in opinion.findings)


def test_jax_agrees_and_one_program_serves_all_windows_of_a_shape():
    """Two cases of two windows, three items each: one shape, though the models' constants differ with the seed."""
    opinion = second_opinion([CASE, CASE.replace(seed=1)], PROBLEM)
    assert (opinion.windows, opinion.answered, opinion.moved, opinion.shapes) == (5, 5, 1, 1)
    assert opinion.findings == []
    assert opinion.summary() == (
        "JAX gave a second opinion on 5 of 5 windows, of 1 shape, 1 of them at parameters that an optimizer has moved, "
        "and agrees with torch"
    )


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_backward_that_is_wrong_only_after_the_first_step_is_a_finding(optimizer):
    def from_zero(seed: int) -> nn.Module:
        made = model(seed)
        nn.init.zeros_(made.linear.weight)
        nn.init.zeros_(made.linear.bias)
        return made

    problem, case = Problem(from_zero, batch, loss), CASE.replace(optimizer=optimizer)
    with tanh_backward(lambda out: torch.ones_like(out)):
        assert second_opinion([case], problem).findings == []
    with tanh_backward(lambda out: 1 + 0.5 * (out != 0)):
        (finding,) = second_opinion([case], problem).findings
        result = verify(BUILT_IN["plain"], problem=problem, examples=2, optimizer=optimizer)
    assert "at parameters that the optimizer has moved" in finding
    assert "no loop is to blame" in finding
    assert result.holds
    assert result.findings


def test_a_wrong_derivative_is_a_finding_and_the_loop_is_judged(monkeypatch):
    """JAX is told that tanh is the sigmoid: torch's two ways agree with each other, and JAX stands alone."""
    name = "aten.tanh.default"
    monkeypatch.setitem(_TABLE, name, lambda x: 1 / (1 + jnp.exp(-x)))
    result = verify(BUILT_IN["plain"], problem=PROBLEM, examples=2, second_opinion_s=0)
    assert result.holds
    assert "torch large batch = torch accumulated against JAX large batch" in result.findings[0]
    assert "no loop is to blame" in result.findings[0]
    assert result.second_opinion is not None
    assert "agrees" not in result.second_opinion


def test_a_problem_that_cannot_be_carried_over_is_judged_by_torch_alone():
    def decides(m: nn.Module, b: Any) -> torch.Tensor:
        out = m(b[0])
        return (out if out.sum() > 0 else 2 * out).pow(2).sum(1).mean()

    # the decision is on parameters' signs, so that the objective stays a sum over items
    def signs(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b[0]).pow(2).mean() * (2 if m.linear.bias[0] > 0 else 1)

    for found in (decides, signs):
        opinion = second_opinion([CASE], Problem(model, batch, found))
        assert opinion.refusal is not None
        assert "torch.export does not take this loss" in opinion.summary()
        assert ("\n" in opinion.summary()) == bool(opinion.rewrite)
    result = verify(BUILT_IN["plain"], problem=Problem(model, batch, signs), examples=2)
    assert result.holds
    assert "JAX gives no second opinion on the problem" in (result.second_opinion or "")


def test_shapes_that_cannot_be_carried_over_leave_the_opinion_on_the_others():
    def for_small_batches(m: nn.Module, b: Any) -> torch.Tensor:
        out = m(b[0]).pow(2).mean()
        # data decides, but only in batches of more than two items
        return out if len(b[0]) < 3 or b[0].sum() > -1e9 else 2 * out

    small = CASE.replace(plan=Plan((1, 1, 2), 2))
    opinion = second_opinion([CASE, small], Problem(model, batch, for_small_batches))
    assert (opinion.windows, opinion.answered, opinion.refused, opinion.shapes) == (5, 2, 3, 1)
    assert opinion.summary().startswith(
        "JAX gave a second opinion on 2 of 5 windows, of 1 shape, and agrees with torch; 3 cannot be translated: "
    )


def test_without_time_left_one_window_is_answered_and_the_others_are_counted():
    opinion = second_opinion([CASE, CASE.replace(plan=Plan((1, 1), 1))], PROBLEM, budget_s=0.0)
    assert (opinion.windows, opinion.answered) == (5, 1)
    assert "for the others the 0 s that this may take did not suffice" in opinion.summary()


def never_resets(run: Any) -> None:
    run.optimizer.zero_grad = lambda: None
    BUILT_IN["plain"](run)


def never_steps(run: Any) -> None:
    pass


@pytest.mark.full
@pytest.mark.parametrize("loop", [BUILT_IN["plain"], never_resets])
def test_a_violated_loop_is_asked_about_on_its_smallest_case_and_an_interrupt_keeps_the_verdict(loop, monkeypatch):
    asked: list[Any] = []

    def interrupt(cases: Any, problem: Any, budget_s: float) -> Any:
        asked.append((list(cases), budget_s))
        raise KeyboardInterrupt

    monkeypatch.setattr("gradcheck_suite.verification.verify.second_opinion", interrupt)
    result = verify(loop, problem=PROBLEM, examples=5, second_opinion_s=7)
    assert result.interrupted
    assert result.holds == (loop is not never_resets)
    assert result.second_opinion is None
    ((cases, budget),) = asked
    assert budget == 7
    assert len(cases) == (5 if result.holds else 1)
    if result.violation is not None:
        assert cases == [result.violation.case]


def test_where_no_gradient_is_at_fault_jax_is_not_asked(monkeypatch):
    monkeypatch.setattr("gradcheck_suite.verification.verify.second_opinion", None)
    result = verify(never_steps, problem=PROBLEM, examples=5)
    assert (result.violation and result.violation.kind, result.second_opinion) == ("step-count", None)


@pytest.mark.parametrize("seconds", [-1, "10", float("nan")])
def test_a_time_for_it_that_is_none_is_refused(seconds):
    with pytest.raises(UsageError, match="second_opinion_s must be a number of seconds, 0 or more, got"):
        verify(BUILT_IN["plain"], problem=PROBLEM, second_opinion_s=seconds)
