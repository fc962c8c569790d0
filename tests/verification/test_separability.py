"""A user's problem is held to its contract; what is sound passes, each planted fault is named."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.catalogue.tables import CROSS_SAMPLE_LOSSES, is_accumulable
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference.large_batch import CannotJudgeError
from gradcheck_suite.run.instance import generated_instance, user_instance
from gradcheck_suite.strategies.cases import cases, problems
from gradcheck_suite.strategies.drawing import draw_cases
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.separability import (
    objective_fault,
    reference_of,
    weights_of_items,
)

CASE = Case("p.py:P", Plan((2, 3, 5), 2))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def batch_of_rows(items: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (items,), generator=generator)
    return {"x": torch.randn(items, 3, generator=generator), "target": target}


def cross_entropy(m: nn.Module, b: Any, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]), b["target"], **options)


GOOD = Problem(model_of, batch_of_rows, cross_entropy)
SOME_IGNORED = replace(
    GOOD,
    batch=lambda n, seed: {
        **batch_of_rows(n, seed),
        "target": torch.where(torch.arange(n) < 2, -100, batch_of_rows(n, seed)["target"]),
    },
    count=lambda b: (b["target"] != -100).sum(),
)


def checkpointed(m: nn.Module, b: Any) -> torch.Tensor:
    return functional.cross_entropy(checkpoint(m, b["x"], use_reentrant=False), b["target"])


def test_sound_problems_pass():
    summed = replace(GOOD, loss=lambda m, b: cross_entropy(m, b, reduction="sum"), reduction="sum")
    for problem in (GOOD, summed, SOME_IGNORED, with_loss(checkpointed)):
        assert objective_fault(user_instance(CASE, problem)) is None


def divided_by_at_least_one(m: nn.Module, b: Any) -> torch.Tensor:
    return cross_entropy(m, b, reduction="sum") / (b["target"] != -100).sum().clamp(min=1)


def steps_without_backward(run: Any) -> None:
    for _ in run.loader:
        run.optimizer.step()


@pytest.mark.parametrize(
    "plan", [Plan((2, 3, 5), 1), Plan((1, 1, 3), 2), Plan((2,), 1), Plan((1,), 1)]
)
@pytest.mark.parametrize("loss", [cross_entropy, divided_by_at_least_one])
@pytest.mark.parametrize("loop", [BUILT_IN["plain"], steps_without_backward])
def test_a_window_without_valid_targets_is_not_judged(plan, loss, loop):
    """Its mean is 0/0, which is NaN or, with the divisor clamped, 0: no loop is wrong there."""
    case = replace(CASE, plan=plan)
    verdict = check(loop, case, problem=replace(SOME_IGNORED, loss=loss))
    assert verdict.violation is None
    assert verdict.skipped == "a window has no valid targets: Problem.count of its items is 0"


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            replace(GOOD, loss=lambda m, b: cross_entropy(m, b, reduction="sum")),
            'pass reduction="sum"',
        ),
        (replace(GOOD, reduction="sum"), 'pass reduction="mean"'),
        (replace(GOOD, count=lambda b: (b["target"] != 2).sum()), "leave Problem.count out"),
    ],
)
def test_a_count_that_disagrees_with_the_mean_is_said_so(problem, said):
    verdict = check(BUILT_IN["plain"], CASE, problem=problem)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert (
        "p.py:P: the loss is not a mean with the divisor Problem.count"
        in verdict.violation.explanation
    )
    assert said in verdict.violation.explanation


def test_a_forgotten_count_is_said_so():
    """Rows of 1 to 4 targets, the others ignored: the mean is over targets, and the default count
    is of rows.
    """

    def rows(items: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(0, 5, (items, 4), generator=generator)
        there = torch.arange(4) < torch.randint(1, 5, (items, 1), generator=generator)
        return {
            "x": torch.randn(items, 4, 3, generator=generator),
            "target": target.where(there, -100),
        }

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return functional.cross_entropy(m(b["x"]).flatten(0, 1), b["target"].flatten())

    fault = objective_fault(user_instance(CASE, Problem(model_of, rows, loss)))
    lengths = (rows(4, CASE.seed)["target"] != -100).sum(1).tolist()
    assert len({*lengths}) > 1
    divisor = math.gcd(*lengths)
    assert fault is not None
    assert (
        f"{' : '.join(str(n // divisor) for n in lengths)} for 4 of them (such as a mean over tokens"
        in fault
    )
    assert "let Problem.count return the divisor of the mean" in fault
    counted = Problem(model_of, rows, loss, count=lambda b: (b["target"] != -100).sum())
    assert objective_fault(user_instance(CASE, counted)) is None


def test_a_count_that_does_not_add_up():
    fault = objective_fault(
        user_instance(CASE, replace(GOOD, count=lambda b: torch.tensor(len(b["x"]) ** 2)))
    )
    assert fault is not None
    assert "Problem.count of all 10 items is 100" in fault
    assert "[2, 3, 5] add up to 38" in fault


SAME = model_of(0)


def with_loss(loss: Callable[[nn.Module, Any], Any]) -> Problem:
    return replace(GOOD, loss=loss)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            with_loss(lambda m, b: cross_entropy(m, b, reduction="none")),
            r"a scalar tensor, got shape \(10,\)",
        ),
        (with_loss(lambda m, b: 3.0), "a scalar tensor, got float"),
        (with_loss(lambda m, b: b["x"].sum()), "does not depend on the model's parameters"),
        (
            with_loss(lambda m, b: cross_entropy(m, b) * float("nan")),
            "the loss of 10 drawn items is nan",
        ),
        (
            replace(SOME_IGNORED, count=None),
            "nan.* Problem.count must be 0 for items without valid targets",
        ),
        (with_loss(lambda m, b: cross_entropy(m, b) * torch.rand(())), "it must not be random"),
        (
            replace(GOOD, model=lambda s: nn.Sequential(model_of(s), nn.Dropout(0.5))),
            "set dropout to 0",
        ),
        (replace(GOOD, model=lambda s: nn.ReLU()), "no parameter with requires_grad=True"),
        (replace(GOOD, model=lambda s: 3), "must return a torch.nn.Module, got int"),
        (
            replace(GOOD, model=lambda s: nn.LazyLinear(5)),
            "weight has no shape before the first forward, since",
        ),
        (replace(GOOD, model=lambda s: SAME), "a fresh module each time, got the same one twice"),
        (
            replace(GOOD, model=lambda s: nn.Sequential(SAME)),
            "two models from Problem.model share 0.0.weight",
        ),
        (
            replace(GOOD, model=lambda s: nn.Linear(3, 5)),
            "the same values for the same seed.* call torch.manual_seed",
        ),
        (
            replace(GOOD, model=lambda s: nn.Linear(3, 5, device="meta")),
            "is on the meta device and has no",
        ),
        (
            replace(GOOD, count=lambda b: torch.tensor(0)),
            "Problem.count is 0 for 5 items whose loss is [12]",
        ),
        (replace(GOOD, count=lambda b: torch.tensor(-1)), "Problem.count.* got -1"),
        (replace(GOOD, count=lambda b: b["x"]), "Problem.count"),
        (
            replace(GOOD, model=lambda s: 1 / 0),
            r"ZeroDivisionError: division by zero \(test_separability.py, line \d+\)",
        ),
        (replace(GOOD, batch=lambda n, s: {}["x"]), "KeyError: 'x'"),
        (replace(GOOD, count=lambda b: b["missing"]), "KeyError: 'missing'"),
        (
            replace(GOOD, count=lambda b: None),
            "must return a number or a scalar tensor, got NoneType",
        ),
        # raised inside torch: the line is that of the user's code
        (
            with_loss(lambda m, b: m(b["x"][:, :2]).sum()),
            r"RuntimeError: .* \(test_separability.py, line \d+\)",
        ),
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
        objective_fault(
            user_instance(CASE, with_loss(lambda m, b: cross_entropy(m, b) * torch.rand(())))
        )
    assert torch.equal(torch.rand(2), expected)


def test_a_hook_that_changes_grad_after_autograd_is_refused():
    """The reference comes from `torch.autograd.grad`, which runs no such hook.

    A loop's backward does.
    """

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    def hooked(seed: int) -> nn.Module:
        made = model_of(seed)
        made[0].weight.register_post_accumulate_grad_hook(halve)
        return made

    with pytest.raises(
        UsageError, match=r"the parameter '0.weight' has a post-accumulate-grad hook"
    ):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=hooked))


# The weights of a mean, read from its losses: what was put in comes out, and no other objective is
# taken for one.


LOSSES = (0.3, 2.0, 1.1, 0.7)


def weighted(weights, losses=LOSSES):
    return lambda batch: sum(weights[i] * losses[i] for i in batch) / sum(weights[i] for i in batch)


@given(st.lists(st.integers(1, 500), min_size=4, max_size=4).filter(lambda w: len({*w}) > 1))
@settings(deadline=None)
def test_the_weights_that_were_put_in_come_out(weights):
    found = weights_of_items(weighted(weights), 4)
    assert found == pytest.approx([w / weights[0] for w in weights], rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch: sum(LOSSES[i] for i in batch),
        lambda batch: (sum(LOSSES[i] for i in batch) / len(batch)) ** 2,
        lambda batch: (
            sum(LOSSES[i] for i in batch) / len(batch) * sum(i + 1 for i in batch) / len(batch)
        ),
        lambda batch: max(LOSSES[i] for i in batch),
        lambda batch: math.log(sum(math.exp(LOSSES[i]) for i in batch)),
        lambda batch: 1.0,
    ],
    ids=["sum", "squared mean", "product of means", "maximum", "logsumexp", "constant"],
)
def test_what_is_no_weighted_mean_is_not_taken_for_one(loss):
    assert weights_of_items(loss, 4) is None


# Before any loop is blamed: whether torch's own accumulation gives the large batch, and a user's
# code works.


SLOPES = Case("own", Plan((1, 3, 2, 2), 2))


def _model(seed):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def _problem(loss=lambda model, batch: model(batch).mean(), **options):
    """Return the problem of items 1, 2, 3, ...: the gradient of a mean over some is their mean."""
    return Problem(
        _model, lambda items, seed: torch.arange(1.0, items + 1)[:, None], loss, **options
    )


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
        UsageError,
        match="the problem own failed before any loop ran, on batches of 1 to 8 items: Zero",
    ):
        reference_of(SLOPES, problem)


def test_what_torch_cannot_compute_in_float64_is_not_judged():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("no derivative")

    with pytest.raises(
        CannotJudgeError, match="the plain large batch fails in float64: no derivative"
    ):
        reference_of(SLOPES, _problem(lambda model, batch: Refuses.apply(model(batch).mean())))


# Objectives that are not separable over samples are detected by forward passes, with the reason,
# and no others are.


class _Run(Exception):
    """The loop was run."""


def never_run(run: Any) -> None:
    raise _Run


@pytest.mark.parametrize(
    ("plan", "examples"),
    [
        pytest.param(
            plans(min_windows=2, max_accumulation_steps=3), 150, id="splits", marks=pytest.mark.full
        ),
        pytest.param(None, 80, id="any", marks=pytest.mark.full),
        pytest.param(None, 25, id="few", marks=pytest.mark.quick),
    ],
)
def test_drawn_problems_that_are_not_accumulable_are_classified_so_before_a_loop_runs(
    plan, examples
):
    said: Counter[str] = Counter()

    def classified(case: Case) -> None:
        assert isinstance(case.problem, ProblemSpec)
        assert not is_accumulable(case.problem)
        verdict = check(never_run, case)
        if verdict.skipped:
            assert case.plan.total_items == 1
            return
        assert verdict.violation is not None
        if verdict.violation.kind == "raised":
            # the loss is the same whoever is beside whom, as where a normalization takes out what
            # another put in
            assert all(_adds_up(case, window) for window in range(len(case.plan.windows)))
            said["makes no difference"] += 1
            return
        assert (verdict.violation.kind, verdict.violation.diagnosis) == (
            "not-accumulable",
            "not-accumulable",
        )
        layer = case.problem.loss.kind not in CROSS_SAMPLE_LOSSES
        reason = verdict.violation.explanation
        assert ("batch normalization in train mode" in reason) == layer, f"{reason}\n{case!r}"
        said["layer" if layer else case.problem.loss.kind] += 1

    # a case that fails is not shrunk: each smaller one would compile programs of its own
    for case in draw_cases(
        cases(problem=problems(accumulable=False), plan=plan), examples=examples, seed_value=0
    ):
        classified(case)
    assert said["makes no difference"] <= examples / (3 if plan is None else 10), said
    assert said.keys() >= {"layer", *CROSS_SAMPLE_LOSSES}, said


def test_a_micro_batch_that_counts_nothing_does_not_hide_that_items_meet():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        # NaN where every target is ignored, as torch's mean over nothing is; the count says so
        return functional.cross_entropy(model(batch["x"]), batch["target"], ignore_index=4)

    def batch_of(items: int, seed: int) -> Any:
        given = batch_of_rows(items, seed)
        return {
            "x": given["x"],
            "target": torch.where(torch.arange(items) < 2, 4, given["target"] % 4),
        }

    problem = Problem(
        with_layer(lambda: nn.BatchNorm1d(6)),
        batch_of,
        loss,
        count=lambda batch: (batch["target"] != 4).sum(),
    )
    verdict = check(never_run, CASE, problem=problem)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "batch normalization in train mode" in verdict.violation.explanation


def _adds_up(case: Case, window: int) -> bool:
    """Whether the gradient of the large batch is the sum of the micro-batches' in a window of this
    case.
    """
    instance = generated_instance(case)
    model = instance.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean = instance.problem.reduction == "mean"

    def gradient(items: range) -> torch.Tensor:
        batch = instance.batch(items)
        loss = instance.problem.loss(model, batch) * (instance.count(batch) if mean else 1)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        dense = [
            torch.zeros(p.numel()) if g is None else g.to_dense().flatten()
            for p, g in zip(parameters, found, strict=True)
        ]
        return torch.cat(dense)

    plan = case.plan
    counted = [j for j in plan.windows[window] if j not in plan.masked]
    parts = torch.stack([gradient(plan.items(j)) for j in counted]).sum(0)
    return torch.allclose(gradient(plan.window_items(window)), parts, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None, database=None, phases=(Phase.generate,))
@given(cases())
def test_what_is_drawn_otherwise_is_never_classified_so(case):
    assert is_accumulable(case.problem)
    if not case.plan.masked:
        # whose mean over nothing is NaN by torch's own rule
        assert objective_fault(generated_instance(case)) is None


def with_layer(layer: Any) -> Any:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 6), layer(), nn.Tanh(), nn.Linear(6, 5))

    return build


class _Centred(nn.Module):
    """Takes the batch's mean off each item."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def negatives(m: nn.Module, b: Any) -> torch.Tensor:
    out = m(b["x"])
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def of_distinct_items(m: nn.Module, b: Any) -> torch.Tensor:
    """A product of batch means that fails where two items are equal, as the inverse of a kernel
    matrix does.
    """
    if len(b["x"].unique(dim=0)) < len(b["x"]):
        raise RuntimeError("the matrix is singular")
    return m(b["x"]).mean() * b["x"].mean()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(GOOD, loss=of_distinct_items), "contains statistics of the batch"),
        (
            replace(GOOD, model=with_layer(lambda: nn.BatchNorm1d(6))),
            r"1 \(BatchNorm1d\) gives an item an output that depends .* batch normalization in train mode. Keep",
        ),
        (
            replace(GOOD, model=with_layer(lambda: _Centred())),
            r"1 \(_Centred\) gives an item an output",
        ),
        (replace(GOOD, loss=negatives), "compares items with each other"),
        (
            replace(GOOD, loss=lambda m, b: m(b["x"]).mean() * b["x"].mean()),
            "contains statistics of the batch",
        ),
    ],
)
def test_the_reason_is_said(problem, reason):
    verdict = check(never_run, CASE, problem=problem)
    assert verdict.violation is not None
    assert re.search(reason, verdict.violation.explanation)


