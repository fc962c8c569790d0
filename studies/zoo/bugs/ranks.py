"""Bugs that several ranks show: counts, data and reductions."""

# ruff: noqa: D403 - a mechanism is printed after the bug's name, and here begins in lower case

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.core.contract import (
    BUSY_RANKS,
    DENSE_GRADIENTS,
    MEAN_REDUCTION,
    Batch,
    TrainingRun,
)
from gradcheck_suite.loops.ranks import add_up_gradients
from gradcheck_suite.loops.reset_modes import (
    backward_window,
    over_ranks,
    part_of_window,
    window_count,
    windows,
)
from studies.zoo.bug import (
    bug,
    fill_missing,
    gradients_of,
    reduce_each,
    reported,
    train_over_ranks,
    window_losses,
)

rank_bug = partial(bug, ranks=2, assumes=(BUSY_RANKS, DENSE_GRADIENTS))
count_bug = partial(bug, ranks=2, assumes=(BUSY_RANKS, DENSE_GRADIENTS, MEAN_REDUCTION))
HANG = "raised/deadlock"
ALONE = "gradient/not-reduced"

# Gradients that are added up, of losses that were divided by the wrong number.


def _averaged(run: TrainingRun) -> None:
    add_up_gradients(run)
    for g in gradients_of(run).values():
        g.div_(run.world_size)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, 0)
    return tensor


@count_bug("gradient/mean-of-means", needs="ranks with different counts")
@reported("transformers#34242")
def mean_of_ranks_means(run: TrainingRun) -> None:
    """each rank divides by the targets of its own micro-batches, and the ranks' gradients are
    averaged.
    """
    train_over_ranks(run, lambda own, total: own, reduce=_averaged)


@count_bug("gradient/mean-of-means", needs="two ranks")
def local_count(run: TrainingRun) -> None:
    """each rank divides by the targets of its own micro-batches, and the ranks' gradients are added
    up.
    """
    train_over_ranks(run, lambda own, total: own)


@count_bug("gradient/wrong-scale", needs="two ranks")
@reported("transformers#37474")
def count_gathered_gradient_averaged(run: TrainingRun) -> None:
    """the losses are divided by the targets of all ranks, and the wrapper averages over the ranks
    once more.
    """
    train_over_ranks(run, reduce=_averaged)


@count_bug("gradient/wrong-scale", needs="two ranks")
def multiplied_by_world_size(run: TrainingRun) -> None:
    """the loss is multiplied by the number of ranks to undo an average that nobody takes."""
    train_over_ranks(run, factor=run.world_size)


@count_bug("gradient/wrong-scale", needs="two ranks")
def divided_by_world_size_twice(run: TrainingRun) -> None:
    """the loss is divided by the number of ranks, and so are the gradients."""
    train_over_ranks(run, reduce=_averaged, factor=1 / run.world_size)


@count_bug("gradient/wrong-scale", needs="another number of ranks than 8")
def world_size_hard_coded(run: TrainingRun) -> None:
    """the average over ranks is undone with a constant 8, whatever the number of ranks."""
    train_over_ranks(run, reduce=_averaged, factor=8)


@count_bug("gradient/wrong-scale", needs="two ranks")
def rank_0_count_broadcast(run: TrainingRun) -> None:
    """all ranks divide by the targets of rank 0."""
    train_over_ranks(run, lambda own, total: _broadcast(own))


@count_bug("gradient/wrong-scale", needs="ranks with different counts")
def rank_0_count_times_world_size(run: TrainingRun) -> None:
    """all ranks divide by the targets of rank 0 times the number of ranks."""
    train_over_ranks(run, lambda own, total: _broadcast(own) * run.world_size)


@count_bug("gradient/wrong-scale", needs="two ranks")
def sum_over_ranks_not_divided(run: TrainingRun) -> None:
    """the summed losses of all ranks are added up and not divided by the count."""
    train_over_ranks(run, lambda own, total: 1.0)


@count_bug("gradient/wrong-scale", needs="two ranks")
def gradient_all_reduced_twice(run: TrainingRun) -> None:
    """the gradients are added up over ranks twice before the step."""

    def twice(run: TrainingRun) -> None:
        add_up_gradients(run)
        add_up_gradients(run)

    train_over_ranks(run, reduce=twice)


