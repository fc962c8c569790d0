"""The loss is divided by the count over all ranks, and then averaged over the ranks again."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

RANKS = 2


def loop(run: TrainingRun) -> None:
    """Normalise by all ranks' targets and leave data parallelism's mean over ranks in place."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part = part_of_window(run, batch, total)
            (part / RANKS if run.reduction == "mean" else part).backward()
        run.optimizer.step()


BUG = Bug(
    number=7,
    name="rank-over-correct",
    citations=("transformers#37474", "transformers#40799"),
    mechanism="The count is gathered over all ranks, but the gradients are averaged over the ranks as well.",
    needs="a mean",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
)