BATCH_NORM = Layer("batch_norm_train")
FEW_VALUES = (Layer("transformer", activation="relu", heads=1, norm_first=False), BATCH_NORM)
EXPERTS = (Layer("mixture", experts=2, features=1), BATCH_NORM)


@pytest.mark.parametrize(
    ("source", "layers", "plan"),
    [
        # layer normalization of two features gives 1 and -1: half of the items have the statistics
        # of all
        (Input("sequence", length=3, padded=False, size=2), FEW_VALUES, Plan((1, 3), 1)),
        # an expert that only the large batch sends items to has an output there alone
        (Input("vector", size=2), EXPERTS, Plan((2, 2), 1)),
    ],
)
def test_batch_normalization_is_named_whatever_is_before_it(source, layers, plan):
    spec = ProblemSpec(source, layers, Loss("mse", reduction="mean"))
    violation = check(never_run, Case(spec, plan, seed=0)).violation
    assert violation is not None
    assert (
        "gives an item an output that depends on the other items: batch normalization in train"
        in violation.explanation
    )


def test_batch_normalization_is_named_where_every_micro_batch_has_the_statistics_of_all():
    """The outputs, and so the losses, are those of the large batch; the gradients are not."""

    def build(seed: int) -> nn.Module:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        return nn.Sequential(layer, nn.BatchNorm1d(1))

    def batch_of(items: int, seed: int) -> Any:
        # each pair of items is 1 and -1 after the first layer, by one feature or by the other
        x = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
        return {
            "x": x.repeat(items, 1)[:items],
            "target": batch_of_rows(items, seed)["x"][:, :1].double(),
        }

    problem = Problem(build, batch_of, lambda m, b: functional.mse_loss(m(b["x"]), b["target"]))
    plan = Plan((2, 2), 2)
    assert objective_fault(user_instance(CASE.replace(plan=plan), problem)) is None
    violation = check(BUILT_IN["plain"], CASE.replace(plan=plan), problem=problem).violation
    assert violation is not None
    assert violation.kind == "not-accumulable"
    assert (
        "1 (BatchNorm1d) gives an item an output that depends on the other items"
        in violation.explanation
    )


