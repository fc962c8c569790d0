"""Each rank divides by its own count, and the ranks' gradients are averaged."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

RANKS = 2


def loop(run: TrainingRun) -> None:
    """Deal the window's micro-batches to two ranks; each normalises by its own targets, then they are averaged."""
    for window in windows(run):
        run.optimizer.zero_grad()
        ranks = [window[r::RANKS] for r in range(RANKS) if window[r::RANKS]]
        for mine in ranks:
            count = window_count(run, mine)
            for batch in mine:
                part = part_of_window(run, batch, count)
                (part / len(ranks) if run.reduction == "mean" else part).backward()
        run.optimizer.step()


BUG = Bug(
    number=6,
    name="rank-mean-of-means",
    citations=("transformers#34242", "transformers#34373", "transformers#39392"),
    mechanism="Every rank divides by its own number of targets and data parallelism averages over the ranks.",
    needs="unequal counts on two ranks",
    loop=loop,
    wanted=frozenset({"gradient/mean-of-means"}),
)
