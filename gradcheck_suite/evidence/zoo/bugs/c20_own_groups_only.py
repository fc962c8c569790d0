"""Only the optimizer's own parameters are reset; the others keep a stale sum."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Reset through an optimizer that was made before the last parameter was unfrozen."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    first = torch.optim.SGD(parameters[:-1], lr=0.1) if len(parameters) > 1 else None
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if first is not None:
            first.zero_grad()


BUG = Bug(
    number=20,
    name="own-groups-only",
    citations=("rslearn#217",),
    mechanism="`optimizer.zero_grad` touches its own groups alone; a parameter unfrozen later keeps its sum.",
    needs="2 windows or epochs",
    loop=loop,
    wanted=frozenset({"gradient/stale-window"}),
)
