"""What people read about a case and a violation."""

from __future__ import annotations

import math

import pytest
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
from gradcheck_suite.core.text import error_text, split_text

SPEC = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (
        Layer("embedding", features=2, padding_idx=True, sparse=False),
        Layer("residual", Layer("tanh")),
        Layer("linear", features=4, bias=True),
    ),
    Loss("mse", reduction="sum"),
)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan((1, 3, 2, 2, 4), 2), "[1 3 | 2 2 | 4]"),
        (Plan((1,), 1), "[1]"),
        (Plan((2, 3), 5), "[2 3]"),
        (Plan((2, 3, 4), 3, masked=(1,)), "[2 3* 4]"),
    ],
)
def test_the_split(plan, text):
    assert split_text(plan) == text


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        (
            Plan((1, 3, 2, 2, 4), 2, epochs=2),
            ["[1 3 | 2 2 | 4] items; accumulation_steps = 2, 3 windows, the last one short; 2 epochs"],
        ),
        (Plan((1, 2), 2), ["[1 2] items; accumulation_steps = 2, 1 window; 1 epoch"]),
        (
            Plan((1, 2), 2, masked=(0,)),
            [
                "[1* 2] items; accumulation_steps = 2, 1 window; 1 epoch",
                "* a micro-batch without valid targets: all of them are ignored",
            ],
        ),
    ],
)
def test_a_plan(plan, lines):
    assert describe_plan(plan) == lines


def test_a_problem_layer_by_layer_with_its_shapes():
    assert [(place, " ".join(text.split())) for place, text in describe_problem(SPEC)] == [
        ("input", "tokens of 5 ids (n, 3), padded length=3, padded=True, vocabulary=5"),
        ("0", "embedding (n, 3) -> (n, 3, 2) features=2, padding_idx=True, sparse=False"),
        ("1", "residual (n, 3, 2) -> (n, 3, 2)"),
        ("1.0", "tanh (n, 3, 2) -> (n, 3, 2)"),
        ("2", "linear (n, 3, 2) -> (n, 3, 4) bias=True, features=4"),
        ("loss", "mse (n, 3, 4) -> scalar, reduction sum"),
    ]


def test_a_users_problem():
    assert describe_problem("model.py:P") == [("problem", "model.py:P (a user's)")]


def test_a_case():
    lines = describe_case(Case("model.py:P", Plan((1, 2), 2), dtype="float32", seed=5, optimizer="adam"))
    assert lines == [
        "problem  model.py:P (a user's)",
        "split    [1 2] items; accumulation_steps = 2, 1 window; 1 epoch",
        "run      float32 on cpu, seed 5, optimizer adam",
    ]


def test_a_violation():
    case = Case("model.py:P", Plan((1, 2, 3), 2))
    violation = Violation("gradient", "mean-of-means", "why it is so", case, "0.weight", 1, 1, 0.25, 1e-12, ("a", "b"))
    assert with_case_described(violation).words == [
        "gradient: mean-of-means",
        "why it is so",
        "window     1 of epoch 1: micro-batches [2]",
        "parameter  0.weight",
        "error      0.25, where rounding allows 1e-12",
        "a",
        "b",
        "the case",
        *(f"  {line}" for line in describe_case(case)),
        example_text(case),
    ]


@given(st.floats(1e-3, 1e3), st.floats(1e-16, 1e-12), st.floats(0.9, 1.1))
def test_a_bound_far_below_the_error_keeps_no_digit_that_rounding_decides(error, allowed, elsewhere):
    """A bound that differs by a tenth on another processor moves the last printed digit by one or two at most."""
    shown, other = (float(error_text(error, bound).split()[-1]) for bound in (allowed, allowed * elsewhere))
    assert shown == float(f"{allowed:.0e}")
    assert abs(shown - other) <= 2 * 10.0 ** math.floor(math.log10(max(shown, other)))


@given(st.floats(1e-12, 1e3), st.floats(1, 100))
def test_a_bound_near_the_error_has_three_digits(allowed, ratio):
    assert float(error_text(ratio * allowed, allowed).split()[-1]) == float(f"{allowed:.2e}")


def test_a_violation_of_nothing_but_a_kind():
    case = Case("model.py:P", Plan((1,), 1))
    lines = with_case_described(Violation("raised", "raised", "it failed", case)).words
    assert lines[:3] == ["raised", "it failed", "the case"]


def test_the_example_evaluates_to_the_case():
    case = Case(SPEC, Plan((1, 2), 2))
    names = {name: getattr(gradcheck_suite, name) for name in gradcheck_suite.__all__}
    assert eval(example_text(case).removeprefix("@example"), names) == case


def test_a_long_plan_is_written_by_its_runs():
    assert split_text(Plan((1,) * 33, 33)) == "[33 x 1]"
    assert split_text(Plan((1,) * 257, 3)) == "[85 x (1 1 1) | 1 1]"
    assert split_text(Plan((*(1, 1, 2) * 30, 4), 3)) == "[30 x (1 1 2) | 4]"
    assert split_text(Plan((2, 2, 1, 1), 2)) == "[2 2 | 1 1]"
