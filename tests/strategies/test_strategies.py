"""Strategies: what they draw is valid, keeps to its bounds, and reaches what matters.

Shares are counted over seeded runs of `cases()`; each minimum is stated beside what it is a minimum of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite import Case, Input, Layer, Plan, cases, plans, problems
from gradcheck_suite.catalogue.tables import (
    INPUTS,
    LAYERS,
    LOSSES,
    input_signal,
    layer_definition,
    loss_definition,
    output_signal,
)
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.strategies.cases import RARE_INPUTS, Focus, Limits, picked_layer
from gradcheck_suite.strategies.drawing import draw_cases
from gradcheck_suite.strategies.plans import MAX_MICRO_BATCHES
from tests.one_problem import LINEAR

RUNS, ALL_RUNS, PER_RUN = 4, 10, 200
EACH_RUN = pytest.mark.parametrize(
    "number", [*range(RUNS), *(pytest.param(number, marks=pytest.mark.full) for number in range(RUNS, ALL_RUNS))]
)


def _walk(layers) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        yield from _walk(layer.layers)


@cache
def _one_run(number: int) -> tuple[Case, ...]:
    return tuple(draw_cases(cases(), examples=PER_RUN, seed_value=number))


@cache
def _drawn(runs: int = RUNS) -> tuple[Case, ...]:
    """Draw as `verify` does, with its default number of cases."""
    return tuple(case for number in range(runs) for case in _one_run(number))


# Coverage


def _plan(test):
    return lambda case: test(case.plan)


def _any_layer(test):
    return lambda case: any(map(test, _walk(case.problem.layers)))


FEATURES = {
    "a micro-batch of one item": (0.2, _plan(lambda p: 1 in p.micro_batches)),
    "unequal micro-batches in one window": (
        0.4,
        _plan(lambda p: any(len({p.micro_batches[j] for j in w}) > 1 for w in p.windows)),
    ),
    "a micro-batch without valid targets": (0.005, _plan(lambda p: bool(p.masked))),
    **{f"K = {k}": (0.05 if k < 3 else 0.03, _plan(lambda p, k=k: p.accumulation_steps == k)) for k in range(1, 9)},
    "K above 8": (0.02, _plan(lambda p: p.accumulation_steps > 8)),
    "K larger than the epoch": (0.1, _plan(lambda p: p.accumulation_steps > len(p.micro_batches))),
    "a short last window": (0.3, _plan(lambda p: p.has_short_window)),
    "a short last window after whole ones": (0.1, _plan(lambda p: p.has_short_window and len(p.windows) > 1)),
    "several windows": (0.3, _plan(lambda p: len(p.windows) > 1)),
    "four windows": (0.05, _plan(lambda p: len(p.windows) == 4)),
    **{f"epochs = {n}": (0.2 if n == 1 else 0.1, _plan(lambda p, n=n: p.epochs == n)) for n in (1, 2, 3)},
    "several windows and several epochs": (0.15, _plan(lambda p: p.epochs > 1 and len(p.windows) > 1)),
    "ten micro-batches": (0.1, _plan(lambda p: len(p.micro_batches) >= 10)),
    "tied parameters": (0.05, _any_layer(lambda layer: layer.kind in ("tied_linear", "tied_embedding", "shared"))),
    "frozen parameters": (0.05, _any_layer(lambda layer: "frozen" in layer.kind)),
    "unused parameters": (0.03, _any_layer(lambda layer: layer.kind == "unused")),
    "parameters that some items reach": (0.05, _any_layer(lambda layer: layer.kind in ("branch", "mixture"))),
    "sparse gradients": (0.02, _any_layer(lambda layer: bool(layer.o.get("sparse")))),
    "branches that join": (0.02, _any_layer(lambda layer: layer.kind in ("sum", "concat"))),
    "a parameter without dimensions": (0.01, _any_layer(lambda layer: layer.kind == "scale")),
    "a layer that differs in eval mode": (0.01, _any_layer(lambda layer: layer.kind == "train_scale")),
    "several inputs": (0.01, _any_layer(lambda layer: layer.kind == "second_input")),
    "residual connections": (0.01, _any_layer(lambda layer: layer.kind == "residual")),
    "one layer": (0.1, lambda case: len(case.problem.layers) == 1),
    "five layers": (0.05, lambda case: len(case.problem.layers) == 5),
    "mean": (0.3, lambda case: case.problem.loss.reduction == "mean"),
    "sum": (0.3, lambda case: case.problem.loss.reduction == "sum"),
    "ignored targets": (0.02, lambda case: bool(case.problem.loss.o.get("ignore_index"))),
    "label smoothing": (0.02, lambda case: bool(case.problem.loss.o.get("label_smoothing"))),
    "class weights": (0.02, lambda case: bool(case.problem.loss.o.get("class_weights"))),
    "unequal counts of items": (
        0.03,
        lambda case: not loss_definition(case.problem.loss).uniform(output_signal(case.problem), case.problem.loss.o),
    ),
    "several terms": (
        0.02,
        lambda case: case.problem.loss.kind in ("mse_and_l1", "cross_entropy_and_z", "distillation"),
    ),
    "several parameter groups": (0.15, lambda case: case.groups > 1),
    "padding": (0.1, lambda case: input_signal(case.problem.input).padded),
}
"""What must be drawn, in which share of the cases at least, and how it is told."""


@pytest.mark.full
@pytest.mark.parametrize(("runs", "part"), [(RUNS, 0.5), (ALL_RUNS, 1.0)])
def test_cases_reach(runs, part):
    """Over few runs a share varies, so that half of the minimum is asked."""
    drawn = _drawn(runs)
    shares = {what: sum(map(test, drawn)) / len(drawn) for what, (_, test) in FEATURES.items()}
    assert not {what: share for what, share in shares.items() if share < part * FEATURES[what][0]}


def test_cases_reach_every_input():
    counts = Counter(case.problem.input.kind for case in _drawn())
    assert (
        {kind.name for kind in INPUTS.values() if kind.drawn}
        == set(counts)
        == {"vector", "tokens", "sequence", "image"}
    )
    assert min(counts.values()) >= 0.08 * len(_drawn()), counts


@EACH_RUN
def test_every_run_reaches_every_layer_kind_and_loss(number):
    """Every kind that a drawn problem can hold, in each run of 200 cases."""
    run = _one_run(number)
    assert {kind for case in run for kind in case.problem.layer_kinds} == set(LAYERS) - {"readout"}
    assert {case.problem.loss.kind for case in run} == set(LOSSES) - {"identity"}


@EACH_RUN
def test_every_run_reaches_every_graph(number):
    """A module and a parameter under two names, embeddings with sparse gradients, more than a dozen parameters."""
    run = [case.problem for case in _one_run(number)]
    tied = [problem for problem in run if problem.ties]
    assert any("." not in name for problem in tied for name, _ in problem.ties), "no module under two names"
    assert any("." in name for problem in tied for name, _ in problem.ties), "no parameter under two names"
    assert any(problem.layers[0].kind == "sum" and len(problem.layers[0].layers) >= 7 for problem in run)
    assert any(layer.kind == "embedding" and layer.o["sparse"] for p in run for layer in p.layers)


@EACH_RUN
def test_every_run_reaches_every_rare_input(number):
    """Ties, zeros and large values; other sequence lengths, vocabularies and image sizes."""
    options = {option for case in _one_run(number) for option in case.problem.input.options}
    assert options >= set(RARE_INPUTS)


def test_every_case_of_a_run_is_another_problem():
    for number in range(RUNS):
        run = _one_run(number)
        assert len(run) == len(set(run)) == PER_RUN
        assert len({case.problem for case in run}) >= 0.95 * PER_RUN


# Validity


def test_every_drawn_problem_fits_together():
    for case in _drawn():
        layers = case.problem.layers
        assert 1 <= len(layers) <= 5
        assert any(layer_definition(layer).trainable for layer in _walk(layers[-1:]))
        out = output_signal(case.problem)
        options = {name: value for name, value in case.problem.loss.options if name != "reduction"}
        assert options in [dict(v) for v in loss_definition(case.problem.loss).variants(out)]


def test_every_drawn_plan_is_within_its_bounds():
    for plan in (case.plan for case in _drawn()):
        assert len(plan.micro_batches) <= MAX_MICRO_BATCHES
        assert 1 <= len(plan.windows) <= 4
        assert 1 <= plan.epochs <= 3
        assert max(plan.micro_batches) <= 8


@settings(max_examples=60)
@given(cases())
def test_every_drawn_case_comes_to_life_with_a_finite_loss_and_a_gradient(case):
    instance = generated_instance(case)
    loss = instance.problem.loss(instance.model(), instance.batch(range(case.plan.total_items)))
    assert loss.shape == ()
    assert loss.dtype is torch.float64
    assert torch.isfinite(loss)
    assert loss.requires_grad


@given(st.data())
def test_plans_keep_to_the_bounds_they_are_given(data):
    low = data.draw(st.integers(1, 6))
    high = data.draw(st.integers(low, 9))
    plan = data.draw(
        plans(
            max_epochs=2,
            min_windows=2,
            max_windows=3,
            min_accumulation_steps=low,
            max_accumulation_steps=high,
            max_items=3,
        )
    )
    assert 1 <= plan.epochs <= 2
    assert 2 <= len(plan.windows) <= 3
    assert low <= plan.accumulation_steps <= high
    assert max(plan.micro_batches) <= 3
    assert plan.masked == ()


@pytest.mark.parametrize("sparse", [True, False])
def test_a_focus_on_embeddings_gives_sparse_gradients_only_where_they_are_allowed(sparse):
    tokens = input_signal(Input("tokens", length=3, padded=False, vocabulary=5))
    picked = [picked_layer(Focus(layer="embedding"), tokens, Limits(sparse=sparse), number) for number in range(16)]
    assert any(layer.o["sparse"] for layer in picked) == sparse


@given(problems(min_layers=2, max_layers=3, sparse=False))
def test_problems_keep_to_the_bounds_they_are_given(problem):
    assert 2 <= len(problem.layers) <= 3
    assert not any(layer.o.get("sparse") for layer in _walk(problem.layers))


@given(cases(assumes=("equal-micro-batches",)))
def test_equal_micro_batches_are_respected(case):
    plan = case.plan
    assert all(len({plan.micro_batches[j] for j in window}) == 1 for window in plan.windows)
    instance = generated_instance(case)
    counts = [float(instance.count(batch)) for batch in instance.loader()]
    assert all(len({counts[j] for j in window}) == 1 for window in plan.windows)


@given(cases(assumes=("whole-windows",)))
def test_whole_windows_are_respected(case):
    assert not case.plan.has_short_window


@given(cases(assumes=("sum-reduction",)))
def test_sum_reduction_is_respected(case):
    assert case.problem.loss.reduction == "sum"


@given(cases(assumes=("equal-batches", "mean-reduction", "one-epoch", "plain-counts", "dense-gradients")))
def test_the_assumptions_of_many_trainers_are_respected_together(case):
    plan, instance = case.plan, generated_instance(case)
    assert len(set(plan.micro_batches)) == plan.epochs == 1
    assert plan.masked == ()
    assert len({float(instance.count(batch)) for batch in instance.loader()}) == 1
    assert case.problem.loss.reduction == "mean"
    assert not any(layer.o.get("sparse") for layer in _walk(case.problem.layers))


@given(cases(assumes=("plain-counts",)))
def test_plain_counts_are_in_proportion_to_the_items(case):
    instance = generated_instance(case)
    per_item = {float(instance.count(b)) / n for b, n in zip(instance.loader(), case.plan.micro_batches, strict=True)}
    assert max(per_item) - min(per_item) <= 1e-12 * max(per_item)


@given(cases(assumes=("no-layer:linear", "no-layer:embedding", "no-layer:residual")))
def test_excluded_layer_kinds_are_not_drawn(case):
    assert not {"linear", "embedding", "residual"} & set(case.problem.layer_kinds)


@given(cases(dtype="bfloat16", optimizer="adam"))
def test_a_case_has_the_dtype_and_the_optimizer_asked_for_and_no_gradient_it_cannot_take(case):
    assert (case.dtype, case.optimizer, case.device) == ("bfloat16", "adam", "cpu")
    assert not any(layer.o.get("sparse") for layer in _walk(case.problem.layers))


@given(cases(problem="model.py:PROBLEM"))
def test_of_a_users_problem_only_plans_are_drawn(case):
    assert case.problem == "model.py:PROBLEM"
    assert case.plan.masked == ()


@given(cases(problem=st.just(LINEAR), plan=st.just(Plan((2, 1), 2))))
def test_problem_and_plan_may_be_given(case):
    assert case.problem == LINEAR
    assert case.plan == Plan((2, 1), 2)


# Bad arguments


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (plans(max_epochs=0), "expected 1 <= min_epochs <= max_epochs, got 1 and 0"),
        (plans(max_epochs=1.5), "expected 1 <= min_epochs <= max_epochs, got 1 and 1.5"),
        (plans(min_windows=0), "expected 1 <= min_windows <= max_windows, got 0 and 4"),
        (plans(min_windows=3, max_windows=2), "expected 1 <= min_windows <= max_windows, got 3 and 2"),
        (
            plans(max_accumulation_steps=0),
            "1 <= min_accumulation_steps <= max_accumulation_steps, got 1 and 0",
        ),
        (plans(max_items=0), "expected 1 <= min_items <= max_items, got 1 and 0"),
        (plans(max_items="8"), "expected 1 <= min_items <= max_items, got 1 and '8'"),
        (plans(assumes=("luck",)), "assumption must be one of"),
        (plans(assumes="whole-windows"), "assumes must be a tuple of names such as ('whole-windows',)"),
        (problems(min_layers=0), "expected 1 <= min_layers <= max_layers, got 0 and 5"),
        (problems(min_layers=6), "expected 1 <= min_layers <= max_layers, got 6 and 5"),
        (problems(assumes=("luck",)), "assumption must be one of"),
        (cases(dtype="int8"), "dtype must be one of float64, float32, bfloat16, float16; got 'int8'"),
        (cases(device="tpu"), "device must be one of cpu, cuda; got 'tpu'"),
        (cases(optimizer="sdg"), "optimizer must be one of sgd"),
        (cases(assumes=("luck",)), "assumption must be one of"),
        (cases(assumes=("no-layer:luck",)), "KIND must be one of "),
        (cases(assumes=tuple(f"no-layer:{k}" for k in LAYERS if k != "readout")), "no model is left to draw"),
        (cases(problem=3), "problem must be a strategy or the name of a user's problem, got 3"),
        (cases(plan=Plan((1,), 1)), "plan must be a strategy, such as just(Plan(...)), got Plan("),
    ],
)
def test_a_bad_argument_is_refused_at_the_draw(strategy, says):
    @settings(max_examples=1, database=None)
    @given(strategy)
    def draw(drawn):
        pytest.fail("drawn")

    with pytest.raises(InvalidArgument) as error:
        draw()
    assert says in str(error.value)
