"""The running sum itself is divided at every micro-batch."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Divide the accumulated gradient by accumulation_steps after each backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(run.accumulation_steps)
        run.optimizer.step()


BUG = Bug(
    number=25,
    name="rescaled-accumulator",
    citations=("torchtitan#1733", "Megatron-LM#3023"),
    mechanism="acc = (acc + g) / K each time: geometric weights.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/wrong-scale"}),
)
