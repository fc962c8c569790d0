"""Numbered cases: distinct, the same for the same seed whatever modules are loaded, and shrunk where one fails."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, plans
from gradcheck_suite.strategies.cases import MOVING_STEPS, SOMETIMES_MOVING
from gradcheck_suite.strategies.coverage import CaseCoverage
from gradcheck_suite.strategies.drawing import AHEAD, draw_cases, run_on_cases

DRAWING_LINEAR = ProblemSpec(
    Input("vector", size=1), (Layer("linear", bias=False, features=1),), Loss("mse", reduction="mean")
)
ODD = range(3_000_000_019, 3_001_000_019, 1000)
"""As many as Hypothesis takes of one module, so that they are not lost among those of the tests that are loaded."""


class _RefusedError(Exception):
    pass


def _by_hypothesis(number: int) -> list[Case]:
    found: list[Case] = []

    @seed(number)
    @settings(max_examples=300, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(problem="model.py:PROBLEM"))
    def note(case: Case) -> None:
        found.append(case)

    note()
    return found


def test_constants_of_a_users_module_change_no_case(tmp_path):
    """Hypothesis mixes constants of the loaded modules into what it draws; no drawn case of the suite has one."""
    before = draw_cases(cases(), examples=100, seed_value=3)
    path = tmp_path / "module_with_odd_constants.py"
    path.write_text("".join(f"A{i} = {number}\n" for i, number in enumerate(ODD)))
    spec = importlib.util.spec_from_file_location("module_with_odd_constants", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.import_module("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
        after = draw_cases(cases(), examples=100, seed_value=3)
        with_constants = _by_hypothesis(3)
    assert any(case.seed in ODD for case in with_constants), "the module's constants are not in Hypothesis's pool"
    assert after == before
    assert not any(case.seed in ODD for case in after)


def test_another_seed_draws_other_cases_and_more_examples_begin_with_the_same():
    few, more, other = (draw_cases(cases(), examples=n, seed_value=s) for n, s in ((20, 0), (40, 0), (20, 1)))
    assert more[:20] == few
    assert not set(few) & set(other)


def test_no_case_is_drawn_twice_and_a_strategy_may_run_out():
    plan = st.sampled_from((Plan((1,), 1), Plan((2,), 1)))
    found = draw_cases(st.builds(Case, st.just(DRAWING_LINEAR), plan), examples=50, seed_value=0)
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
    assert smallest.replace(plan=Plan((1, 1), 1)) == Case(DRAWING_LINEAR, Plan((1, 1), 1))
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
    prepared, judged = ([case for what, case in events if what == name] for name in ("prepare", "judge"))
    assert judged == draw_cases(cases(), examples=20, seed_value=0)
    assert prepared == judged[1:]
    places = {event: place for place, event in enumerate(events)}
    ahead = [sum(e == "judge" for e, _ in events[places["prepare", c] : places["judge", c]]) for c in prepared]
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


def test_wrong_argument_is_reported_at_once():
    with pytest.raises(InvalidArgument, match="dtype must be one of"):
        draw_cases(cases(dtype="int8"), examples=5, seed_value=0)


def test_a_share_of_cases_moves_the_parameters_in_several_steps():
    drawn = draw_cases(cases(optimizer=SOMETIMES_MOVING), examples=400, seed_value=0)
    moving = [case for case in drawn if case.optimizer]
    assert {case.optimizer for case in moving} == {"normalized"}
    assert 0.05 < len(moving) / len(drawn) < 0.15
    assert all(case.plan.steps in MOVING_STEPS for case in moving)
    assert not any(case.optimizer for case in draw_cases(cases(), examples=100, seed_value=0))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_torch_adds_no_sparse_gradients_in_half_precision_so_none_are_drawn():
    places = torch.tensor([[0, 2]])
    for dtype in (torch.float16, torch.bfloat16):
        # the gradient of an embedding whose output is transposed, as before a convolution
        gradient = torch.sparse_coo_tensor(places, torch.ones(3, 2, dtype=dtype).t(), (4, 3))
        with pytest.raises(NotImplementedError, match=r"add_out_sparse_cpu|cadd_sparse"):
            gradient + gradient
        drawn = draw_cases(cases(dtype=str(dtype).removeprefix("torch.")), examples=150, seed_value=0)
        assert not any("sparse=True" in repr(case) for case in drawn)
    assert any("sparse=True" in repr(case) for case in draw_cases(cases(), examples=150, seed_value=0))


# What cases reached is counted by hand on small ones.


COVERAGE_LINEAR = Layer("linear", features=2, bias=False)


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
    assert _splits(Plan((2,), 2)) == {"a short last window", "an epoch shorter than accumulation_steps"}
    assert _splits(Plan((2, 2), 2, 1, (1,))) == {"a micro-batch without valid targets"}
    assert _splits(Plan((2,) * 5, 5)) == {"5 or more micro-batches in a window"}


def test_layers_inside_others_count_and_each_case_counts_once():
    inner = Layer("residual", Layer("linear", features=3, bias=False), Layer("tanh"))
    problem = ProblemSpec(Input("vector", size=3), (inner, COVERAGE_LINEAR), Loss("mse", reduction="sum"))
    reach = CaseCoverage()
    reach.note(Case(problem, Plan((2, 2), 2)))
    reach.note(Case(ProblemSpec(Input("vector", size=3), (COVERAGE_LINEAR,), Loss("mse")), Plan((2, 2), 2)))
    found = reach.to_json()
    assert found["layers"] == {"linear": 2, "residual": 1, "tanh": 1}
    assert found["losses"] == {"mse, sum": 1, "mse, mean": 1}
    assert found["inputs"] == {"vector": 2}


# What holds of every plan that the strategy draws.


@given(plans(maskable=True))
def test_windows_hold_every_item_once_in_order(plan):
    members = [j for window in plan.windows for j in window]
    assert members == list(range(len(plan.micro_batches)))
    items = [i for w in range(len(plan.windows)) for i in plan.window_items(w)]
    assert items == list(range(sum(plan.micro_batches)))
    assert all(len(window) == plan.accumulation_steps for window in plan.windows[:-1])
