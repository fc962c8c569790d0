"""A user's problem is held to its contract; what is sound passes, each planted fault is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.instance import user_instance
from gradcheck_suite.loops import BUILT_IN
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.separability import objective_fault

CASE = Case("p.py:P", Plan((2, 3, 5), 2))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def batch(items: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (items,), generator=generator)
    return {"x": torch.randn(items, 3, generator=generator), "target": target}


def cross_entropy(m: nn.Module, b: Any, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]), b["target"], **options)


GOOD = Problem(model, batch, cross_entropy)
SOME_IGNORED = replace(
    GOOD,
    batch=lambda n, seed: {
        **batch(n, seed),
        "target": torch.where(torch.arange(n) < 2, -100, batch(n, seed)["target"]),
    },
    count=lambda b: (b["target"] != -100).sum(),
)


def test_sound_problems_pass():
    summed = replace(GOOD, loss=lambda m, b: cross_entropy(m, b, reduction="sum"), reduction="sum")
    for problem in (GOOD, summed, SOME_IGNORED):
        assert objective_fault(user_instance(CASE, problem)) is None


def test_a_micro_batch_that_counts_nothing_may_have_a_loss_of_nan():
    """The first micro-batch of two items has no target that counts: torch's mean over it is 0/0."""
    first = user_instance(CASE, SOME_IGNORED).batch(range(2), torch.float64)
    assert torch.isnan(cross_entropy(model(0).double(), first))


def divided_by_at_least_one(m: nn.Module, b: Any) -> torch.Tensor:
    return cross_entropy(m, b, reduction="sum") / (b["target"] != -100).sum().clamp(min=1)


def steps_without_backward(run: Any) -> None:
    for _ in run.loader:
        run.optimizer.step()


@pytest.mark.parametrize("plan", [Plan((2, 3, 5), 1), Plan((1, 1, 3), 2), Plan((2,), 1), Plan((1,), 1)])
@pytest.mark.parametrize("loss", [cross_entropy, divided_by_at_least_one])
@pytest.mark.parametrize("loop", [BUILT_IN["plain"], steps_without_backward])
def test_a_window_without_valid_targets_is_not_judged(plan, loss, loop):
    """Its mean is 0/0, which is NaN or, with the divisor clamped, 0: no loop is wrong there."""
    case = replace(CASE, plan=plan)
    verdict = check(loop, case, problem=replace(SOME_IGNORED, loss=loss))
    assert verdict.violation is None
    assert verdict.skipped == "a window has no valid targets: Problem.count of its items is 0"


def batch_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def in_batch_negatives(m: nn.Module, b: Any) -> torch.Tensor:
    scores = m(b["x"]) @ m(b["x"]).T
    return functional.cross_entropy(scores, torch.arange(len(scores)))


NOT_ACCUMULABLE: dict[str, Problem] = {
    "batch norm in train mode": replace(GOOD, model=batch_norm),
    "in-batch negatives": replace(GOOD, loss=in_batch_negatives),
    "a product of batch means": replace(GOOD, loss=lambda m, b: m(b["x"]).mean() * b["x"].mean()),
    "ignored targets that are counted": replace(GOOD, loss=lambda m, b: cross_entropy(m, b, ignore_index=2)),
}


@pytest.mark.parametrize("name", NOT_ACCUMULABLE)
def test_what_is_no_sum_over_items_is_said_of_the_problem(name):
    verdict = check(BUILT_IN["plain"], CASE, problem=NOT_ACCUMULABLE[name])
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "p.py:P: the objective is not a sum over items" in verdict.violation.explanation
    assert "no loop is to blame" in verdict.violation.explanation


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (replace(GOOD, loss=lambda m, b: cross_entropy(m, b, reduction="sum")), 'pass reduction="sum"'),
        (replace(GOOD, reduction="sum"), 'pass reduction="mean"'),
        (replace(GOOD, count=lambda b: (b["target"] != 2).sum()), "leave Problem.count out"),
    ],
)
def test_a_count_that_disagrees_with_the_mean_is_said_so(problem, said):
    verdict = check(BUILT_IN["plain"], CASE, problem=problem)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "p.py:P: the loss is not a mean with the divisor Problem.count" in verdict.violation.explanation
    assert said in verdict.violation.explanation


