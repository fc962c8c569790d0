"""Means are added up and never divided: the gradient is K times too large."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, TrainingRun


def loop(run: TrainingRun) -> None:
    """Send each micro-batch's mean through backward as it is."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.step()


BUG = Bug(
    number=2,
    name="no-divide",
    citations=("transformers#35438", "guided-diffusion#111", "LlamaFactory#7743", "Liger-Kernel#802"),
    mechanism="The division by the accumulation steps is left out; Adam hides it in the parameters.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)
