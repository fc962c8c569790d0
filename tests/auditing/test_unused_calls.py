"""Calls of a module whose micro-batches are in no gradient, though others of their line are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.unused_calls import MOST_WINDOWS, CalledAt, UnusedCalls

WINDOWS = 3
PASSES = 4


class Program:
    """A model with its optimizer, and the loss of a micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(2, 5)).square().mean() / PASSES

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _detached_total(program: Program) -> None:
    for _ in range(WINDOWS):
        total = torch.zeros(())
        for _ in range(PASSES):
            total = total.detach() + program.loss()
        total.backward()
        program.step()


def _no_grad_but_last(program: Program) -> None:
    for _ in range(WINDOWS):
        for index in range(PASSES):
            is_last = index == PASSES - 1
            with contextlib.nullcontext() if is_last else torch.no_grad():
                loss = program.loss()
            if is_last:
                loss.backward()
        program.step()


def _overwritten_loss(program: Program) -> None:
    for _ in range(WINDOWS):
        for _ in range(PASSES):
            loss = program.loss()
        loss.backward()
        program.step()


def _sum_of_all(program: Program) -> None:
    for _ in range(WINDOWS):
        total = torch.zeros(())
        for _ in range(PASSES):
            total = total + program.loss()
        total.backward()
        program.step()


def _one_helper_on_two_lines(program: Program) -> None:
    for _ in range(WINDOWS):
        with torch.no_grad():
            before = program.loss()
        (program.loss() - before).backward()
        program.step()


def _detached_input_of_another(program: Program) -> None:
    critic = torch.nn.Linear(4, 1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(WINDOWS):
        for _ in range(PASSES):
            (critic(program.model(torch.randn(2, 5)).detach()).mean() / PASSES).backward()
        of_critic.step()
        of_critic.zero_grad()


def _evaluated(program: Program) -> None:
    for _ in range(WINDOWS):
        for is_training in (True, False, False):
            program.model.train(is_training)
            with torch.set_grad_enabled(is_training):
                loss = program.loss()
            if is_training:
                loss.backward()
        program.step()


def _findings(run: Callable[[Program], None]) -> list[str]:
    program = Program()
    with gradcheck_suite.audit(quiet=True) as audit:
        run(program)
    assert not audit.result.violations, audit.result
    return [one for one in audit.result.findings if "led to no backward pass" in one]


@pytest.mark.parametrize("run", [_detached_total, _no_grad_but_last, _overwritten_loss])
def test_calls_that_lead_to_no_backward_are_counted(run):
    (found,) = _findings(run)
    assert f"9 of 12 calls of a module here led to no backward pass, in {WINDOWS} windows" in found


@pytest.mark.parametrize(
    "run", [_sum_of_all, _one_helper_on_two_lines, _detached_input_of_another, _evaluated]
)
def test_calls_that_are_used_or_told_apart_are_not(run):
    assert _findings(run) == []


def test_a_gradient_may_come_after_the_step_and_the_last_window_may_be_open():
    calls = UnusedCalls()
    place = CalledAt(1, Place("train.py:3"))
    for steps in range(4):
        assert calls.made(place, steps)
        assert calls.made(place, steps)
        calls.reached(place, steps)
    assert [*calls.findings(1)] == []
    (found,) = calls.findings(3)
    assert "3 of 6 calls" in str(found)
    for steps in range(3):
        calls.reached(place, steps)
    assert [*calls.findings(4)] == []


def test_a_call_that_one_window_leaves_out_is_not_told():
    calls = UnusedCalls()
    place = CalledAt(1, Place("train.py:3"))
    for steps, used in enumerate((2, 1, 2)):
        for _ in range(2):
            calls.made(place, steps)
        for _ in range(used):
            calls.reached(place, steps)
    assert [*calls.findings(3)] == []


def test_what_is_counted_is_bounded():
    calls = UnusedCalls()
    place = CalledAt(1, Place("train.py:3"))
    taken = [calls.made(place, steps) for steps in range(2 * MOST_WINDOWS)]
    assert sum(taken) == MOST_WINDOWS
