"""Objectives that are not separable over samples are detected by forward passes, with the reason, and no others are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.catalogue import CROSS_SAMPLE_LOSSES, is_accumulable
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.instance import generated_instance, user_instance
from gradcheck_suite.generation.cases import cases
from gradcheck_suite.generation.drawing import draw_cases
from gradcheck_suite.generation.plans import plans
from gradcheck_suite.generation.problems import problems
from gradcheck_suite.loops import BUILT_IN
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.separability import objective_fault

CASE = Case("p.py:P", Plan((2, 3, 5), 2))


class _Run(Exception):
    """The loop was run."""


def never_run(run: Any) -> None:
    raise _Run


@pytest.mark.parametrize(
    ("plan", "examples"),
    [
        pytest.param(plans(min_windows=2, max_accumulation_steps=3), 150, id="splits", marks=pytest.mark.full),
        pytest.param(None, 80, id="any", marks=pytest.mark.full),
        pytest.param(None, 25, id="few"),
    ],
)
def test_drawn_problems_that_are_not_accumulable_are_classified_so_before_a_loop_runs(plan, examples):
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
            # the loss is the same whoever is beside whom, as where a normalization takes out what another put in
            assert all(_adds_up(case, window) for window in range(len(case.plan.windows)))
            said["makes no difference"] += 1
            return
        assert (verdict.violation.kind, verdict.violation.diagnosis) == ("not-accumulable", "not-accumulable")
        layer = case.problem.loss.kind not in CROSS_SAMPLE_LOSSES
        reason = verdict.violation.explanation
        assert ("batch normalization in train mode" in reason) == layer, f"{reason}\n{case!r}"
        said["layer" if layer else case.problem.loss.kind] += 1

    # a case that fails is not shrunk: each smaller one would compile programs of its own
    for case in draw_cases(cases(problem=problems(accumulable=False), plan=plan), examples=examples, seed_value=0):
        classified(case)
    assert said["makes no difference"] <= examples / (3 if plan is None else 10), said
    assert said.keys() >= {"layer", *CROSS_SAMPLE_LOSSES}, said


def test_a_micro_batch_that_counts_nothing_does_not_hide_that_items_meet():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        # NaN where every target is ignored, as torch's mean over nothing is; the count says so
        return functional.cross_entropy(model(batch["x"]), batch["y"], ignore_index=4)

    def batch_of(items: int, seed: int) -> Any:
        given = batch(items, seed)
        return {"x": given["x"], "y": torch.where(torch.arange(items) < 2, 4, given["y"] % 4)}

    problem = Problem(
        with_layer(lambda: nn.BatchNorm1d(6)), batch_of, loss, count=lambda batch: (batch["y"] != 4).sum()
    )
    verdict = check(never_run, CASE, problem=problem)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "batch normalization in train mode" in verdict.violation.explanation


def _adds_up(case: Case, window: int) -> bool:
    """Whether the gradient of the large batch is the sum of the micro-batches' in a window of this case."""
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


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))


def with_layer(layer: Any) -> Any:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), layer(), nn.Tanh(), nn.Linear(6, 5))

    return build


class _Frozen(nn.BatchNorm1d):
    """Batch normalization that stays in eval mode."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class _Centred(nn.Module):
    """Takes the batch's mean off each item."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def batch(items: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(items, 4, generator=generator),
        "y": torch.randint(0, 5, (items,), generator=generator),
        "keep": (torch.rand(items, 5, generator=generator) < 0.8).double(),
    }


def cross_entropy(m: nn.Module, b: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]), b["y"])


def checkpointed(m: nn.Module, b: Any) -> torch.Tensor:
    return functional.cross_entropy(checkpoint(m, b["x"], use_reentrant=False), b["y"])


def masked_by_data(m: nn.Module, b: Any) -> torch.Tensor:
    return functional.cross_entropy(m(b["x"]) * b["keep"] / 0.8, b["y"])


def with_auxiliary_sum(m: nn.Module, b: Any) -> torch.Tensor:
    logits = m(b["x"])
    return functional.cross_entropy(logits, b["y"]) + 0.1 * logits.logsumexp(-1).square().mean()


GOOD = Problem(model, batch, cross_entropy)
LOOK_ALIKES = {
    "group norm": replace(GOOD, model=with_layer(lambda: nn.GroupNorm(2, 6))),
    "layer norm": replace(GOOD, model=with_layer(lambda: nn.LayerNorm(6))),
    "batch norm in eval mode": replace(GOOD, model=lambda s: with_layer(lambda: _Frozen(6))(s)),
    "weight normalization": replace(
        GOOD, model=with_layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))
    ),
    "checkpointing": replace(GOOD, loss=checkpointed),
    "dropout whose mask is data": replace(GOOD, loss=masked_by_data),
    "an auxiliary loss that is a sum": replace(GOOD, loss=with_auxiliary_sum),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_accumulable(name):
    verdict = check(BUILT_IN["plain"], CASE, problem=LOOK_ALIKES[name])
    assert verdict.violation is None


