"""What a rank computes its losses from is recorded in its own process, and names its fault."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import torch.distributed as dist

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.judge.reruns import LoopRunner, run_recorded
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import (
    backward_window,
    part_of_window,
    window_count,
    windows,
)
from gradcheck_suite.run.instance import generated_instance
from studies.zoo.bug import train_over_ranks

pytestmark = pytest.mark.usefixtures("ranks")
MODED = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=2), Layer("train_scale", factor=2.0)),
    Loss("mse", reduction="mean"),
)
"""A model whose output depends on its mode."""
CASE = Case(MODED, Plan((1, 2, 3, 1), 2, ranks=(2, 2)), seed=2)


def in_eval_mode_on_rank_1(run):
    run.model.train(run.rank == 0)
    train_over_ranks(run)


def at_other_parameters_on_rank_1(run):
    p = next(run.model.parameters())
    for window in windows(run):
        run.optimizer.zero_grad()
        kept = p.detach().clone()
        if run.rank:
            p.data.mul_(0.5)
        backward_window(run, window)
        p.data.copy_(kept)
        for q in run.model.parameters():
            dist.all_reduce(q.grad)
        run.optimizer.step()


def _rewritten(run, *, late):
    """Train on batches of one memory, which is written again before or after the backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            loss = part_of_window(run, batch, total)
            if late and run.rank:
                batch["x"].data.mul_(2)
            loss.backward()
            if not late and run.rank:
                batch["x"].data.mul_(2)
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        run.optimizer.step()


def written_before_the_backward_on_rank_1(run):
    _rewritten(run, late=True)


def written_after_the_backward_on_rank_1(run):
    _rewritten(run, late=False)


def trains_on_the_data_of_rank_0(run):
    """Every rank takes rank 0's batches, and divides by what it has counted."""
    for _ in range(run.epochs):
        given = [list(run.loader)]
        dist.broadcast_object_list(given, src=0)
        batches = iter(given[0])
        while window := list(islice(batches, run.accumulation_steps)):
            run.optimizer.zero_grad()
            backward_window(run, window)
            for p in run.model.parameters():
                dist.all_reduce(p.grad)
            run.optimizer.step()


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("loop", "name", "says"),
    [
        (in_eval_mode_on_rank_1, "wrong-mode", "computed in eval mode, on rank 1, while"),
        (at_other_parameters_on_rank_1, "other-parameters", "computed, on rank 1, at other values"),
        (written_before_the_backward_on_rank_1, "changed-batch", "2 of the window's 4 losses, on"),
        (trains_on_the_data_of_rank_0, "not-reduced", "every rank trains on the same data"),
    ],
)
def test_a_fault_of_one_ranks_losses_has_its_name(loop, name, says):
    plan = CASE.plan if name != "not-reduced" else Plan((1, 2, 1, 3), 1, ranks=(2, 2))
    found = check(loop, CASE.replace(plan=plan)).violation
    assert found is not None
    assert found.diagnosis == name, found.explanation
    assert says in found.explanation


def test_a_batch_that_a_rank_writes_after_its_backward_is_no_fault():
    assert check(written_after_the_backward_on_rank_1, CASE).holds


@pytest.mark.parametrize("name", ["all_reduce/zero_grad", "ddp/zero_grad"])
def test_the_losses_of_all_ranks_are_recorded_with_their_steps(name):
    loop = RANK_LOOPS[name]
    runner = LoopRunner(loop, max_runs=1)
    recorded, outcome = run_recorded(runner, generated_instance(CASE))
    assert outcome is not None
    assert recorded.called
    assert recorded.members(0) == [[0, 2], [1, 3]] or recorded.members(0) == [[0, 1], [2, 3]]
    sent = recorded.sent(0)
    assert [len(calls) for calls in sent] == [2, 2]
    assert [{call.rank for call in calls} for calls in sent] == [{0}, {1}]
    names = {name for name, _ in generated_instance(CASE).model().named_parameters()}
    assert {*sent[1][0].parameters} == names
