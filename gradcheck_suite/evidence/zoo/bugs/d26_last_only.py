"""Only the window's last gradient is kept."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Copy each gradient into the main one, in place of adding it."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        main = {}
        for batch in window:
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    main[p] = p.grad
                    p.grad = None
        for p, gradient in main.items():
            p.grad = gradient
        run.optimizer.step()


BUG = Bug(
    number=26,
    name="last-only",
    citations=("open-instruct#1498",),
    mechanism="The main gradient is assigned where it should be added to.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/reset-inside-window"}),
)