def test_what_the_forward_check_is_too_coarse_for_is_seen_before_a_loop_is_blamed():
    """The samples interact in a millionth of the loss: below what float32 inside a model may do,
    far above rounding.
    """
    slight = replace(
        GOOD, loss=lambda m, b: cross_entropy(m, b) + 1e-6 * m(b["x"]).mean() * b["x"].mean()
    )
    assert objective_fault(user_instance(CASE, slight)) is None
    verdict = check(BUILT_IN["plain"], CASE, problem=slight)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "no loop is to blame" in verdict.violation.explanation


def test_batch_norm_that_refuses_single_items_is_classified_too():
    """Torch's batch norm raises on one value per channel.

    The plan has micro-batches of one item.
    """
    problem = replace(GOOD, model=with_layer(lambda: nn.BatchNorm1d(6)))
    fault = objective_fault(user_instance(Case("p.py:P", Plan((1, 3), 2)), problem))
    assert fault is not None
    assert "rejects a micro-batch with one value per channel" in fault


# What is to blame


class _CentresBetween(nn.Module):
    """Centres its features between two modules, neither of which mixes items."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        return self.after(h - h.mean(0))


class _MixesBackward(torch.autograd.Function):
    """The identity; its backward takes the batch's mean off each item's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(0)


def _built(kind: Any) -> Any:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return kind()

    return build