@count_bug("gradient/mean-of-means", needs="micro-batches with different counts")
def micro_batches_of_ranks_averaged(run: TrainingRun) -> None:
    """every micro-batch's mean has the same weight, over micro-batches and ranks."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss / len(window) if run.reduction == "mean" else loss).backward()
        _averaged(run)
        run.optimizer.step()


@count_bug("gradient/wrong-scale", needs="two windows with different counts", least_micro_batches=4)
def previous_window_count_of_ranks(run: TrainingRun) -> None:
    """the count that was added up over ranks arrives one window too late."""
    before: torch.Tensor | None = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total if before is None else before).backward()
        before = total
        add_up_gradients(run)
        run.optimizer.step()


# Which micro-batches a rank trains on, when it steps, and ranks that wait for each other.


def _agreed(count: int, on: dist.ReduceOp.RedOpType) -> int:
    """Return the greatest or smallest of all ranks' counts."""
    found = torch.tensor(count)
    dist.all_reduce(found, on)
    return int(found)


def _train(run: TrainingRun, micro_batches: list[Batch]) -> None:
    """Train on one epoch's micro-batches of this rank, of which every rank has as many."""
    for start in range(0, len(micro_batches), run.accumulation_steps):
        run.optimizer.zero_grad()
        backward_window(run, micro_batches[start : start + run.accumulation_steps])
        add_up_gradients(run)
        run.optimizer.step()


@rank_bug(
    "gradient/other-window, gradient/repeated-micro-batch, gradient/wrong-scale,"
    " gradient/unrecognised-weights, gradient/mean-of-means",
    needs="a rank with fewer micro-batches",
    least_micro_batches=4,
    assumes=(DENSE_GRADIENTS,),
)
def sampler_pads_by_repeated_items(run: TrainingRun) -> None:
    """a sampler repeats items so that every rank has as many, and the repeated ones count twice."""
    for _ in range(run.epochs):
        micro_batches = list(run.loader)
        missing = _agreed(len(micro_batches), dist.ReduceOp.MAX) - len(micro_batches)
        _train(run, micro_batches + [micro_batches[i % len(micro_batches)] for i in range(missing)])


@rank_bug(
    "gradient/dropped-micro-batch, gradient/first-only, gradient/first-only or dropped-micro-batch,"
    " step-count/dropped-window",
    needs="a rank with fewer micro-batches",
)
def uneven_tail_dropped(run: TrainingRun) -> None:
    """the micro-batches that one rank has more than another are left out."""
    for _ in range(run.epochs):
        _train(run, list(islice(run.loader, _agreed(len(run.loader), dist.ReduceOp.MIN))))


@rank_bug(
    HANG,
    needs="a rank without a micro-batch in a window",
    least_micro_batches=4,
    assumes=(DENSE_GRADIENTS,),
)
def idle_rank_skips_the_all_reduce(run: TrainingRun) -> None:
    """a rank that has no micro-batch left does not take part in the all-reduce that the others wait
    in.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        if window:
            backward_window(run, window)
            add_up_gradients(run)
        run.optimizer.step()


@rank_bug(HANG, needs="two ranks")
def rank_skips_its_all_reduce(run: TrainingRun) -> None:
    """rank 1 leaves out the all-reduce, and the others wait for it."""

    def reduce(run: TrainingRun) -> None:
        if run.rank != 1:
            add_up_gradients(run)

    train_over_ranks(run, reduce=reduce)


@rank_bug(HANG, needs="accumulation steps of two", least_micro_batches=4)
def ranks_at_different_steps(run: TrainingRun) -> None:
    """the ranks' counters of micro-batches differ by one, so they step at different ones."""
    for _ in range(run.epochs):
        run.optimizer.zero_grad()
        for i, batch in enumerate(run.loader, 1):
            count = over_ranks(run, run.count(batch).clone())
            part_of_window(run, batch, count).backward()
            if (i - run.rank) % run.accumulation_steps == 0 or i == len(run.loader):
                add_up_gradients(run)
                run.optimizer.step()
                run.optimizer.zero_grad()


@rank_bug(
    HANG,
    needs="a rank without a micro-batch, or one that does not reach a parameter",
    least_micro_batches=4,
    assumes=(DENSE_GRADIENTS,),
)
def unreached_parameters_not_reduced(run: TrainingRun) -> None:
    """a rank whose items do not reach a parameter leaves out its all-reduce, which the others
    enter.
    """
    train_over_ranks(run, reduce=lambda run: reduce_each(gradients_of(run).values()))


