"""How ranks make one gradient of theirs: sound ways hold, and faulty ones are named."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite import Plan
from gradcheck_suite.core.case import Case, Input, Layer, Loss, ProblemSpec, probe_case
from gradcheck_suite.judge.naming import diagnose
from gradcheck_suite.judge.weights import Weights
from gradcheck_suite.verification.check import check
from tests.verification import reductions

pytestmark = pytest.mark.usefixtures("ranks")
EVEN = Plan((1, 3, 3, 9), 2, 2, ranks=(2, 2))
UNEVEN = Plan((1, 3, 2, 2, 4), 2, 2, ranks=(3, 2))
SQUARE = ProblemSpec(Input("vector", size=4), (Layer("linear", bias=True, features=4),), Loss("mse", reduction="mean"))


@pytest.mark.full
@pytest.mark.parametrize(
    "loop",
    [
        reductions.reduce_scatter,
        reductions.all_to_all,
        reductions.waited_for,
        reductions.functional_all_reduce,
        reductions.point_to_point,
        reductions.reduce_and_broadcast,
    ],
)
def test_a_sound_way_to_add_up_gradients_holds(loop):
    verdict = check(loop, probe_case(UNEVEN))
    assert verdict.holds, verdict.violation


@pytest.mark.parametrize(
    ("loop", "case", "diagnosis", "text"),
    [
        (reductions.broadcast_alone, probe_case(EVEN), "dropped-rank", "no micro-batch of rank 1 is in the gradient"),
        (reductions.by_max, Case(SQUARE, EVEN), "wrong-operation", "is called with ReduceOp.MAX"),
        pytest.param(
            reductions.by_product,
            Case(SQUARE, EVEN),
            "wrong-operation",
            "is called with ReduceOp.PRODUCT",
            marks=pytest.mark.full,
        ),
        (reductions.to_rank_0_alone, probe_case(EVEN), "not-reduced", "look for a reduce in place of an all_reduce"),
        (reductions.negated_on_rank_1, probe_case(EVEN), "wrong-scale", "those of rank 1 weigh -1 times what they"),
        (reductions.in_other_order, Case(SQUARE, EVEN), "permuted-gradient", "go through the parameters in the same"),
        (reductions.moved_on_rank_1, Case(SQUARE, EVEN), "parameter-drift", "on rank 1 of 2: something other than"),
        (reductions.ends_with_the_shortest, probe_case(UNEVEN), "dropped-window", "as soon as one rank has no micro"),
        (reductions.synchronised_in_the_first_backward, probe_case(EVEN), "partly-reduced", "after the last backward"),
        (reductions.sharded_behind_the_optimizer, probe_case(EVEN), "changed-model", "run.optimizer.param_groups"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_faulty_way_is_named(loop, case, diagnosis, text):
    found = check(loop, case).violation
    assert found.diagnosis == diagnosis, found.explanation
    assert text in found.explanation


@pytest.mark.parametrize(
    ("observed", "alike", "name"),
    [
        ((1, 1, 1, 1, 0, 0), False, "dropped-rank"),
        ((1, 1, 1, 1, 0, 0), True, "dropped-rank"),
        ((1, 1, 0, 0, 0, 0), True, "dropped-rank"),
        ((1, 1, 0, 0, 0, 0), False, "not-reduced"),
        ((1, 1, 1, 0, 1, 0), False, "partly-reduced"),
        ((1, 1, 1, 0, 1, 0), True, "dropped-micro-batch"),
        ((1, 3, 1, 0, 1, 0), False, "partly-reduced"),
        ((1, 1, 1, 1, 0.5, 0.5), True, "wrong-scale"),
    ],
)
def test_the_weights_of_three_ranks_are_told_apart_by_whether_all_ranks_have_them(observed, alike, name):
    weights = Weights(
        observed=np.array(observed, float),
        counts=(1.0, 2.0, 3.0, 1.0, 2.0, 2.0),
        window=(0, 1, 2, 3, 4, 5),
        accumulation_steps=2,
        epoch=0,
        reduction="sum",
        owners=(0, 0, 1, 1, 2, 2),
        alike=alike,
    )
    assert diagnose(weights).name == name
