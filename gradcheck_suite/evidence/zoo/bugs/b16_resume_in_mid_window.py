"""A run that is resumed in mid-window has lost what was accumulated before."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Stop after the run's first micro-batch and resume: a checkpoint holds no gradients."""
    resumed = False
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            if not resumed and len(window) > 1:
                resumed = True
                for p in run.model.parameters():
                    p.grad = None
        run.optimizer.step()


BUG = Bug(
    number=16,
    name="resume-in-mid-window",
    citations=("transformers#22143", "mmcv#2093"),
    mechanism="A checkpoint in mid-window holds no gradients: the first step after a resume is under-accumulated.",
    needs="2 micro-batches in the first window",
    loop=loop,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
)
