"""Bugs between ranks: gradients that are added up too early, too late, in part or not at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.evidence.zoo.bug import bug_of_two_ranks
from gradcheck_suite.evidence.zoo.rank_loops import (
    fill_missing,
    reduce_each,
    train_over_ranks,
)
from gradcheck_suite.loops.ranks.all_reduce import add_up_gradients
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import BUSY_RANKS, DENSE_GRADIENTS, TrainingRun

ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS)
ALONE = frozenset({"gradient/not-reduced", "gradient/partly-reduced"})


def never_reduced(run: TrainingRun) -> None:
    """Train every rank by itself."""
    train_over_ranks(run, reduce=lambda run: None)


NEVER_REDUCED = bug_of_two_ranks(
    name="never-reduced",
    mechanism="no rank adds up its gradients with the others.",
    needs="two ranks",
    loop=never_reduced,
    wanted=ALONE,
    assumes=ASSUMED,
)


def no_sync_at_the_step(run: TrainingRun) -> None:
    """Leave no_sync on in the last backward of a window, because the flag is off by one."""
    wrapped = DistributedDataParallel(run.model, find_unused_parameters=True)
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            with wrapped.no_sync():
                loss = run.loss(wrapped, batch) * run.world_size
                (loss if run.reduction == "sum" else loss * run.count(batch) / total).backward()
        run.optimizer.step()


NO_SYNC = bug_of_two_ranks(
    name="no-sync-left-on-at-the-step",
    mechanism="the last backward of a window runs under no_sync, so no rank has the others' gradients at the step.",
    needs="two ranks",
    loop=no_sync_at_the_step,
    wanted=ALONE,
    assumes=ASSUMED,
)


def no_sync_in_the_short_window(run: TrainingRun) -> None:
    """Synchronise only after K micro-batches, so not in a short last window, which is stepped all the same."""
    wrapped = DistributedDataParallel(run.model, find_unused_parameters=True)
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            wrapped.require_backward_grad_sync = j == run.accumulation_steps - 1
            loss = run.loss(wrapped, batch) * run.world_size
            (loss if run.reduction == "sum" else loss * run.count(batch) / total).backward()
        run.optimizer.step()


NO_SYNC_SHORT = bug_of_two_ranks(
    name="no-sync-in-the-short-window",
    mechanism="gradients are synchronised after every K micro-batches, and not at the end of the loader.",
    needs="a short last window",
    loop=no_sync_in_the_short_window,
    wanted=ALONE | {"raised/deadlock", "raised/mismatched-collectives"},
    assumes=ASSUMED,
)


def reduced_before_the_last_backward(run: TrainingRun) -> None:
    """Add up the gradients before the last micro-batch's backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window[:-1]:
            part_of_window(run, batch, total).backward()
        add_up_gradients(run)
        part_of_window(run, window[-1], total).backward()
        run.optimizer.step()


REDUCED_EARLY = bug_of_two_ranks(
    name="buckets-reduced-before-the-last-backward",
    mechanism="the gradients are added up over ranks while the last micro-batch's backward is still to come.",
    needs="two ranks",
    loop=reduced_before_the_last_backward,
    wanted=ALONE,
    assumes=ASSUMED,
)


def first_micro_batch_reduced(run: TrainingRun) -> None:
    """Add up the gradients after the first micro-batch alone."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            part_of_window(run, batch, total).backward()
            if j == 0:
                add_up_gradients(run)
        run.optimizer.step()


FIRST_REDUCED = bug_of_two_ranks(
    name="first-micro-batch-only-reduced",
    mechanism="only the first micro-batch's gradient is added up over ranks.",
    needs="a window of two micro-batches of one rank",
    loop=first_micro_batch_reduced,
    wanted=ALONE,
    assumes=ASSUMED,
    least_micro_batches=3,
)


def reduced_in_place_each_time(run: TrainingRun) -> None:
    """Add up the running sum over ranks after every micro-batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j in range(run.accumulation_steps):
            if j < len(window):
                part_of_window(run, window[j], total).backward()
            add_up_gradients(run)
        run.optimizer.step()


IN_PLACE = bug_of_two_ranks(
    name="running-sum-reduced-each-micro-batch",
    mechanism="the running sum is added up over ranks at every micro-batch, so early ones are counted again.",
    needs="accumulation steps of two",
    loop=reduced_in_place_each_time,
    wanted=frozenset({"gradient/reduced-repeatedly", "gradient/wrong-scale", "gradient/rescaled-accumulator"}),
    assumes=ASSUMED,
    least_micro_batches=4,
)


def last_parameter_left_out(run: TrainingRun) -> None:
    """Add up all gradients but the last parameter's."""
    train_over_ranks(run, reduce=lambda run: reduce_each(fill_missing(run)[:-1]))


PARAMETER_LEFT_OUT = bug_of_two_ranks(
    name="one-parameter-not-reduced",
    mechanism="the last parameter is in no bucket, so its gradient is the rank's own.",
    needs="two ranks",
    loop=last_parameter_left_out,
    wanted=ALONE,
    assumes=ASSUMED,
)


def broadcast_from_first(run: TrainingRun) -> None:
    """Give all ranks the gradients of rank 0."""

    def broadcast(run: TrainingRun) -> None:
        for gradient in fill_missing(run):
            dist.broadcast(gradient, 0)

    train_over_ranks(run, reduce=broadcast)


BROADCAST = bug_of_two_ranks(
    name="gradient-broadcast-from-rank-0",
    mechanism="all ranks step with the gradients of rank 0, and the others' are lost.",
    needs="two ranks",
    loop=broadcast_from_first,
    wanted=frozenset({"gradient/dropped-rank"}),
    assumes=ASSUMED,
)


def reduced_in_bfloat16(run: TrainingRun) -> None:
    """Add up the gradients in bfloat16, to halve the traffic."""

    def reduce(run: TrainingRun) -> None:
        for gradient in fill_missing(run):
            half = gradient.to(torch.bfloat16)
            dist.all_reduce(half)
            gradient.copy_(half)

    train_over_ranks(run, reduce=reduce)


IN_BFLOAT16 = bug_of_two_ranks(
    name="gradient-reduced-in-bfloat16",
    mechanism="gradients are rounded to bfloat16 before they are added up over ranks.",
    needs="a gradient that bfloat16 does not hold",
    loop=reduced_in_bfloat16,
    wanted=frozenset({"gradient/rounded-weights", "gradient/rounded-gradient"}),
    assumes=ASSUMED,
)


def stale_bucket(run: TrainingRun) -> None:
    """Add up buckets whose views were the gradients until they were set to None."""
    views = {p: torch.zeros_like(p) for p in run.model.parameters() if p.requires_grad}
    for p, view in views.items():
        p.grad = view
    for window in windows(run):
        backward_window(run, window)
        reduce_each(views.values())
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)


STALE_BUCKET = bug_of_two_ranks(
    name="stale-bucket-view-after-set-to-none",
    mechanism="gradients are views of buckets until zero_grad sets them to None; the buckets are reduced all the same.",
    needs="two windows",
    loop=stale_bucket,
    wanted=ALONE,
    assumes=ASSUMED,
    least_micro_batches=4,
)
