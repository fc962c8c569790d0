"""A hook adds the running sum where it should add the new gradient."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Collect gradients in a post-accumulate hook, which sees what has accumulated so far."""
    collected: dict[torch.Tensor, torch.Tensor] = {}

    def collect(p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = p.grad.to_dense()
        collected[p] = collected[p] + gradient if p in collected else gradient.clone()

    handles = [p.register_post_accumulate_grad_hook(collect) for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        run.optimizer.zero_grad()
        collected.clear()
        backward_window(run, window)
        for p, gradient in collected.items():
            p.grad = gradient
        run.optimizer.step()
    for handle in handles:
        handle.remove()


BUG = Bug(
    number=32,
    name="hook-accumulates-the-sum",
    citations=("pytorch#187268",),
    mechanism="A post-accumulate hook reads p.grad, the running sum, and adds it to a sum of its own.",
    needs="2 micro-batches in a window",
    loop=loop,
    wanted=frozenset({"gradient/running-loss", "gradient/repeated-micro-batch"}),
)
