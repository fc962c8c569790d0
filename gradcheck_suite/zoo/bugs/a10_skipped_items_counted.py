"""A micro-batch that contributes nothing stays in the divisor."""

from __future__ import annotations

from gradcheck_suite.contract import TrainingRun
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.zoo.record import Bug


def loop(run: TrainingRun) -> None:
    """Divide by the items, those whose targets are ignored among them."""
    for window in windows(run):
        run.optimizer.zero_grad()
        items = sum(len(batch["x"]) for batch in window)
        ignored = sum(len(batch["x"]) for batch in window if not run.count(batch))
        total = sum(run.count(batch) for batch in window)
        for batch in window:
            loss = run.loss(run.model, batch)
            if run.reduction == "mean":
                loss = loss * run.count(batch) / total * ((items - ignored) / items)
            loss.backward()
        run.optimizer.step()


BUG = Bug(
    number=10,
    name="skipped-items-counted",
    citations=("prime-rl#1961",),
    mechanism="A rollout batch in which nothing is trained on contributes no gradient and is counted all the same.",
    needs="a mean, and a micro-batch whose targets are all ignored",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale", "gradient/wrong-count"}),
)
