"""Parts of a gradient that cancel, to exactly zero in one order of summation and not in another, are no fault."""

import numpy as np
import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.loops import MODES
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF, summation_bound
from gradcheck_suite.numerics.comparison import Layout

LINEAR = Layer("linear", bias=False, features=1)
# the softmax of one feature is 1, so the last gradient is a sum of +1/N and -1/N, which the large batch adds up to 0
CANCELLING = Case(
    ProblemSpec(Input("vector", size=2), (LINEAR, Layer("softmax"), LINEAR, LINEAR), Loss("l1", reduction="mean")),
    Plan((1, 2, 3, 4, 1, 1, 1, 1, 1, 2, 2, 1, 2, 2, 3, 5), 4),
)


@pytest.mark.parametrize("name", ["zero_", "set_to_none"])
def test_parts_that_cancel_are_not_blamed(name):
    verdict = check(MODES[name], CANCELLING)
    assert verdict.violation is None
    assert verdict.finding is None


def test_a_wrong_weight_among_cancelling_parts_is_still_found():
    def off_by_a_millionth(run):
        for _ in range(run.epochs):
            batches = list(run.loader)
            for start in range(0, len(batches), run.accumulation_steps):
                window = batches[start : start + run.accumulation_steps]
                total = sum(run.count(batch) for batch in window)
                for j, batch in enumerate(window):
                    weight = 1 + 1e-6 * (j == 0)
                    (weight * run.loss(run.model, batch) * run.count(batch) / total).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

    assert check(off_by_a_millionth, CANCELLING).violation is not None


def test_the_bound_of_summation_holds_for_every_order_and_is_no_wider_than_it_must_be():
    rng = np.random.default_rng(0)
    parts = rng.choice([-0.1, 0.1], 64) * rng.uniform(0.5, 2, 64)
    layout = Layout(("w",), ((1,),))
    (allowed,) = summation_bound(np.array([np.abs(parts).sum()]), len(parts), layout)
    sums = [np.add.accumulate(rng.permutation(parts))[-1] for _ in range(200)]
    assert max(sums) - min(sums) <= allowed
    assert allowed <= 200 * UNIT_ROUNDOFF["float64"] * np.abs(parts).sum()
