"""The accumulator is added to itself at every micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Add the whole accumulated gradient again before each backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(2)
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


BUG = Bug(
    number=28,
    name="doubling",
    citations=("Megatron-LM#6660",),
    mechanism="acc = 2 acc + g: the main gradient is added to the gradient it already contains.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/repeated-micro-batch"}),
)
