"""Another model's backward leaves gradients here that nobody clears."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def loop(run: TrainingRun) -> None:
    """Train as a discriminator: the generator's turn sends a loss through this model and clears its own model alone."""
    for window in windows(run):
        run.optimizer.zero_grad()
        # the generator's turn: its loss passes through this model and fills its gradients as well
        run.loss(run.model, window[0]).backward()
        backward_window(run, window)
        run.optimizer.step()


BUG = Bug(
    number=19,
    name="cross-model-residue",
    citations=("Lightning#557", "Lightning#591"),
    mechanism="The generator's backward fills the discriminator's gradients too, and only the generator's are cleared.",
    needs="nothing special",
    loop=loop,
    wanted=frozenset({"gradient/repeated-micro-batch", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)
