"""A clamp in a tensor hook runs per contribution, not on the sum."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Clamp each parameter's gradient in a hook, as recipes against exploding gradients do."""
    handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in run.model.parameters() if _is_clampable(p)]
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
    for handle in handles:
        handle.remove()


def _is_clampable(p: object) -> bool:
    return bool(getattr(p, "requires_grad", False)) and getattr(p, "ndim", 0) != 2


BUG = Bug(
    number=40,
    name="tensor-hook-clip",
    citations=("discuss.pytorch.org: register_hook clip under accumulation",),
    mechanism="A tensor hook sees each contribution by itself: a clamp at c lets the sum be K times c.",
    needs="an element above the clamp",
    loop=loop,
    wanted=frozenset({"gradient/not-linear"}),
)
