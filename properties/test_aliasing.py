"""Gradients have storages of their own.

Where a backward returns a buffer that it reuses, the suite finds it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, given

from gradcheck_suite import Case, Plan, Problem, TrainingRun, UsageError, cases, check, plans
from gradcheck_suite.judge.fitted_weights import find_stolen_buffers
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.instance import generated_instance
from properties.assertions import assert_equal, assert_holds
from properties.devices import DEVICES
from properties.helpers import scaled
from studies.reset_modes import RESET_MODES
from studies.zoo.bugs.micro_batches import Reusing


class _Twins(torch.autograd.Function):
    """x @ (a + b), whose backward returns two views of one fresh tensor, of all of it or of a half
    each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, apart: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.apart = apart
        return x @ (a + b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        gradient = (x.T @ grad).detach()
        first, second = (
            torch.cat([gradient, gradient]).chunk(2) if ctx.apart else (gradient, gradient)
        )
        return None, first.detach(), second.detach(), None


class Canary(torch.nn.Module):
    """One weight, whose gradient for a micro-batch is the sum of its items.

    `copies` mends the backward.
    """

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.buffer, self.copies = torch.zeros(1, dtype=torch.float64), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        return Reusing.apply(
            x, self.weight, torch.zeros_like(self.buffer) if self.copies else self.buffer
        )


class Twins(torch.nn.Module):
    """Two weights that only occur as a sum; with `apart` their gradients lie side by side."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.a, self.b = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        return _Twins.apply(x, self.a, self.b, self.apart)


def _total(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def _items(items: int, seed: int) -> torch.Tensor:
    return torch.arange(1, items + 1, dtype=torch.float64)[:, None]


CANARY = Problem(model=lambda seed: Canary(), batch=_items, loss=_total, reduction="sum")
MENDED = Problem(model=lambda seed: Canary(copies=True), batch=_items, loss=_total, reduction="sum")
FOUR_ITEMS = list(_items(4, 0).split(1))


def _case(micro_batches: tuple[int, ...], k: int) -> Case:
    return Case("properties/test_aliasing.py:CANARY", Plan(micro_batches, k))


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases(plan=plans(max_epochs=1, max_windows=1, min_accumulation_steps=2, max_items=3)))
def test_no_drawn_model_shares_its_gradients_storages(device, case):
    instance = generated_instance(case.replace(device=device))
    batches = list(instance.loader())
    event(f"micro-batches: {min(len(batches), 3)} (3 stands for more)")
    # a window of one micro-batch runs twice, since a reused buffer is written in every backward
    found = find_stolen_buffers(
        instance.model(), instance.problem.loss, batches if len(batches) > 1 else 2 * batches
    )
    explanations = [each.explanation for each in found]
    assert_equal(what="stolen buffers", observed=explanations, expected=[], case=case)


@scaled(2)
@given(case=cases(plan=plans(max_epochs=1, max_windows=1, max_items=3)))
def test_gradients_share_no_storage_with_parameters_buffers_or_each_other(case):
    run = generated_instance(case).run()
    for batch in run.loader:
        run.loss(run.model, batch).backward()
    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors += [
        p.grad for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse
    ]
    storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    assert_equal(
        what="number of storages", observed=len(set(storages)), expected=len(storages), case=case
    )


@pytest.mark.parametrize(("zeros", "total"), [(False, 8.0), (True, 10.0)])
def test_the_canary_in_numbers(zeros, total):
    # micro-gradients 1, 2, 3, 4: from None, each backward overwrites the sum and then adds the sum
    # to itself
    model = Canary()
    model.weight.grad = torch.zeros_like(model.weight) if zeros else None
    for batch in FOUR_ITEMS:
        _total(model, batch).backward()
    assert model.weight.grad.item() == total


def preallocated(run: TrainingRun) -> None:
    """Zero gradients that were allocated before the first backward: the only way in which `zero_`
    is safe here.
    """
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    MODES["zero_"](run)


def test_set_to_none_and_zeros_differ_on_the_canary():
    case = _case((1, 1, 1, 1), 4)
    violation = check(MODES["set_to_none"], case, problem=CANARY).violation
    assert violation is not None
    assert (violation.parameter, violation.error) == ("weight", 2.0)
    assert_holds(verdict=check(preallocated, case, problem=CANARY))


# from None, autograd takes the buffer itself as the gradient, and a later `zero_` does not undo
# that
@pytest.mark.parametrize("name", [name for name in MODES if RESET_MODES[name].preallocate is None])
def test_a_first_window_that_starts_from_none_is_caught_in_every_mode(name):
    violation = check(MODES[name], _case((1, 1), 2), problem=CANARY).violation
    assert violation is not None
    assert violation.error == 1.0


@pytest.mark.parametrize("loop", [MODES["flat_buffer"], preallocated])
@scaled(5)
@given(plan=plans(max_epochs=2))
def test_gradients_allocated_beforehand_are_safe(loop, plan):
    assert_holds(
        verdict=check(loop, Case("properties/test_aliasing.py:CANARY", plan), problem=CANARY)
    )


def test_the_canary_is_explained():
    (found,) = find_stolen_buffers(Canary(), _total, FOUR_ITEMS)
    assert (found.kind, found.parameter, found.error) == ("rewritten", "weight", 2.0)
    assert (
        "weight.grad shares its storage with a buffer that the next backward writes"
        in found.explanation
    )
    assert "set_to_none and zero_ differ by 2" in found.explanation


def test_twins_are_caught():
    (found,) = find_stolen_buffers(Twins(), _total, FOUR_ITEMS)
    assert (found.kind, found.parameter, found.other) == ("shared", "a", "b")
    assert "a.grad and b.grad overlap in memory" in found.explanation
    assert not find_stolen_buffers(Twins(apart=True), _total, FOUR_ITEMS)


@pytest.mark.parametrize("name", MODES)
@scaled(5)
@given(plan=plans(max_epochs=2))
def test_a_backward_that_copies_is_never_blamed(name, plan):
    case = Case("properties/test_aliasing.py:MENDED", plan)
    assert_holds(verdict=check(MODES[name], case, problem=MENDED))
    assert not find_stolen_buffers(Canary(copies=True), _total, FOUR_ITEMS)


def test_gradients_are_left_as_they_were():
    model = Canary()
    model.weight.grad = before = torch.tensor([7.0], dtype=torch.float64)
    find_stolen_buffers(model, _total, FOUR_ITEMS)
    assert model.weight.grad is before
    assert before.tolist() == [7.0]


def test_too_few_micro_batches_are_refused():
    with pytest.raises(UsageError, match="expected at least 2 micro-batches, got 1"):
        find_stolen_buffers(Canary(), _total, FOUR_ITEMS[:1])


def test_a_frozen_model_is_refused():
    with pytest.raises(UsageError, match="no parameter with requires_grad=True"):
        find_stolen_buffers(torch.nn.Linear(1, 1).requires_grad_(False), _total, FOUR_ITEMS)
