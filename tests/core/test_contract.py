"""The contract: what a loop states, what a user's problem provides, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from gradcheck_suite import Problem, TrainingRun, UsageError, training_loop, verify
from gradcheck_suite.core.contract import (
    assumptions_of,
    autocast_of,
    checked_assumptions,
    expect_within,
)
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.loops.reset_modes import MODES


def _loop(run):
    pass


def test_a_marked_loop_is_the_same_function_and_states_what_it_assumes():
    def loop(run):
        return "trained"

    marked = training_loop(assumes=("equal-micro-batches", "whole-windows"))(loop)
    assert marked is loop
    assert assumptions_of(marked) == {"equal-micro-batches", "whole-windows"}
    assert marked(None) == "trained"


def test_equal_batches_are_equal_within_a_window_too():
    assert checked_assumptions(("equal-batches",)) == {"equal-batches", "equal-micro-batches"}


def test_assumptions_that_exclude_each_other_are_refused():
    with pytest.raises(UsageError, match="mean-reduction and sum-reduction exclude each other"):
        training_loop(assumes=("mean-reduction", "sum-reduction"))


@pytest.mark.parametrize(
    ("assumed", "changes", "says"),
    [
        (
            "sum-reduction",
            {},
            "the loop assumes sum-reduction, but the reduction of problem is 'mean'",
        ),
        (
            "mean-reduction",
            {"reduction": "sum"},
            "assumes mean-reduction, but the reduction of problem is 'sum'",
        ),
        (
            "plain-counts",
            {"count": print},
            "assumes plain-counts, but problem has a count of its own",
        ),
    ],
)
def test_a_problem_outside_of_the_assumptions_is_refused(assumed, changes, says):
    inside = Problem(
        model=print,
        batch=print,
        loss=print,
        reduction=assumed.partition("-")[0].replace("plain", "mean"),
    )
    expect_within(inside, frozenset({assumed}))
    with pytest.raises(UsageError, match=says):
        expect_within(
            Problem(model=print, batch=print, loss=print, **changes), frozenset({assumed})
        )


def test_autocast_is_declared_in_a_dtype_that_autocast_has():
    assert autocast_of(training_loop(autocast="bfloat16")(_loop)) == "bfloat16"
    assert autocast_of(lambda run: None) is None
    with pytest.raises(
        UsageError, match="autocast must be one of bfloat16, float16; got 'float32'"
    ):
        training_loop(autocast="float32")


def test_an_unknown_assumption_is_refused_by_name():
    with pytest.raises(
        UsageError, match=r"assumption must be one of .*no-layer:KIND; got 'fast', 'tall'"
    ):
        training_loop(assumes=("tall", "whole-windows", "fast"))


def test_a_string_in_place_of_a_tuple_is_refused():
    with pytest.raises(
        UsageError, match=r"assumes must be a tuple of names such as \('whole-windows',\)"
    ):
        training_loop(assumes="whole-windows")


def test_a_run_is_frozen_and_carries_what_the_contract_fixes():
    fields = {field.name for field in dataclasses.fields(TrainingRun)}
    named = "model optimizer loader loss pairs criterion count accumulation_steps epochs reduction device dtype rank"
    assert fields == {*named.split(), "world_size"}
    run = TrainingRun(**dict.fromkeys(fields))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.epochs = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "Problem: model must be callable, got int"),
        ({"batch": []}, "Problem: batch must be callable, got list"),
        ({"loss": None}, "Problem: loss must be callable, got NoneType"),
        ({"count": 1}, "Problem: count must be callable or None, got int"),
        ({"reduction": "none"}, "Problem: reduction must be one of mean, sum, batch; got 'none'"),
        (
            {"batch": lambda items: None},
            "Problem: batch is called as batch(items, seed), and <lambda>(items) does not take these arguments",
        ),
    ],
)
def test_a_bad_problem_is_refused(change, message):
    with pytest.raises(UsageError) as error:
        Problem(**{"model": print, "batch": print, "loss": print, **change})
    assert str(error.value) == message


# Keyword arguments of `verify`.


@pytest.mark.full
def test_keyword_arguments_override_options():
    options = VerifyOptions(examples=3, assumes=("whole-windows",))
    results = [
        verify(MODES["zero_"], options, seed_value=7),
        verify(MODES["zero_"], options, examples=2),
    ]
    assert [result.cases for result in results] == [3, 2]
    assert {result.assumes for result in results} == {("whole-windows",)}


@pytest.mark.full
def test_the_seed_draws_the_cases():
    def drawn(**fields):
        verdicts = []
        verify(MODES["zero_"], VerifyOptions(examples=3), progress=verdicts.append, **fields)
        return [verdict.case for verdict in verdicts]

    assert drawn(seed=7) == drawn(seed_value=7) != drawn(seed=8)
