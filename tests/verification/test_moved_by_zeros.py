"""Zeros that let an optimizer move a parameter which its window does not reach are explained; they are no violation."""

from __future__ import annotations

import pytest

from gradcheck_suite import Problem, verify
from gradcheck_suite.cli.verdict_text import result_lines
from gradcheck_suite.evidence.zoo import BUGS
from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.schema.options import VerifyOptions
from gradcheck_suite.verification.check import check
from properties.routed import routed_instance

PARAMETER = "experts.1.weight"


def explained(loop, optimizer, routes=((0, 1), (0,))):
    """Return what is said of windows of one micro-batch, each with an item for every entry of its route."""
    instance = routed_instance([list(route) for route in routes], 1)
    verdict = check(MODES[loop], instance.case.replace(optimizer=optimizer), problem=instance.users_problem)
    assert verdict.holds
    return verdict.moved_by_zeros, instance


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "nesterov", "adam", "rmsprop", "asgd", "adamax"])
def test_zeros_that_move_a_missed_parameter_are_explained(optimizer):
    said, _ = explained("zero_", optimizer)
    assert f"no item of window 1 reaches {PARAMETER}. Its gradient was zeros and not None" in said
    assert f"With None, as after set_to_none=True, {optimizer} leaves" in said


def test_weight_decay_is_told_from_momentum():
    # the flat buffer has zeros from the start, so that nothing but the decay can move a parameter never reached
    said, instance = explained("flat_buffer", "adamw", ((0,), (0,)))
    value = instance.model().get_parameter(PARAMETER).abs().max().item()
    decay = 0.01 * 0.1 * value
    assert f"no item of window 0 reaches {PARAMETER}" in said
    assert f"moved it by {decay:.2g}: {decay:.2g} by weight decay. With None" in said


def test_momentum_is_told_from_weight_decay():
    said, _ = explained("zero_", "nesterov")
    assert "by weight decay" not in said
    assert "by the rest of its rule (momentum, averages)" in said


@pytest.mark.parametrize(
    ("loop", "optimizer", "routes"),
    [
        ("set_to_none", "adamw", ((0, 1), (0,))),  # a release
        ("grad_none", "momentum", ((0, 1), (0,))),
        ("zero_", "sgd", ((0, 1), (0,))),  # a step on zeros changes nothing
        ("zero_", "adagrad", ((0, 1), (0,))),  # nothing but the step count
        ("zero_", "adamw", ((0, 1), (1, 0))),  # every window reaches the expert
        ("zero_", "adamw", ((0,), (0,))),  # no window reaches it, so that zeroing leaves None
        ("zero_", None, ((0, 1), (0,))),
        ("zero_", "normalized", ((0, 1), (0,))),  # drawn by chance, where nobody asked for an optimizer
    ],
)
def test_nothing_is_said_where_none_would_do_the_same(loop, optimizer, routes):
    assert explained(loop, optimizer, routes)[0] is None


@pytest.mark.full
def test_a_verification_says_it_once():
    bug = BUGS["missing-from-the-last"]
    assert isinstance(bug.problem, Problem)
    options = VerifyOptions(examples=20, optimizer="adamw", second_opinion_s=0)
    result = verify(MODES["zero_"], options, problem=bug.problem)
    assert result.holds
    assert result.moving_cases >= 1
    found = result.to_json()["moved_by_zeros"]
    assert found == {"cases": result.moving_cases, "explanation": result.moved_by_zeros}
    (line,) = [text for text in result_lines(result, None, options, 4, judged=True) if "zeros moved" in text]
    assert result.moved_by_zeros in line