def penalised(m: nn.Module, b: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]), b["target"], reduction="sum") + sum(
        p.square().sum() for p in m.parameters()
    )


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        # neither the module before nor the one after, whose inputs differ already
        (
            replace(GOOD, model=_built(_CentresBetween)),
            r"the model \(_CentresBetween\) gives an item an output",
        ),
        (
            replace(
                GOOD,
                loss=lambda m, b: functional.cross_entropy(
                    _MixesBackward.apply(m(b["x"])), b["target"]
                ),
            ),
            "the losses of the micro-batches add up to the large batch's and the gradients do not: a backward",
        ),
        (
            replace(GOOD, loss=penalised, reduction="sum"),
            r"every batch's loss contains [\d.]+ once, whatever its items",
        ),
    ],
    ids=["between modules", "backward", "a constant per batch"],
)
def test_what_is_innocent_is_not_blamed(problem, reason):
    verdict = check(BUILT_IN["plain"], CASE, problem=problem)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert re.search(reason, verdict.violation.explanation), verdict.violation.explanation


def test_a_buffer_that_the_forward_changes_is_named():
    def build() -> nn.Module:
        layer = nn.Linear(3, 5)
        # singular values that lie close together: the power iteration converges slowly
        nn.init.orthogonal_(layer.weight)
        layer.weight.data += 0.05 * torch.randn(5, 3)
        return nn.utils.parametrizations.spectral_norm(layer)

    with pytest.raises(
        UsageError, match=r"changes the buffer '\S+_u' and the loss depends on it, as the power"
    ):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=_built(build)))


def test_a_parameter_that_the_forward_writes_is_named_and_no_loop_is_blamed():
    class Clamps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(
        UsageError,
        match=r"the forward changes the parameter 'weight', as an embedding with max_norm",
    ):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=_built(lambda: Clamps(3, 5))))
