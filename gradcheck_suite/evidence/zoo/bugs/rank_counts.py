"""Bugs between ranks: gradients that are added up, of losses that were divided by the wrong number."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradcheck_suite.evidence.zoo.bug import bug_of_two_ranks
from gradcheck_suite.evidence.zoo.rank_loops import train_over_ranks
from gradcheck_suite.loops.ranks.all_reduce import add_up_gradients
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import BUSY_RANKS, DENSE_GRADIENTS, MEAN_REDUCTION, TrainingRun

SCALED = frozenset({"gradient/wrong-scale"})
ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS, MEAN_REDUCTION)


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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
    least_micro_batches=4,
)
