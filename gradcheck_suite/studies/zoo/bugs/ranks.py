"""Bugs that several ranks show: counts, data and reductions."""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.core.contract import BUSY_RANKS, DENSE_GRADIENTS, MEAN_REDUCTION, Batch, TrainingRun
from gradcheck_suite.loops.ranks import add_up_gradients
from gradcheck_suite.loops.reset_modes import backward_window, over_ranks, part_of_window, window_count, windows
from gradcheck_suite.studies.zoo.bug import bug_of_two_ranks, fill_missing, reduce_each, train_over_ranks

# Bugs between ranks: gradients that are added up, of losses that were divided by the wrong number.


SCALED = frozenset({"gradient/wrong-scale"})
RANK_COUNTS_ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS, MEAN_REDUCTION)


def _divide(run: TrainingRun, by: float) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.div_(by)


def _averaged(run: TrainingRun) -> None:
    add_up_gradients(run)
    _divide(run, run.world_size)


def mean_of_ranks_means(run: TrainingRun) -> None:
    """Divide by this rank's count, and average the gradients."""
    train_over_ranks(run, lambda own, total: own, reduce=_averaged)


MEAN_OF_RANKS_MEANS = bug_of_two_ranks(
    name="mean-of-ranks-means",
    citations=("transformers#34242",),
    mechanism="each rank divides by the targets of its own micro-batches, and the ranks' gradients are averaged.",
    needs="ranks with different counts",
    loop=mean_of_ranks_means,
    wanted=frozenset({"gradient/mean-of-means"}),
    assumes=RANK_COUNTS_ASSUMED,
)


def local_count(run: TrainingRun) -> None:
    """Divide by this rank's count, and add up the gradients."""
    train_over_ranks(run, lambda own, total: own)


LOCAL_COUNT = bug_of_two_ranks(
    name="local-count",
    mechanism="each rank divides by the targets of its own micro-batches, and the ranks' gradients are added up.",
    needs="two ranks",
    loop=local_count,
    wanted=frozenset({"gradient/local-count"}),
    assumes=RANK_COUNTS_ASSUMED,
)


def count_gathered_gradient_averaged(run: TrainingRun) -> None:
    """Divide by all ranks' count, and average the gradients, as a wrapper does by itself."""
    train_over_ranks(run, reduce=_averaged)


