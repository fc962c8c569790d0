"""Correct loops, written in many ways, are never reported as violated: 8 cases each, and 100 with
`--full`.

The properties check the built-in loops, real optimizers and lower precisions in every run.
"""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import training_loop, verify
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.reference import large_batch
from studies.calibration import (
    any_order,
    autograd_grad,
    float_shares,
    one_backward,
    scaled_and_back,
)

MANY = 100
LOOPS = []


@pytest.fixture(autouse=True)
def _keep_every_reference(monkeypatch):
    """All loops are judged on the same cases, so keep their references."""
    monkeypatch.setattr(large_batch, "MAX_REFERENCES", 2 * MANY)


def sound(loop):
    LOOPS.append(loop)
    return loop


# The place of the reset


@sound
def reset_before_the_step_that_is_not_the_first(run):
    """The order inside `accelerate.accumulate`: step, then zero_grad, at every window's end."""
    last = len(run.loader) - 1
    for _ in range(run.epochs):
        counts = [run.count(batch) for batch in run.loader]
        for i, batch in enumerate(run.loader):
            first = i - i % run.accumulation_steps
            loss = run.loss(run.model, batch)
            if run.reduction == "mean":
                loss = loss * counts[i] / sum(counts[first : first + run.accumulation_steps])
            loss.backward()
            if (i + 1) % run.accumulation_steps == 0 or i == last:
                run.optimizer.step()
                run.optimizer.zero_grad()


# How the window is counted


for written_for_the_campaign in (
    float_shares,
    one_backward,
    any_order,
    autograd_grad,
    scaled_and_back,
):
    sound(written_for_the_campaign)


@sound
def counted_with_a_stacked_tensor(run):
    for window in windows(run):
        counts = torch.stack([run.count(batch) for batch in window])
        shares = counts / counts.sum()
        for batch, share in zip(window, shares, strict=True):
            loss = run.loss(run.model, batch)
            (share * loss if run.reduction == "mean" else loss).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# Other things that a loop may do


@sound
def with_a_closure_that_was_called_already(run):
    for window in windows(run):

        def closure(window=window):
            run.optimizer.zero_grad()
            backward_window(run, window)

        closure()
        run.optimizer.step()


@sound
def with_a_forward_under_no_grad(run):
    for window in windows(run):
        with torch.no_grad():
            before = [run.loss(run.model, batch) for batch in window]
        backward_window(run, window)
        run.optimizer.step()
        run.optimizer.zero_grad()
        del before


@sound
@training_loop(assumes=("finite-gradients",))  # an infinite norm is above every limit
def with_a_clip_above_every_norm(run):
    for window in windows(run):
        backward_window(run, window)
        dense = [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        if dense:
            torch.nn.utils.clip_grad_norm_(dense, 1e200)
        run.optimizer.step()
        run.optimizer.zero_grad()


# the others are run with `--full`
EVERY_OTHER = pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=[pytest.mark.full] * (i % 2), id=loop.__name__)
        for i, loop in enumerate(LOOPS)
    ],
)


def _explanation(result) -> str:
    violation = result.violation
    return (
        ""
        if violation is None
        else f"{violation.explanation}\n{violation.case}\n" + "\n".join(violation.details)
    )


@pytest.mark.parametrize(
    "examples",
    [pytest.param(8, marks=pytest.mark.quick), pytest.param(MANY, marks=pytest.mark.full)],
)
@EVERY_OTHER
def test_a_sound_loop_is_not_reported(loop, examples):
    # the few are the first cases of every search with the default seed, whose programs other tests
    # compile too
    result = verify(loop, examples=examples, seed_value=examples // MANY)
    assert result.holds, _explanation(result)
    assert result.cases >= examples
    assert result.findings == ()
    assert result.skipped == {}
    assert result.worst_error_over_allowed < 1
