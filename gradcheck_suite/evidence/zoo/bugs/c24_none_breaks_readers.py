"""Code that reads every gradient meets None after a release."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Log the norm of every parameter's gradient before the step."""
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=True)
        backward_window(run, window)
        norms = [p.grad.norm() for p in run.model.parameters()]  # type: ignore[union-attr]
        run.optimizer.step()
        del norms


BUG = Bug(
    number=24,
    name="none-breaks-readers",
    citations=("pytorch/examples#1172", "trl#1422"),
    mechanism="A parameter that no item of the window reached has no gradient after a release; reading it raises.",
    needs="a parameter that no item reaches, or a frozen one",
    loop=loop,
    wanted=frozenset({"raised/raised"}),
)
