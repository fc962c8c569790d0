"""What cases reached is counted by hand on small ones."""

from __future__ import annotations

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.generation.coverage import SPLITS, CaseCoverage

LINEAR = Layer("linear", features=2, bias=False)


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


def test_what_was_never_reached_is_shown_as_nought():
    assert CaseCoverage().to_json()["splits"] == dict.fromkeys(SPLITS, 0)


def test_layers_inside_others_count_and_each_case_counts_once():
    inner = Layer("residual", Layer("linear", features=3, bias=False), Layer("tanh"))
    problem = ProblemSpec(Input("vector", size=3), (inner, LINEAR), Loss("mse", reduction="sum"))
    reach = CaseCoverage()
    reach.note(Case(problem, Plan((2, 2), 2)))
    reach.note(Case(ProblemSpec(Input("vector", size=3), (LINEAR,), Loss("mse")), Plan((2, 2), 2)))
    found = reach.to_json()
    assert found["layers"] == {"linear": 2, "residual": 1, "tanh": 1}
    assert found["losses"] == {"mse, sum": 1, "mse, mean": 1}
    assert found["inputs"] == {"vector": 2}
