"""Before any loop is blamed: whether torch's own accumulation gives the large batch, and a user's code works."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.errors import UsageError
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.verification import accumulable as module
from gradcheck_suite.verification.accumulable import gradient_fault, reference_of

CASE = Case("own", Plan((1, 3, 2, 2), 2))


def _model(seed):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def _problem(loss=lambda model, batch: model(batch).mean(), **options):
    """Return the problem of items 1, 2, 3, ...: the gradient of a mean over some is their mean."""
    return Problem(_model, lambda items, seed: torch.arange(1.0, items + 1)[:, None], loss, **options)


@pytest.mark.parametrize(("apart", "right"), [(0.5, True), (1.0, True), (1.5, False)])
def test_torchs_accumulation_is_held_to_the_bound_itself(apart, right, monkeypatch):
    problem = _problem()
    reference, fault = reference_of(CASE, problem)
    assert fault is None
    window = reference.window(1)
    monkeypatch.setitem(vars(window.bound), "quick", np.ones_like(window.torch))
    monkeypatch.setattr(window, "accumulated", lambda: window.torch + apart)
    found = gradient_fault(reference, window)
    assert (found is None) is right
    if found:
        assert (found.kind, found.diagnosis, found.parameter) == ("not-accumulable", "not-accumulable", "weight")
        assert (found.epoch, found.window, found.case) == (0, 1, CASE)
        assert found.evidence.observed - found.evidence.expected == pytest.approx([1.5])
        assert "The gradients of weight in window 1, of the large batch and as the sum of" in found.explanation


def test_every_window_is_computed_before_any_loop_runs():
    """The forward-only check is passed: this loss fails on the gradient of the second window alone."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, batch):
            ctx.last = float(batch.max())
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.last == 8:
                raise ZeroDivisionError("of the last window")
            return grad, None

    problem = _problem(lambda model, batch: Fails.apply(model(batch).mean(), batch))
    with pytest.raises(
        UsageError, match="the problem own failed before any loop ran, on batches of 1 to 8 items: Zero"
    ):
        reference_of(CASE, problem)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((1,), 1), "on one batch of 1 item: "),
        (Plan((2,), 1), "on one batch of 2 items: "),
        (Plan((300,), 1), "on one batch of 300 items: "),
        (Plan((2, 3), 1), "on batches of 2 to 5 items: "),
    ],
)
@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_a_users_code_that_fails_is_told_with_the_batches_that_it_was_given(plan, said, error):
    def loss(model, batch):
        raise error("no such thing")

    with pytest.raises(UsageError) as raised:
        reference_of(Case("own", plan), _problem(loss))
    assert f"the problem own failed before any loop ran, {said}{error.__name__}: " in str(raised.value)
    assert "test_accumulable.py" in str(raised.value)


def test_a_problem_that_breaks_its_contract_is_a_usage_error_of_its_own():
    with pytest.raises(UsageError) as raised:
        reference_of(CASE, _problem(lambda model, batch: model(batch)))
    assert "failed before any loop ran" not in str(raised.value)


def test_what_torch_cannot_compute_in_float64_is_not_judged():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("no derivative")

    with pytest.raises(CannotJudgeError, match="the plain large batch fails in float64: no derivative"):
        reference_of(CASE, _problem(lambda model, batch: Refuses.apply(model(batch).mean())))


def _batch_norm(plan, **options):
    layers = (Layer("batch_norm_train"), Layer("linear", bias=True, features=2))
    return Case(ProblemSpec(Input("vector", size=3), layers, Loss("mse", reduction="mean")), plan, seed=5)


def test_items_that_meet_are_named_where_a_window_is_split_and_where_the_forward_shows_it():
    reference, fault = reference_of(_batch_norm(Plan((2, 2), 2)), None)
    assert reference is None
    assert fault.kind == "not-accumulable"
    reference, fault = reference_of(_batch_norm(Plan((4,), 1)), None)
    assert fault is None
    assert reference.window(0).jax is None


def test_items_may_meet_in_the_gradient_of_one_window_alone(monkeypatch):
    fault = Violation("not-accumulable", "not-accumulable", "in the second window", CASE)
    monkeypatch.setattr(module, "objective_fault", lambda instance: None)
    monkeypatch.setattr(module, "gradient_fault", lambda reference, window: fault if window.index == 1 else None)
    assert reference_of(_batch_norm(Plan((2, 2), 1)), None) == (None, fault)


def test_what_is_known_to_be_a_sum_over_items_is_not_asked_about(monkeypatch):
    monkeypatch.setattr(module, "objective_fault", lambda instance: pytest.fail("it was asked"))
    case = _batch_norm(Plan((2, 2), 2))
    spec = dataclasses.replace(case.problem, layers=case.problem.layers[1:])
    assert reference_of(case.replace(problem=spec), None)[1] is None


def test_batch_normalization_of_one_item_is_not_judged():
    with pytest.raises(CannotJudgeError, match="the plain large batch fails: Expected more than 1 value per channel"):
        reference_of(_batch_norm(Plan((1,), 1)), None)
