"""What people read about a case and a violation."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

import gradcheck_suite
from gradcheck_suite.catalogue.description import (
    describe_case,
    describe_plan,
    describe_problem,
    example_text,
    with_case_described,
)
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import error_text
from tests.wording import rows_text

SPEC = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (
        Layer("embedding", features=2, padding_idx=True, sparse=False),
        Layer("residual", Layer("tanh")),
        Layer("linear", features=4, bias=True),
    ),
    Loss("mse", reduction="sum"),
)


USERS = Case("model.py:P", Plan((1, 2, 3), 2), dtype="float32", seed=5, optimizer="adam")
FOUND = Violation(
    "gradient",
    "mean-of-means",
    "why it is so. Fix: what to do",
    USERS,
    "0.weight",
    1,
    1,
    0.25,
    1e-12,
    ("a", "b"),
)
PLANS = (
    Plan((1,), 1),
    Plan((1, 3, 2, 2, 4), 2, epochs=2),
    Plan((2, 3), 5),
    Plan((2, 3, 4), 3, masked=(1,)),
    Plan((1,) * 33, 33),
    Plan((1,) * 257, 3),
    Plan((*(1, 1, 2) * 30, 4), 3),
    Plan((2, 2, 1, 1), 2),
)


def test_cases_and_violations_are_described(golden):
    rows = {repr(plan)[:80]: "\n".join(describe_plan(plan)) for plan in PLANS}
    rows["a problem"] = "\n".join(f"{place:<6} {text}" for place, text in describe_problem(SPEC))
    rows["a case of a user's problem"] = "\n".join(describe_case(USERS))
    rows["a violation"] = "\n".join(with_case_described(FOUND).words)
    rows["a violation with a kind alone"] = "\n".join(
        with_case_described(Violation("raised", "raised", "why", USERS)).words
    )
    golden("descriptions", rows_text(rows))


@given(st.floats(1e-3, 1e3), st.floats(1e-16, 1e-12), st.floats(0.9, 1.1))
def test_a_bound_far_below_the_error_keeps_no_digit_that_rounding_decides(
    error, allowed, elsewhere
):
    """A bound that differs by a tenth on another processor moves the last printed digit by one or
    two at most.
    """
    shown, other = (
        float(error_text(error, bound).split()[-1]) for bound in (allowed, allowed * elsewhere)
    )
    assert shown == float(f"{allowed:.0e}")
    assert abs(shown - other) <= 2 * 10.0 ** math.floor(math.log10(max(shown, other)))


@given(st.floats(1e-12, 1e3), st.floats(1, 100))
def test_a_bound_near_the_error_has_three_digits(allowed, ratio):
    assert float(error_text(ratio * allowed, allowed).split()[-1]) == float(f"{allowed:.2e}")


def test_the_example_evaluates_to_the_case():
    case = Case(SPEC, Plan((1, 2), 2))
    names = {name: getattr(gradcheck_suite, name) for name in gradcheck_suite.__all__}
    assert eval(example_text(case).removeprefix("@example"), names) == case
