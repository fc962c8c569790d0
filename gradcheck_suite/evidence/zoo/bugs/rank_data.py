"""Bugs between ranks: which micro-batches a rank trains on, when it steps, and ranks that wait for each other."""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist

from gradcheck_suite.evidence.zoo.bug import bug_of_two_ranks
from gradcheck_suite.evidence.zoo.rank_loops import train_over_ranks
from gradcheck_suite.loops.ranks.all_reduce import add_up_gradients
from gradcheck_suite.loops.windows import backward_window, over_ranks, part_of_window, windows
from gradcheck_suite.schema.contract import BUSY_RANKS, DENSE_GRADIENTS, Batch, TrainingRun

ASSUMED = (BUSY_RANKS, DENSE_GRADIENTS)
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
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
    assumes=ASSUMED,
    least_micro_batches=4,
)