def test_a_forgotten_count_is_said_so():
    """Rows of 1 to 4 targets, the others ignored: the mean is over targets, and the default count is of rows."""

    def rows(items: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(0, 5, (items, 4), generator=generator)
        there = torch.arange(4) < torch.randint(1, 5, (items, 1), generator=generator)
        return {"x": torch.randn(items, 4, 3, generator=generator), "target": target.where(there, -100)}

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return functional.cross_entropy(m(b["x"]).flatten(0, 1), b["target"].flatten())

    fault = objective_fault(user_instance(CASE, Problem(model, rows, loss)))
    lengths = (rows(4, CASE.seed)["target"] != -100).sum(1).tolist()
    assert len({*lengths}) > 1
    divisor = math.gcd(*lengths)
    assert fault is not None
    assert f"{' : '.join(str(n // divisor) for n in lengths)} for 4 of them (such as a mean over tokens" in fault
    assert "let Problem.count return the divisor of the mean" in fault
    counted = Problem(model, rows, loss, count=lambda b: (b["target"] != -100).sum())
    assert objective_fault(user_instance(CASE, counted)) is None


def test_a_count_that_does_not_add_up():
    fault = objective_fault(user_instance(CASE, replace(GOOD, count=lambda b: torch.tensor(len(b["x"]) ** 2))))
    assert fault is not None
    assert "Problem.count of all 10 items is 100" in fault
    assert "[2, 3, 5] add up to 38" in fault


SAME = model(0)


def with_loss(loss: Callable[[nn.Module, Any], Any]) -> Problem:
    return replace(GOOD, loss=loss)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (with_loss(lambda m, b: cross_entropy(m, b, reduction="none")), r"a scalar tensor, got shape \(10,\)"),
        (with_loss(lambda m, b: 3.0), "a scalar tensor, got float"),
        (with_loss(lambda m, b: b["x"].sum()), "does not depend on the model's parameters"),
        (with_loss(lambda m, b: cross_entropy(m, b) * float("nan")), "the loss of 10 drawn items is nan"),
        (
            replace(SOME_IGNORED, count=None),
            "nan.* Problem.count must be 0 for items without valid targets",
        ),
        (with_loss(lambda m, b: cross_entropy(m, b) * torch.rand(())), "it must not be random"),
        (replace(GOOD, model=lambda s: nn.Sequential(model(s), nn.Dropout(0.5))), "set dropout to 0"),
        (replace(GOOD, model=lambda s: nn.ReLU()), "no parameter with requires_grad=True"),
        (replace(GOOD, model=lambda s: 3), "must return a torch.nn.Module, got int"),
        (replace(GOOD, model=lambda s: SAME), "a fresh module each time, got the same one twice"),
        (replace(GOOD, model=lambda s: nn.Sequential(SAME)), "two models from Problem.model share 0.0.weight"),
        (replace(GOOD, model=lambda s: nn.Linear(3, 5)), "the same values for the same seed.* call torch.manual_seed"),
        (
            replace(GOOD, model=lambda s: nn.Linear(3, 5, device="meta")),
            "is on the meta device and has no",
        ),
        (replace(GOOD, count=lambda b: torch.tensor(0)), "Problem.count is 0 for 5 items whose loss is [12]"),
        (replace(GOOD, count=lambda b: torch.tensor(-1)), "Problem.count.* got -1"),
        (replace(GOOD, count=lambda b: b["x"]), "Problem.count"),
        (
            replace(GOOD, model=lambda s: 1 / 0),
            r"ZeroDivisionError: division by zero \(test_separability.py, line \d+\)",
        ),
        (replace(GOOD, batch=lambda n, s: {}["x"]), "KeyError: 'x'"),
        (replace(GOOD, count=lambda b: b["missing"]), "KeyError: 'missing'"),
        (replace(GOOD, count=lambda b: None), "must return a number or a scalar tensor, got NoneType"),
        # raised inside torch: the line is that of the user's code
        (with_loss(lambda m, b: m(b["x"][:, :2]).sum()), r"RuntimeError: .* \(test_separability.py, line \d+\)"),
    ],
)
def test_a_broken_contract_is_a_usage_error(problem, said):
    with pytest.raises(UsageError, match=said):
        check(BUILT_IN["plain"], CASE, problem=problem)


def test_an_island_of_float32_is_no_fault():
    """Softmax in float32 inside a float64 model, as many language models have it."""

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return functional.nll_loss(functional.log_softmax(m(b["x"]).float(), -1), b["target"])

    assert objective_fault(user_instance(CASE, with_loss(loss))) is None


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(UsageError):
        objective_fault(user_instance(CASE, with_loss(lambda m, b: cross_entropy(m, b) * torch.rand(()))))
    assert torch.equal(torch.rand(2), expected)


def test_a_hook_that_changes_grad_after_autograd_is_refused():
    """The reference comes from `torch.autograd.grad`, which runs no such hook; a loop's backward does."""

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    def hooked(seed: int) -> nn.Module:
        made = model(seed)
        made[0].weight.register_post_accumulate_grad_hook(halve)
        return made

    with pytest.raises(UsageError, match=r"the parameter '0.weight' has a post-accumulate-grad hook"):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=hooked))


def test_batch_normalization_gets_its_advice_for_an_epoch_of_one_item():
    def normalized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))

    case = CASE.replace(plan=Plan((1,), 1))
    violation = check(BUILT_IN["plain"], case, problem=replace(GOOD, model=normalized)).violation
    assert violation.kind == "not-accumulable"
    assert "batch normalization in train mode" in violation.explanation
