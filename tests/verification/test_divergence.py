"""From where on parameters have diverged: at each limit itself, and on both sides of it."""

from __future__ import annotations

import math

import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.execution.instance import user_instance
from gradcheck_suite.execution.observer import Evaluation, Observation
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.verification.divergence import ended_in_divergence, is_diverged, is_far, is_start

CASE = Case("own", Plan((1, 1), 1), optimizer="sgd")
"""Two steps."""
NEAR, FAR = {"a": torch.ones(2)}, {"a": torch.tensor([1.0, math.nan])}


def _evaluation(*values, dtype=torch.float64):
    return Evaluation({}, {"still": torch.zeros(2), "moved": torch.tensor(values, dtype=dtype)})


def _outcome(*after, **options):
    """Return a run whose steps leave these parameters, and which ends at the last of them."""
    taken = [Observation((Evaluation({}, {}),), parameters, [], []) for parameters in after]
    return Outcome(taken, NEAR, options.pop("parameters", after[-1] if after else NEAR), **options)


# products of four such numbers overflow
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1.157920892373162e77), (torch.float32, 4294967296.0)])
def test_parameters_have_diverged_where_products_of_four_overflow(dtype, limit):
    for factor, diverged in ((0.999, False), (1.001, True)):
        assert is_diverged(_evaluation(0.5, factor * limit, dtype=dtype)) is diverged
        assert is_diverged(_evaluation(0.5, -factor * limit, dtype=dtype)) is diverged
    assert is_diverged(_evaluation(0.5, math.nan, dtype=dtype))
    assert not is_diverged(_evaluation(0.5, 0.0, dtype=dtype))


def test_the_limit_itself_has_not_diverged():
    limit = torch.finfo(torch.float64).max ** 0.25
    assert not is_diverged(_evaluation(limit))
    assert is_diverged(_evaluation(math.nextafter(limit, math.inf)))


@pytest.mark.parametrize(
    ("after", "options", "ended"),
    [
        ([NEAR, FAR], {}, False),  # it took every step
        ([NEAR, FAR, FAR], {}, False),
        ([FAR], {}, True),
        ([FAR, NEAR], {"raised": "the loss is NaN"}, False),
        ([NEAR, FAR], {"raised": "the loss is NaN"}, True),
        ([FAR], {"raised": "the loss is NaN"}, True),
        ([NEAR], {"raised": "the loss is NaN", "parameters": FAR}, False),  # changed outside of a step
        ([FAR], {"raised": "the loop took longer than 5 s", "timed_out": True}, False),
        ([FAR], {"structure": "a is gone"}, False),
        ([], {"parameters": FAR}, True),
        ([], {"parameters": NEAR}, False),
    ],
)
def test_a_loop_ended_in_divergence_where_it_stopped_early_at_its_last_steps_parameters(after, options, ended):
    assert ended_in_divergence(CASE, _outcome(*after, **options)) is ended
    assert not ended_in_divergence(CASE.replace(optimizer=None), _outcome(*after, **options))


class _Model(torch.nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.still = torch.nn.Parameter(torch.zeros(2))
        self.moved = torch.nn.Parameter(torch.tensor(values))


def _reference(*values):
    problem = Problem(
        lambda seed: _Model(*values), lambda items, seed: torch.ones(items, 1), lambda model, batch: model.moved.sum()
    )
    return Reference(user_instance(CASE, problem))


@pytest.mark.parametrize(
    ("first", "limit"),
    [((0.5,), 16.0), ((1.0, -0.25), 16.0), ((2.0, 0.5), 32.0), ((-2.0, 0.5), 32.0)],  # 16 times the largest, and of 1
)
def test_a_parameter_is_far_from_16_times_the_largest_initial_one_on(first, limit):
    reference = _reference(*first)
    for sign in (1, -1):
        assert not is_far(reference, _evaluation(0.0, sign * limit))
        assert is_far(reference, _evaluation(0.0, sign * math.nextafter(limit, math.inf)))


def test_a_run_starts_at_the_tensors_that_it_was_given():
    outcome = _outcome()
    assert is_start(Evaluation({}, NEAR), outcome)
    assert not is_start(Evaluation({}, {"a": NEAR["a"].clone()}), outcome)
