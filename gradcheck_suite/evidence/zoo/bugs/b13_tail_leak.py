"""The short last window is neither stepped nor cleared, and joins the next epoch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Step and reset after whole windows alone."""
    for window in windows(run):
        backward_window(run, window)
        if len(window) == run.accumulation_steps:
            run.optimizer.step()
            run.optimizer.zero_grad()


BUG = Bug(
    number=13,
    name="tail-leak",
    citations=("transformers#22098", "AnimaLoraStudio#305"),
    mechanism="What is left of an epoch is neither stepped nor cleared, so it joins the next epoch's first window.",
    needs="a short last window; 2 epochs to leak",
    loop=loop,
    wanted=frozenset({"step-count/tail-leak"}),
)
