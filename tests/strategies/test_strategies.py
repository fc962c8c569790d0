"""Strategies: what they draw is valid, keeps to its bounds, and reaches what matters.

Shares are counted over seeded runs of `cases()`; each minimum is stated beside what it is a minimum
of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, plans, problems
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
from gradcheck_suite.strategies.cases import MOVING_STEPS, RARE_INPUTS, SOMETIMES_MOVING
from gradcheck_suite.strategies.coverage import SPLITS, CaseCoverage
from gradcheck_suite.strategies.drawing import AHEAD, draw_cases, run_on_cases
from gradcheck_suite.strategies.plans import MAX_MICRO_BATCHES
from tests.one_problem import LINEAR

RUNS, ALL_RUNS, PER_RUN = 2, 8, 200
EACH_RUN = pytest.mark.parametrize(
    "number",
    [
        *range(RUNS),
        *(pytest.param(number, marks=pytest.mark.full) for number in range(RUNS, ALL_RUNS)),
    ],
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
    **{
        f"K = {k}": (0.05 if k < 3 else 0.03, _plan(lambda p, k=k: p.accumulation_steps == k))
        for k in range(1, 9)
    },
    "K above 8": (0.02, _plan(lambda p: p.accumulation_steps > 8)),
    "K larger than the epoch": (0.1, _plan(lambda p: p.accumulation_steps > len(p.micro_batches))),
    "a short last window": (0.3, _plan(lambda p: p.has_short_window)),
    "a short last window after whole ones": (
        0.1,
        _plan(lambda p: p.has_short_window and len(p.windows) > 1),
    ),
    "several windows": (0.3, _plan(lambda p: len(p.windows) > 1)),
    "four windows": (0.05, _plan(lambda p: len(p.windows) == 4)),
    **{
        f"epochs = {n}": (0.2 if n == 1 else 0.1, _plan(lambda p, n=n: p.epochs == n))
        for n in (1, 2, 3)
    },
    "several windows and several epochs": (
        0.15,
        _plan(lambda p: p.epochs > 1 and len(p.windows) > 1),
    ),
    "ten micro-batches": (0.1, _plan(lambda p: len(p.micro_batches) >= 10)),
    "tied parameters": (
        0.05,
        _any_layer(lambda layer: layer.kind in ("tied_linear", "tied_embedding", "shared")),
    ),
    "frozen parameters": (0.05, _any_layer(lambda layer: "frozen" in layer.kind)),
    "unused parameters": (0.03, _any_layer(lambda layer: layer.kind == "unused")),
    "parameters that some items reach": (
        0.05,
        _any_layer(lambda layer: layer.kind in ("branch", "mixture")),
    ),
    "sparse gradients": (0.02, _any_layer(lambda layer: bool(layer.o.get("sparse")))),
    "branches that join": (0.02, _any_layer(lambda layer: layer.kind in ("sum", "concat"))),
    "a parameter without dimensions": (0.01, _any_layer(lambda layer: layer.kind == "scale")),
    "a layer that differs in eval mode": (
        0.01,
        _any_layer(lambda layer: layer.kind == "train_scale"),
    ),
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
        lambda case: (
            not loss_definition(case.problem.loss).uniform(
                output_signal(case.problem), case.problem.loss.o
            )
        ),
    ),
    "several terms": (
        0.02,
        lambda case: (
            case.problem.loss.kind in ("mse_and_l1", "cross_entropy_and_z", "distillation")
        ),
    ),
    "several parameter groups": (0.15, lambda case: case.groups > 1),
    "items that repeat": (0.08, lambda case: case.distinct_items > 0),
    "padding": (0.1, lambda case: input_signal(case.problem.input).padded),
}
"""What must be drawn, in which share of the cases at least, and how it is told."""


@pytest.mark.full
@pytest.mark.parametrize(("runs", "part"), [(4, 0.5), (ALL_RUNS, 1.0)])
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
    """A module and a parameter under two names, embeddings with sparse gradients, more than a dozen
    parameters.
    """
    run = [case.problem for case in _one_run(number)]
    tied = [problem for problem in run if problem.ties]
    assert any("." not in name for problem in tied for name, _ in problem.ties), (
        "no module under two names"
    )
    assert any("." in name for problem in tied for name, _ in problem.ties), (
        "no parameter under two names"
    )
    assert any(
        problem.layers[0].kind == "sum" and len(problem.layers[0].layers) >= 7 for problem in run
    )
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


@given(problems(min_layers=2, max_layers=3, sparse=False))
def test_problems_keep_to_the_bounds_they_are_given(problem):
    assert 2 <= len(problem.layers) <= 3
    assert not any(layer.o.get("sparse") for layer in _walk(problem.layers))


@given(
    cases(
        assumes=("equal-batches", "mean-reduction", "one-epoch", "plain-counts", "dense-gradients")
    )
)
def test_the_assumptions_of_many_trainers_are_respected_together(case):
    plan, instance = case.plan, generated_instance(case)
    assert len(set(plan.micro_batches)) == plan.epochs == 1
    assert plan.masked == ()
    assert len({float(instance.count(batch)) for batch in instance.loader()}) == 1
    assert case.problem.loss.reduction == "mean"
    assert not any(layer.o.get("sparse") for layer in _walk(case.problem.layers))


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
        (
            plans(min_windows=3, max_windows=2),
            "expected 1 <= min_windows <= max_windows, got 3 and 2",
        ),
        (
            plans(max_accumulation_steps=0),
            "1 <= min_accumulation_steps <= max_accumulation_steps, got 1 and 0",
        ),
        (plans(max_items=0), "expected 1 <= min_items <= max_items, got 1 and 0"),
        (plans(max_items="8"), "expected 1 <= min_items <= max_items, got 1 and '8'"),
        (plans(assumes=("luck",)), "assumption must be one of"),
        (
            plans(assumes="whole-windows"),
            "assumes must be a tuple of names such as ('whole-windows',)",
        ),
        (problems(min_layers=0), "expected 1 <= min_layers <= max_layers, got 0 and 5"),
        (problems(min_layers=6), "expected 1 <= min_layers <= max_layers, got 6 and 5"),
        (problems(assumes=("luck",)), "assumption must be one of"),
        (
            cases(dtype="int8"),
            "dtype must be one of float64, float32, bfloat16, float16; got 'int8'",
        ),
        (cases(device="tpu"), "device must be one of cpu, cuda; got 'tpu'"),
        (cases(optimizer="sdg"), "optimizer must be one of sgd"),
        (cases(assumes=("luck",)), "assumption must be one of"),
        (cases(assumes=("no-layer:luck",)), "KIND must be one of "),
        (
            cases(assumes=tuple(f"no-layer:{k}" for k in LAYERS if k != "readout")),
            "no model is left to draw",
        ),
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


# What drawn cases shrink to: the smallest problem and plan that still meet a condition.


SMALLEST = Case(
    ProblemSpec(
        Input("vector", size=1),
        (Layer("linear", bias=False, features=1),),
        Loss("mse", reduction="mean"),
    ),
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
    return _smallest(
        cases(plan=st.just(Plan((1,), 1))), lambda case: condition(case.problem), start
    ).problem


def test_everything_shrinks_to_the_smallest_case():
    assert _smallest(cases(), lambda case: True) == SMALLEST
    assert _smallest(cases(), lambda case: case.plan.epochs == 2) == SMALLEST.replace(
        plan=Plan((1,), 1, 2)
    )


@pytest.mark.parametrize(
    ("condition", "plan"),
    [
        (lambda p: p.epochs == 2, Plan((1,), 1, 2)),
        (lambda p: p.has_short_window, Plan((1,), 2)),
        (lambda p: len(p.windows) == 2, Plan((1, 1), 1)),
        (lambda p: p.accumulation_steps >= 3 and not p.has_short_window, Plan((1, 1, 1), 3)),
        (
            lambda p: p.has_short_window and len(p.windows) == 2 and p.epochs > 1,
            Plan((1, 1, 1), 2, 2),
        ),
        (lambda p: max(p.micro_batches) >= 3, Plan((3,), 1)),
        (lambda p: p.total_items >= 5 and len(p.micro_batches) == 1, Plan((5,), 1)),
    ],
)
def test_plans_shrink(condition, plan):
    drawn = cases(problem=st.just(SMALLEST.problem), plan=plans())
    assert _smallest(drawn, lambda case: condition(case.plan)).plan == plan


def test_masks_shrink():
    loss = Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    )
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


@pytest.mark.parametrize("kind", ["cross_entropy", "bce_with_logits"])
def test_a_loss_shrinks_to_the_smallest_model_that_it_takes(kind):
    def is_smallest(small):
        simplest = loss_definition(small.loss).variants(output_signal(small))[0]
        return len(small.layers) == 1 and small.loss == Loss(kind, **simplest, reduction="mean")

    assert any(
        is_smallest(_smallest_problem(lambda problem: problem.loss.kind == kind, start))
        for start in range(STARTS)
    )


# Numbered cases: distinct, the same for the same seed, and shrunk where one fails.


class _RefusedError(Exception):
    pass


def test_another_seed_draws_other_cases_and_more_examples_begin_with_the_same():
    few, more, other = (
        draw_cases(cases(), examples=n, seed_value=s) for n, s in ((20, 0), (40, 0), (20, 1))
    )
    assert more[:20] == few
    assert not set(few) & set(other)


def test_no_case_is_drawn_twice_and_a_strategy_may_run_out():
    plan = st.sampled_from((Plan((1,), 1), Plan((2,), 1)))
    found = draw_cases(st.builds(Case, st.just(SMALLEST.problem), plan), examples=50, seed_value=0)
    assert sorted(case.plan.total_items for case in found) == [1, 2]


def test_a_strategy_is_read_once_however_often_its_cases_are_judged():
    read: list[int] = []

    @st.composite
    def counted(draw):
        read.append(1)
        return draw(cases())

    kept, anew = counted(), [draw_cases(cases(), examples=6, seed_value=s) for s in (0, 1)]
    assert draw_cases(kept, examples=4, seed_value=0) == anew[0][:4]
    assert len(read) == 4
    assert draw_cases(kept, examples=6, seed_value=0) == anew[0]
    assert len(read) == 6
    assert draw_cases(kept, examples=6, seed_value=1) == anew[1]
    assert len(read) == 12


def test_case_that_is_refused_is_shrunk_and_its_exception_raised():
    tried: list[Case] = []

    def refuse_two_windows(case: Case) -> None:
        tried.append(case)
        if len(case.plan.windows) >= 2:
            raise _RefusedError

    with pytest.raises(_RefusedError):
        run_on_cases(refuse_two_windows, cases(), examples=50, seed_value=0)
    smallest = min((c for c in tried if len(c.plan.windows) >= 2), key=lambda c: len(repr(c)))
    assert smallest.replace(plan=Plan((1, 1), 1)) == Case(SMALLEST.problem, Plan((1, 1), 1))
    assert smallest.plan.total_items == 2


def test_exception_that_does_not_come_again_is_raised_all_the_same():
    tried: list[Case] = []

    def refuse_the_third(case: Case) -> None:
        tried.append(case)
        if len(tried) == 3:
            raise _RefusedError

    with pytest.raises(_RefusedError):
        run_on_cases(refuse_the_third, cases(), examples=50, seed_value=0)
    assert tried[2] in tried[3:]


def test_cases_are_prepared_in_order_some_time_before_they_are_judged():
    events: list[tuple[str, Case]] = []
    run_on_cases(
        lambda case: events.append(("judge", case)),
        cases(),
        examples=20,
        seed_value=0,
        prepare=lambda case: events.append(("prepare", case)),
    )
    prepared, judged = (
        [case for what, case in events if what == name] for name in ("prepare", "judge")
    )
    assert judged == draw_cases(cases(), examples=20, seed_value=0)
    assert prepared == judged[1:]
    places = {event: place for place, event in enumerate(events)}
    ahead = [
        sum(e == "judge" for e, _ in events[places["prepare", c] : places["judge", c]])
        for c in prepared
    ]
    # one case ahead after the first was judged, two after the second
    assert ahead[:4] == [0, 1, 1, 2]
    assert max(ahead) == AHEAD


def test_a_judge_finds_the_same_global_random_numbers_at_every_case_and_changes_none():
    numbers: set[tuple[float, float]] = set()
    random.seed(5)
    expected = random.Random(5).random()
    run_on_cases(
        lambda case: numbers.add((random.random(), np.random.rand())),
        cases(),
        examples=3,
        seed_value=0,
    )
    assert len(numbers) == 1
    assert random.random() == expected


def test_seed_of_pytest_neither_changes_the_cases_nor_keeps_them_from_shrinking(monkeypatch):
    """`pytest --hypothesis-seed` replaces the seeds of tests and hides the database."""
    import hypothesis.core

    before = draw_cases(cases(), examples=5, seed_value=0)
    monkeypatch.setattr(hypothesis.core, "global_force_seed", 7)
    assert draw_cases(cases(), examples=5, seed_value=0) == before
    test_case_that_is_refused_is_shrunk_and_its_exception_raised()


@pytest.mark.full
def test_a_share_of_cases_moves_the_parameters_in_several_steps():
    drawn = draw_cases(cases(optimizer=SOMETIMES_MOVING), examples=400, seed_value=0)
    moving = [case for case in drawn if case.optimizer]
    assert {case.optimizer for case in moving} == {"normalized"}
    assert 0.05 < len(moving) / len(drawn) < 0.15
    assert all(case.plan.steps in MOVING_STEPS for case in moving)
    assert not any(case.optimizer for case in draw_cases(cases(), examples=100, seed_value=0))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_torch_adds_no_sparse_gradients_in_half_precision_so_none_are_drawn():
    places = torch.tensor([[0, 2]])
    for dtype in (torch.float16, torch.bfloat16):
        # the gradient of an embedding whose output is transposed, as before a convolution
        gradient = torch.sparse_coo_tensor(places, torch.ones(3, 2, dtype=dtype).t(), (4, 3))
        with pytest.raises(NotImplementedError, match=r"add_out_sparse_cpu|cadd_sparse"):
            gradient + gradient
        drawn = draw_cases(
            cases(dtype=str(dtype).removeprefix("torch.")), examples=150, seed_value=0
        )
        assert not any("sparse=True" in repr(case) for case in drawn)
    assert any(
        "sparse=True" in repr(case) for case in draw_cases(cases(), examples=150, seed_value=0)
    )


# What cases reached is counted by hand on small ones.


TWO_FEATURES = Layer("linear", features=2, bias=False)


def _splits(plan: Plan) -> set[str]:
    reach = CaseCoverage()
    reach.note(Case("model.py:PROBLEM", plan))
    return {name for name, count in reach.to_json()["splits"].items() if count}


def test_every_split_is_told_from_its_opposite():
    assert _splits(Plan((2, 2), 2)) == set()
    assert _splits(Plan((2, 3), 2)) == {"unequal micro-batches"}
    assert _splits(Plan((2, 3), 1)) == {"several windows", "no accumulation (K = 1)"}
    assert _splits(Plan((1, 1), 2, 2)) == {"a micro-batch of one item", "several epochs"}
    assert _splits(Plan((2, 2, 2), 2)) == {"a short last window", "several windows"}
    assert _splits(Plan((2,), 2)) == {
        "a short last window",
        "an epoch shorter than accumulation_steps",
    }
    assert _splits(Plan((2, 2), 2, 1, (1,))) == {"a micro-batch without valid targets"}
    assert _splits(Plan((2,) * 5, 5)) == {"5 or more micro-batches in a window"}


def test_what_was_never_reached_is_shown_as_nought():
    assert CaseCoverage().to_json()["splits"] == dict.fromkeys(SPLITS, 0)


def test_layers_inside_others_count_and_each_case_counts_once():
    inner = Layer("residual", Layer("linear", features=3, bias=False), Layer("tanh"))
    problem = ProblemSpec(
        Input("vector", size=3), (inner, TWO_FEATURES), Loss("mse", reduction="sum")
    )
    reach = CaseCoverage()
    reach.note(Case(problem, Plan((2, 2), 2)))
    reach.note(
        Case(ProblemSpec(Input("vector", size=3), (TWO_FEATURES,), Loss("mse")), Plan((2, 2), 2))
    )
    found = reach.to_json()
    assert found["layers"] == {"linear": 2, "residual": 1, "tanh": 1}
    assert found["losses"] == {"mse, sum": 1, "mse, mean": 1}
    assert found["inputs"] == {"vector": 2}
