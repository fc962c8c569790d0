"""What a violation says of a wrong gradient: its kind, its place, its size, and a name where one is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, missing_gradient
from gradcheck_suite.execution.instance import user_instance
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.numerics.comparison import Comparison
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.schema.results import ItemWeight
from gradcheck_suite.verification.gradient_violation import gradient_violation

CASE = Case("own", Plan((1, 3, 2, 2), 2))
KNOWN = Diagnosis("a-name", "a sentence", ("a detail",), (ItemWeight("0", 1, 1.0, 2.0),))


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


def _window(case=CASE, parameters=None):
    """Return a window whose right gradient is the mean of its items, 5 to 8, for each element."""
    problem = Problem(
        lambda seed: _Model(),
        lambda items, seed: torch.arange(1.0, items + 1)[:, None],
        lambda model, batch: (model.a.sum() + model.b.sum()) * batch.mean(),
    )
    return Reference(user_instance(case, problem)).window(1, parameters)


def _violation(gradients, *, window=None, known=KNOWN, alike=False):
    window = window or _window()
    assert window.expected.tolist() == [6.5, 6.5, 6.5]
    seen = window.reference.flat(gradients)
    comparison = Comparison(window.reference.layout, window.expected, seen, np.array([0.5, 0.25, 1.0]))
    return gradient_violation(window, Evaluation(gradients, {}), comparison, 1, None, known, alike=alike), comparison


def _gradients(a, b):
    return {"a": None if a is None else torch.tensor(a), "b": None if b is None else torch.tensor(b)}


def test_a_wrong_gradient_is_of_its_worst_element():
    found, comparison = _violation(_gradients([7.5, 8.5], [9.5]))
    assert (found.kind, found.diagnosis, found.explanation) == ("gradient", "a-name", "a sentence")
    assert (found.case, found.parameter, found.epoch, found.window) == (CASE, "a", 1, 1)
    assert (found.error, found.allowed) == (2.0, 0.25)
    assert (found.details, found.weights) == (KNOWN.details, KNOWN.weights)
    assert not found.moved
    assert found.evidence.missing == frozenset()
    assert found.evidence.observed is comparison.observed
    found, _ = _violation(_gradients([6.5, 6.5], [9.5]))
    assert (found.parameter, found.error, found.allowed) == ("b", 3.0, 1.0)


def test_a_gradient_that_is_none_is_missing_whatever_is_known():
    found, _ = _violation(_gradients(None, [9.5]))
    missing = missing_gradient("a")
    assert (found.kind, found.diagnosis, found.explanation) == ("none-pattern", missing.name, missing.sentence)
    assert found.parameter == "a"
    assert found.evidence.missing == {"a"}
    # beside a worse one that is there, it is noted
    found, _ = _violation(_gradients([7.5, 80.5], None))
    assert (found.kind, found.diagnosis) == ("gradient", "a-name")
    assert found.evidence.missing == {"b"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_alone_is_not_finite_is_a_kind_of_its_own(value):
    found, _ = _violation(_gradients([6.5, value], [6.5]))
    assert (found.kind, found.diagnosis) == ("non-finite", "a-name")
    assert found.explanation == "a.grad is not finite at the step, the right gradient is; a sentence"
    # another parameter's has no part in it
    found, _ = _violation(_gradients([6.5, 6.5], [value]))
    assert found.parameter == "b"
    assert found.kind == "non-finite"


@pytest.mark.parametrize("right", [math.nan, math.inf])
def test_where_the_right_gradient_is_not_finite_either_it_is_a_wrong_one(right):
    window = _window()
    window.torch[:2] = right
    comparison = Comparison(window.reference.layout, window.expected, np.full(3, -math.inf), np.ones(3))
    evaluation = Evaluation(_gradients([-math.inf, -math.inf], [-math.inf]), {})
    found = gradient_violation(window, evaluation, comparison, 0, None, KNOWN, alike=False)
    assert found.kind == "gradient"
    window.torch[1] = 6.5
    assert gradient_violation(window, evaluation, comparison, 0, None, KNOWN, alike=False).kind == "gradient"


@pytest.mark.parametrize(
    ("dtype", "moved", "name"),
    [("float64", False, "wrong-scale"), ("float32", False, ""), ("float64", True, "")],
)
def test_without_further_runs_a_name_is_read_off_a_float64_gradient_at_the_start(dtype, moved, name):
    parameters = {"a": torch.full((2,), 2.0, dtype=torch.float64)} if moved else None
    window = _window(CASE.replace(dtype=dtype), parameters)
    found, _ = _violation(_gradients([13.0, 13.0], [13.0]), window=window, known=None)
    assert found.diagnosis == name
    assert bool(found.explanation) is bool(name)
    assert found.moved is moved


def test_what_no_weights_explain_has_no_name_without_further_runs():
    found, _ = _violation(_gradients([7.5, 8.5], [9.5]), known=None)
    assert (found.diagnosis, found.explanation) == ("", "")
