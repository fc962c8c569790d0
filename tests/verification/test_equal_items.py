"""Equal micro-batches, items and losses are drawn: a loop that takes one for a duplicate is found."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, verify
from gradcheck_suite.loops.reset_modes import part_of_window, plain, window_count
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.verification.check import check
from tests.training import accumulating, trains

SPEC = ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse"))


def _without_duplicates(key):
    """Return a loop that leaves out a micro-batch whose key, given the run and it, is that of the
    one before.
    """

    def backward(run, window):
        total, previous = window_count(run, window), None
        for batch in window:
            if previous is None or not torch.equal(key(run, batch), previous):
                previous = key(run, batch)
                part_of_window(run, batch, total).backward()

    return trains(backward=backward)


an_equal_loss_skipped = _without_duplicates(lambda run, batch: run.loss(run.model, batch).detach())
an_equal_micro_batch_skipped = _without_duplicates(lambda run, batch: next(iter(batch.values())))


@accumulating
def equal_items_merged(run, window):
    total = window_count(run, window)
    for batch in window:
        kept = torch.unique(batch["x"], dim=0, return_inverse=True)[1].unique()
        merged = {name: t[: len(kept)] for name, t in batch.items()}
        (part_of_window(run, batch, total) * 0 + part_of_window(run, merged, total)).backward()


FAULTS = [an_equal_loss_skipped, an_equal_micro_batch_skipped, equal_items_merged]


@pytest.mark.parametrize("distinct", [1, 2])
def test_items_repeat_in_turn_and_the_loop_is_held_to_all_of_them(distinct):
    case = Case(SPEC, Plan((2, 2, 4), 2), distinct_items=distinct)
    first, second, last = (batch["x"] for batch in generated_instance(case).run().loader)
    assert torch.equal(first, second)
    assert torch.equal(last, torch.cat([first, first]))
    assert len(first.unique(dim=0)) == distinct
    assert check(plain, case).holds
    for loop in FAULTS:
        assert check(loop, case).violation.kind == "gradient"
        assert check(loop, case.replace(distinct_items=0)).holds


@pytest.mark.parametrize("loop", [FAULTS[0], pytest.param(FAULTS[1], marks=pytest.mark.full)])
def test_a_loop_that_skips_what_is_equal_is_found_among_drawn_cases(
    loop, only_linear, without_second_opinion
):
    result = verify(loop, quiet=True)
    assert result.violation.case.distinct_items
    assert result.violation.diagnosis == "dropped-micro-batch"
    assert "takes what is equal to another for a duplicate" in result.violation.explanation


@pytest.mark.share(4)
def test_clipping_by_norm_is_not_taken_for_a_loop_that_skips_what_is_equal():
    """Where items repeat the norm is above 1, and where they differ below it.

    The weights of one case fit by chance.
    """

    def clips(run):
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)

    loop = trains(before=lambda run, step: clips(run))
    result = verify(loop, assumes=("equal-micro-batches",), examples=30, quiet=True)
    assert result.violation.diagnosis == "clipped", result.violation.explanation