COUNT_GATHERED = bug_of_two_ranks(
    name="count-gathered-gradient-averaged",
    citations=("transformers#37474",),
    mechanism="the losses are divided by the targets of all ranks, and the wrapper averages over the ranks once more.",
    needs="two ranks",
    loop=count_gathered_gradient_averaged,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def multiplied_by_world(run: TrainingRun) -> None:
    """Multiply each loss by the number of ranks, for an average over ranks that is a sum here."""
    train_over_ranks(run, factor=run.world_size)


MULTIPLIED = bug_of_two_ranks(
    name="multiplied-by-world-size",
    mechanism="the loss is multiplied by the number of ranks to undo an average that nobody takes.",
    needs="two ranks",
    loop=multiplied_by_world,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def divided_twice(run: TrainingRun) -> None:
    """Average the gradients, and divide each loss by the number of ranks as well."""
    train_over_ranks(run, reduce=_averaged, factor=1 / run.world_size)


DIVIDED_TWICE = bug_of_two_ranks(
    name="divided-by-world-size-twice",
    mechanism="the loss is divided by the number of ranks, and so are the gradients.",
    needs="two ranks",
    loop=divided_twice,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)

RANKS_PER_NODE = 8


def world_size_hard_coded(run: TrainingRun) -> None:
    """Average over ranks, and undo that with the number of GPUs that a node has."""
    train_over_ranks(run, reduce=_averaged, factor=RANKS_PER_NODE)


HARD_CODED = bug_of_two_ranks(
    name="world-size-hard-coded",
    mechanism="the average over ranks is undone with a constant 8, whatever the number of ranks.",
    needs="another number of ranks than 8",
    loop=world_size_hard_coded,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def first_ranks_count(run: TrainingRun) -> None:
    """Divide by rank 0's count, which it broadcasts."""

    def share(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        dist.broadcast(own, 0)
        return own

    train_over_ranks(run, share)


FIRST_RANKS_COUNT = bug_of_two_ranks(
    name="rank-0-count-broadcast",
    mechanism="all ranks divide by the targets of rank 0.",
    needs="two ranks",
    loop=first_ranks_count,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def first_ranks_count_times_world(run: TrainingRun) -> None:
    """Divide by rank 0's count times the number of ranks, as if all ranks had as many targets."""

    def share(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        dist.broadcast(own, 0)
        return own * run.world_size

    train_over_ranks(run, share)


COUNT_TIMES_WORLD = bug_of_two_ranks(
    name="rank-0-count-times-world-size",
    mechanism="all ranks divide by the targets of rank 0 times the number of ranks.",
    needs="ranks with different counts",
    loop=first_ranks_count_times_world,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def sum_not_divided(run: TrainingRun) -> None:
    """Add up summed losses over micro-batches and ranks, and never divide."""
    train_over_ranks(run, lambda own, total: 1.0)


NOT_DIVIDED = bug_of_two_ranks(
    name="sum-over-ranks-not-divided",
    mechanism="the summed losses of all ranks are added up and not divided by the count.",
    needs="two ranks",
    loop=sum_not_divided,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def reduced_twice(run: TrainingRun) -> None:
    """Add up the gradients over ranks in a hook and once more by hand."""

    def twice(run: TrainingRun) -> None:
        add_up_gradients(run)
        add_up_gradients(run)

    train_over_ranks(run, reduce=twice)


REDUCED_TWICE = bug_of_two_ranks(
    name="gradient-all-reduced-twice",
    mechanism="the gradients are added up over ranks twice before the step.",
    needs="two ranks",
    loop=reduced_twice,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
)


def micro_batches_averaged(run: TrainingRun) -> None:
    """Divide each mean by the accumulation steps and average over ranks."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss / len(window) if run.reduction == "mean" else loss).backward()
        _averaged(run)
        run.optimizer.step()


MICRO_BATCHES_AVERAGED = bug_of_two_ranks(
    name="micro-batches-of-ranks-averaged",
    mechanism="every micro-batch's mean has the same weight, over micro-batches and ranks.",
    needs="micro-batches with different counts",
    loop=micro_batches_averaged,
    wanted=frozenset({"gradient/mean-of-means"}),
    assumes=RANK_COUNTS_ASSUMED,
)


def previous_count(run: TrainingRun) -> None:
    """Divide by the count that the ranks added up for the previous window."""
    before: torch.Tensor | None = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total if before is None else before).backward()
        before = total
        add_up_gradients(run)
        run.optimizer.step()


PREVIOUS_COUNT = bug_of_two_ranks(
    name="previous-window-count-of-ranks",
    mechanism="the count that was added up over ranks arrives one window too late.",
    needs="two windows with different counts",
    loop=previous_count,
    wanted=SCALED,
    assumes=RANK_COUNTS_ASSUMED,
    least_micro_batches=4,
)


# Bugs between ranks: which micro-batches a rank trains on, when it steps, and ranks that wait for each other.


RANK_DATA_ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS)
HANG = frozenset({"raised/deadlock", "raised/mismatched-collectives"})


def _longest(run: TrainingRun, *, shortest: bool = False) -> int:
    count = torch.tensor(len(run.loader))
    dist.all_reduce(count, dist.ReduceOp.MIN if shortest else dist.ReduceOp.MAX)
    return int(count)


def _train(run: TrainingRun, micro_batches: list[Batch]) -> None:
    """Train on one epoch's micro-batches of this rank, of which every rank has as many."""
    for start in range(0, len(micro_batches), run.accumulation_steps):
        window = micro_batches[start : start + run.accumulation_steps]
        run.optimizer.zero_grad()
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()


def padded_by_repeats(run: TrainingRun) -> None:
    """Repeat a rank's first micro-batches until every rank has as many, as DistributedSampler does."""
    for _ in range(run.epochs):
        micro_batches = list(run.loader)
        missing = _longest(run) - len(micro_batches)
        _train(run, micro_batches + [micro_batches[i % len(micro_batches)] for i in range(missing)])


PADDED = bug_of_two_ranks(
    name="sampler-pads-by-repeated-items",
    mechanism="a sampler repeats items so that every rank has as many, and the repeated ones count twice.",
    needs="a rank with fewer micro-batches",
    loop=padded_by_repeats,
    wanted=frozenset(
        {
            "gradient/repeated-micro-batch",
            "gradient/stale-window",
            "gradient/wrong-scale",
            "gradient/unrecognised-weights",
            "gradient/mean-of-means",
        }
    ),
    assumes=(DENSE_GRADIENTS,),
    least_micro_batches=4,
)


def uneven_tail_dropped(run: TrainingRun) -> None:
    """Leave out what one rank has more than another, as drop_last does."""
    for _ in range(run.epochs):
        _train(run, list(islice(run.loader, _longest(run, shortest=True))))


TAIL_DROPPED = bug_of_two_ranks(
    name="uneven-tail-dropped",
    mechanism="the micro-batches that one rank has more than another are left out.",
    needs="a rank with fewer micro-batches",
    loop=uneven_tail_dropped,
    wanted=frozenset(
        {
            "gradient/dropped-micro-batch",
            "gradient/first-only",
            "gradient/first-only or dropped-micro-batch",
            "step-count/dropped-window",
        }
    ),
    assumes=RANK_DATA_ASSUMED,
)


def idle_rank_skips(run: TrainingRun) -> None:
    """Enter the all-reduce only with a micro-batch in the window: a rank without one leaves the others waiting."""
    for window in windows(run):
        run.optimizer.zero_grad()
        if not window:
            run.optimizer.step()
            continue
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()


IDLE_SKIPS = bug_of_two_ranks(
    name="idle-rank-skips-the-all-reduce",
    mechanism="a rank that has no micro-batch left does not take part in the all-reduce that the others wait in.",
    needs="a rank without a micro-batch in a window",
    loop=idle_rank_skips,
    wanted=HANG,
    assumes=(DENSE_GRADIENTS,),
    least_micro_batches=4,
)


def rank_returns_early(run: TrainingRun) -> None:
    """Stop training on rank 1 before its last step, as an exception that is swallowed does."""

    def reduce(run: TrainingRun) -> None:
        if run.rank != 1:
            add_up_gradients(run)

    train_over_ranks(run, reduce=reduce)


RETURNS_EARLY = bug_of_two_ranks(
    name="rank-skips-its-all-reduce",
    mechanism="rank 1 leaves out the all-reduce, and the others wait for it.",
    needs="two ranks",
    loop=rank_returns_early,
    wanted=HANG,
    assumes=RANK_DATA_ASSUMED,
)


def ranks_at_different_steps(run: TrainingRun) -> None:
    """Step after one micro-batch more on rank 1, whose counter begins at another number."""
    late = run.rank
    for _ in range(run.epochs):
        run.optimizer.zero_grad()
        for i, batch in enumerate(run.loader):
            count = over_ranks(run, run.count(batch).clone())
            part_of_window(run, batch, count).backward()
            if (i + 1 - late) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                add_up_gradients(run)
                run.optimizer.step()
                run.optimizer.zero_grad()


DIFFERENT_STEPS = bug_of_two_ranks(
    name="ranks-at-different-steps",
    mechanism="the ranks' counters of micro-batches differ by one, so they step at different ones.",
    needs="accumulation steps of two",
    loop=ranks_at_different_steps,
    wanted=HANG,
    assumes=RANK_DATA_ASSUMED,
    least_micro_batches=4,
)


def reached_parameters_alone(run: TrainingRun) -> None:
    """Add up only the gradients that this rank has; ranks that reach other parameters meet in different ones."""

    def reduce(run: TrainingRun) -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)

    train_over_ranks(run, reduce=reduce)


REACHED_ALONE = bug_of_two_ranks(
    name="unreached-parameters-not-reduced",
    mechanism="a rank whose items do not reach a parameter leaves out its all-reduce, which the others enter.",
    needs="a rank without a micro-batch, or one that does not reach a parameter",
    loop=reached_parameters_alone,
    wanted=HANG,
    assumes=(DENSE_GRADIENTS,),
    least_micro_batches=4,
)


def reset_on_first_rank(run: TrainingRun) -> None:
    """Reset the gradients on rank 0 alone."""
    for window in windows(run):
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()
        if run.rank == 0:
            run.optimizer.zero_grad()


RESET_ON_FIRST = bug_of_two_ranks(
    name="reset-on-rank-0-alone",
    mechanism="only the main process resets its gradients, so the others' sums go into the next window.",
    needs="two windows",
    loop=reset_on_first_rank,
    wanted=frozenset({"gradient/stale-window"}),
    assumes=RANK_DATA_ASSUMED,
    least_micro_batches=4,
)


# Bugs between ranks: gradients that are added up too early, too late, in part or not at all.


RANK_DATA_ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS)
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
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
    assumes=RANK_DATA_ASSUMED,
    least_micro_batches=4,
)
