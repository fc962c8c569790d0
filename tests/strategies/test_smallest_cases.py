"""What drawn cases shrink to: the smallest problem and plan that still meet a condition."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, plans
from gradcheck_suite.catalogue.tables import loss_definition, output_signal
from gradcheck_suite.strategies.drawing import run_on_cases

SMALLEST = Case(
    ProblemSpec(Input("vector", size=1), (Layer("linear", bias=False, features=1),), Loss("mse", reduction="mean")),
    Plan((1,), 1),
)
STARTS = 5
"""Searches of which one must reach the smallest model: a focus on another layer, or a loss chosen for its ignored
targets, can hold a single search up."""


class _Fits(Exception):
    """A case meets the condition."""


def _smallest(strategy, condition, start=0):
    """Draw cases until one meets the condition, and shrink it, as `verify` does; return the case.

    `hypothesis.find` would draw constants of the modules that the tests before have imported.
    """
    fitting = []

    def judge(case):
        if condition(case):
            fitting.append(case)
            raise _Fits

    with pytest.raises(_Fits):
        run_on_cases(judge, strategy, examples=3000, seed_value=start)
    return fitting[-1]


def _smallest_problem(condition, start=0):
    return _smallest(cases(plan=st.just(Plan((1,), 1))), lambda case: condition(case.problem), start).problem


def test_everything_shrinks_to_the_smallest_case():
    assert _smallest(cases(), lambda case: True) == SMALLEST
    assert _smallest(cases(), lambda case: case.plan.epochs == 2) == SMALLEST.replace(plan=Plan((1,), 1, 2))


@pytest.mark.parametrize(
    ("condition", "plan"),
    [
        (lambda p: p.epochs == 2, Plan((1,), 1, 2)),
        (lambda p: p.has_short_window, Plan((1,), 2)),
        (lambda p: len(p.windows) == 2, Plan((1, 1), 1)),
        (lambda p: p.accumulation_steps >= 3 and not p.has_short_window, Plan((1, 1, 1), 3)),
        (lambda p: p.has_short_window and len(p.windows) == 2 and p.epochs > 1, Plan((1, 1, 1), 2, 2)),
        (lambda p: max(p.micro_batches) >= 3, Plan((3,), 1)),
        (lambda p: p.total_items >= 5 and len(p.micro_batches) == 1, Plan((5,), 1)),
    ],
)
def test_plans_shrink(condition, plan):
    drawn = cases(problem=st.just(SMALLEST.problem), plan=plans())
    assert _smallest(drawn, lambda case: condition(case.plan)).plan == plan


def test_masks_shrink():
    loss = Loss("cross_entropy", ignore_index=True, label_smoothing=0.0, class_weights=False, reduction="mean")
    problem = ProblemSpec(Input("vector", size=1), (Layer("linear", bias=False, features=2),), loss)
    plan = _smallest(cases(problem=st.just(problem)), lambda case: case.plan.masked).plan
    assert plan.micro_batches == (1, 1)
    assert len(plan.masked) == 1
    assert plan.epochs == 1


@pytest.mark.parametrize("kind", ["tanh", "residual"])
def test_a_layer_that_cannot_stand_last_shrinks_to_one_before_the_smallest(kind):
    small = _smallest_problem(lambda problem: any(layer.kind == kind for layer in problem.layers))
    assert len(small.layers) == 2
    assert small.layers[0].kind == kind
    assert small.layers[1] == SMALLEST.problem.layers[0]
    assert small.input == SMALLEST.problem.input


LONG_TO_SHRINK = ("attention", "transformer")


@pytest.mark.parametrize(
    "kind",
    [
        *("lstm", "conv2d", "embedding", "mixture", "tied_linear"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in LONG_TO_SHRINK),
    ],
)
def test_a_trainable_layer_shrinks_to_the_only_one(kind):
    def has_the_layer(case):
        return any(layer.kind == kind for layer in case.problem.layers)

    found = (_smallest(cases(), has_the_layer, start).problem for start in range(STARTS))
    assert any(
        [layer.kind for layer in small.layers] == [kind] and small.loss == SMALLEST.problem.loss for small in found
    )


@pytest.mark.parametrize("kind", ["cross_entropy", "bce_with_logits"])
def test_a_loss_shrinks_to_the_smallest_model_that_it_takes(kind):
    def is_smallest(small):
        simplest = loss_definition(small.loss).variants(output_signal(small))[0]
        return len(small.layers) == 1 and small.loss == Loss(kind, **simplest, reduction="mean")

    assert any(
        is_smallest(_smallest_problem(lambda problem: problem.loss.kind == kind, start)) for start in range(STARTS)
    )