@rank_bug("gradient/stale-window", needs="two windows", least_micro_batches=4)
def reset_on_rank_0_alone(run: TrainingRun) -> None:
    """only the main process resets its gradients, so the others' sums go into the next window."""
    for window in windows(run):
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()
        if run.rank == 0:
            run.optimizer.zero_grad()


# Gradients that are added up too early, too late, in part or not at all.


def _train_in_ddp(run: TrainingRun, synchronised: Callable[[int], bool]) -> None:
    """Train in DistributedDataParallel, which averages over ranks in the n-th backward of a window
    that is chosen.
    """
    wrapped = DistributedDataParallel(run.model, find_unused_parameters=True)
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window, 1):
            wrapped.require_backward_grad_sync = synchronised(j)  # what `no_sync` switches off
            loss = run.loss(wrapped, batch) * run.world_size
            (loss if run.reduction == "sum" else loss * run.count(batch) / total).backward()
        run.optimizer.step()


@rank_bug(ALONE, needs="two ranks")
def never_reduced(run: TrainingRun) -> None:
    """no rank adds up its gradients with the others."""
    train_over_ranks(run, reduce=lambda run: None)


@rank_bug(ALONE, needs="two ranks")
def no_sync_left_on_at_the_step(run: TrainingRun) -> None:
    """the last backward of a window runs under no_sync, so no rank has the others' gradients at the
    step.
    """
    _train_in_ddp(run, synchronised=lambda j: False)


@rank_bug(f"{ALONE}, {HANG}", needs="a short last window")
def no_sync_in_the_short_window(run: TrainingRun) -> None:
    """gradients are synchronised after every K micro-batches, and not at the end of the loader."""
    _train_in_ddp(run, synchronised=lambda j: j == run.accumulation_steps)


@rank_bug(ALONE, needs="two ranks")
def buckets_reduced_before_the_last_backward(run: TrainingRun) -> None:
    """the gradients are added up over ranks while the last micro-batch's backward is still to come."""
    for window in windows(run):
        run.optimizer.zero_grad()
        *others, last = window_losses(run, window)
        for loss in others:
            loss.backward()
        add_up_gradients(run)
        last.backward()
        run.optimizer.step()


@rank_bug(ALONE, needs="a window of two micro-batches of one rank", least_micro_batches=3)
def first_micro_batch_only_reduced(run: TrainingRun) -> None:
    """only the first micro-batch's gradient is added up over ranks."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for j, loss in enumerate(window_losses(run, window)):
            loss.backward()
            if j == 0:
                add_up_gradients(run)
        run.optimizer.step()


@rank_bug(
    "gradient/rescaled-accumulator, gradient/wrong-scale",
    needs="accumulation steps of two",
    least_micro_batches=4,
)
def running_sum_reduced_each_micro_batch(run: TrainingRun) -> None:
    """the running sum is added up over ranks at every micro-batch, so early ones are counted again."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j in range(run.accumulation_steps):
            if j < len(window):
                part_of_window(run, window[j], total).backward()
            add_up_gradients(run)
        run.optimizer.step()


@rank_bug(ALONE, needs="two ranks")
def one_parameter_not_reduced(run: TrainingRun) -> None:
    """the last parameter is in no bucket, so its gradient is the rank's own."""
    train_over_ranks(run, reduce=lambda run: reduce_each(fill_missing(run)[:-1]))


@rank_bug("gradient/not-reduced", needs="two ranks")
def gradient_broadcast_from_rank_0(run: TrainingRun) -> None:
    """all ranks step with the gradients of rank 0, and the others' are lost."""

    def broadcast(run: TrainingRun) -> None:
        for gradient in fill_missing(run):
            dist.broadcast(gradient, 0)

    train_over_ranks(run, reduce=broadcast)


@rank_bug("gradient/low-precision", needs="a gradient that bfloat16 does not hold")
def gradient_reduced_in_bfloat16(run: TrainingRun) -> None:
    """gradients are rounded to bfloat16 before they are added up over ranks."""

    def reduce(run: TrainingRun) -> None:
        for gradient in fill_missing(run):
            half = gradient.to(torch.bfloat16)
            dist.all_reduce(half)
            gradient.copy_(half)

    train_over_ranks(run, reduce=reduce)


@rank_bug(ALONE, needs="two windows", least_micro_batches=4)
def stale_bucket_view_after_set_to_none(run: TrainingRun) -> None:
    """gradients are views of buckets until zero_grad sets them to None.

    The buckets are reduced all the same.
    """
    buckets = fill_missing(run)
    for window in windows(run):
        backward_window(run, window)
        reduce_each(buckets)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