def negatives(m: nn.Module, b: Any) -> torch.Tensor:
    out = m(b["x"])
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            replace(GOOD, model=with_layer(lambda: nn.BatchNorm1d(6))),
            r"1 \(BatchNorm1d\) gives an item an output that depends .* batch normalization in train mode. Keep",
        ),
        (replace(GOOD, model=with_layer(lambda: _Centred())), r"1 \(_Centred\) gives an item an output"),
        (replace(GOOD, loss=negatives), "compares items with each other"),
        (replace(GOOD, loss=lambda m, b: m(b["x"]).mean() * b["x"].mean()), "contains statistics of the batch"),
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
        # layer normalization of two features gives 1 and -1: half of the items have the statistics of all
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
        "gives an item an output that depends on the other items: batch normalization in train" in violation.explanation
    )


def test_a_summed_loss_of_two_items_that_interact_is_classified_too():
    """A constant in every batch is looked for with three items, which a generated case of two does not have."""
    spec = ProblemSpec(
        Input("vector", size=2),
        (Layer("linear", bias=True, features=2),),
        Loss("standardised_targets", reduction="sum"),
    )
    violation = check(never_run, Case(spec, Plan((1, 1), 2), seed=0)).violation
    assert violation is not None
    assert violation.kind == "not-accumulable"


def test_batch_normalization_is_named_where_every_micro_batch_has_the_statistics_of_all():
    """The outputs, and so the losses, are those of the large batch; the gradients are not."""

    def build(seed: int) -> nn.Module:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        return nn.Sequential(layer, nn.BatchNorm1d(1))

    def batch_of(items: int, seed: int) -> Any:
        # each pair of items is 1 and -1 after the first layer, by one feature or by the other
        x = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
        return {"x": x.repeat(items, 1)[:items], "y": batch(items, seed)["x"][:, :1].double()}

    problem = Problem(build, batch_of, lambda m, b: functional.mse_loss(m(b["x"]), b["y"]))
    plan = Plan((2, 2), 2)
    assert objective_fault(user_instance(CASE.replace(plan=plan), problem)) is None
    violation = check(BUILT_IN["plain"], CASE.replace(plan=plan), problem=problem).violation
    assert violation is not None
    assert violation.kind == "not-accumulable"
    assert "1 (BatchNorm1d) gives an item an output that depends on the other items" in violation.explanation


def test_what_the_forward_check_is_too_coarse_for_is_seen_before_a_loop_is_blamed():
    """The samples interact in a millionth of the loss: below what float32 inside a model may do, far above rounding."""
    slight = replace(GOOD, loss=lambda m, b: cross_entropy(m, b) + 1e-6 * m(b["x"]).mean() * b["x"].mean())
    assert objective_fault(user_instance(CASE, slight)) is None
    verdict = check(BUILT_IN["plain"], CASE, problem=slight)
    assert verdict.violation is not None
    assert verdict.violation.kind == "not-accumulable"
    assert "no loop is to blame" in verdict.violation.explanation


def test_a_faulty_loop_on_a_sound_problem_is_blamed():
    """The same path, taken by a loop that never resets."""

    def no_reset(run: Any) -> None:
        for b in run.loader:
            run.loss(run.model, b).backward()
            run.optimizer.step()

    verdict = check(no_reset, CASE.replace(plan=Plan((2, 3), 1)), problem=GOOD)
    assert verdict.violation is not None
    assert verdict.violation.kind == "gradient"


def test_batch_norm_that_refuses_single_items_is_classified_too():
    """Torch's batch norm raises on one value per channel; the plan has micro-batches of one item."""
    problem = replace(GOOD, model=with_layer(lambda: nn.BatchNorm1d(6)))
    fault = objective_fault(user_instance(Case("p.py:P", Plan((1, 3), 2)), problem))
    assert fault is not None
    assert "rejects a micro-batch with one value per channel" in fault


# What is to blame


class _CentresBetween(nn.Module):
    """Centres its features between two modules, neither of which mixes items."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 6), nn.Linear(6, 5)

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
    return functional.cross_entropy(m(b["x"]), b["y"], reduction="sum") + sum(p.square().sum() for p in m.parameters())


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        # neither the module before nor the one after, whose inputs differ already
        (replace(GOOD, model=_built(_CentresBetween)), r"the model \(_CentresBetween\) gives an item an output"),
        (
            replace(GOOD, loss=lambda m, b: functional.cross_entropy(_MixesBackward.apply(m(b["x"])), b["y"])),
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
        layer = nn.Linear(4, 5)
        # singular values that lie close together: the power iteration converges slowly
        nn.init.orthogonal_(layer.weight)
        layer.weight.data += 0.05 * torch.randn(5, 4)
        return nn.utils.parametrizations.spectral_norm(layer)

    with pytest.raises(UsageError, match=r"changes the buffer '\S+_u' and the loss depends on it, as the power"):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=_built(build)))


def test_a_parameter_that_the_forward_writes_is_named_and_no_loop_is_blamed():
    class Clamps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(UsageError, match=r"the forward changes the parameter 'weight', as an embedding with max_norm"):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=_built(lambda: Clamps(4, 5))))


def test_a_random_loss_is_still_called_random():
    with pytest.raises(UsageError, match="must not be random: set dropout to 0"):
        check(BUILT_IN["plain"], CASE, problem=replace(GOOD, model=with_layer(nn.Dropout)))
