"""Resets: gradients are never reset, reset too often, reset in part, or reset by an operation that keeps a NaN."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun


def no_reset(run: TrainingRun) -> None:
    """Send every micro-batch backward and step, without a reset."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


NO_RESET = Bug(
    number=17,
    name="no-reset",
    citations=("discuss.pytorch.org: zero_grad forgotten",),
    mechanism="No reset at all: every window's gradient contains all earlier ones.",
    needs="2 windows, or 2 epochs",
    loop=no_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def reset_per_micro_batch(run: TrainingRun) -> None:
    """Reset before every micro-batch."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


RESET_PER_MICRO_BATCH = Bug(
    number=18,
    name="reset-per-micro-batch",
    citations=("RAE#67", "openWakeWord#316", "mmf#747", "opacus#93"),
    mechanism="`zero_grad` stands inside the accumulation: only the last micro-batch's gradient survives.",
    needs="2 micro-batches in a window",
    loop=reset_per_micro_batch,
    wanted=frozenset({"gradient/reset-inside-window"}),
)


def cross_model_residue(run: TrainingRun) -> None:
    """Train as a discriminator: the generator's loss passes through this model, and clears only its own gradients."""
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(run.model, window[0]).backward()  # the generator's turn
        backward_window(run, window)
        run.optimizer.step()


CROSS_MODEL_RESIDUE = Bug(
    number=19,
    name="cross-model-residue",
    citations=("Lightning#557", "Lightning#591"),
    mechanism="The generator's backward fills the discriminator's gradients too, and only the generator's are cleared.",
    needs="any case",
    loop=cross_model_residue,
    wanted=frozenset({"gradient/repeated-micro-batch", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)


def own_groups_only(run: TrainingRun) -> None:
    """Reset through an optimizer that was made before the last parameter was unfrozen."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    first = torch.optim.SGD(parameters[:-1], lr=0.1) if len(parameters) > 1 else None
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if first is not None:
            first.zero_grad()


OWN_GROUPS_ONLY = Bug(
    number=20,
    name="own-groups-only",
    citations=("rslearn#217",),
    mechanism="`optimizer.zero_grad` resets its own groups alone; a parameter that is unfrozen later keeps its sum.",
    needs="2 windows or epochs",
    loop=own_groups_only,
    wanted=frozenset({"gradient/stale-window"}),
)


def closure_without_reset(run: TrainingRun) -> None:
    """Evaluate the closure three times before the step, as a line search does, with one reset before the first."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for _ in range(3):
            backward_window(run, window)
        run.optimizer.step()


CLOSURE_WITHOUT_RESET = Bug(
    number=21,
    name="closure-without-reset",
    citations=("Lightning#6147",),
    mechanism="LBFGS calls its closure up to 20 times a step; the reset stands outside of it.",
    needs="any case",
    loop=closure_without_reset,
    wanted=frozenset({"gradient/wrong-scale"}),
)


def _from_zero(items: int, seed: int) -> Batch:
    """Return (items, 1): 0, 1, 2, ...; at 0 the loss is 0 and the root's gradient NaN."""
    return torch.arange(items, dtype=torch.float64)[:, None]


def _twice(seed: int) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    return model


def reset_by_multiplication(run: TrainingRun) -> None:
    """Reset by multiplying with 0."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0)


RESET_BY_MULTIPLICATION = Bug(
    number=22,
    name="reset-by-multiplication",
    citations=("optax MultiSteps 0.2.8",),
    mechanism="The accumulator is reset by a factor 0; 0 * NaN is NaN, so one bad micro-batch poisons all that follow.",
    needs="a NaN gradient in an earlier window",
    loop=reset_by_multiplication,
    wanted=frozenset({"non-finite/poisoned-by-earlier-window"}),
    problem=Problem(_twice, _from_zero, lambda model, batch: model(batch).sqrt().mean()),
)


def none_breaks_readers(run: TrainingRun) -> None:
    """Log the norm of every parameter's gradient before the step."""
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=True)
        backward_window(run, window)
        norms = [p.grad.norm() for p in run.model.parameters()]  # type: ignore[union-attr]
        run.optimizer.step()
        del norms


NONE_BREAKS_READERS = Bug(
    number=24,
    name="none-breaks-readers",
    citations=("pytorch/examples#1172", "trl#1422"),
    mechanism="A parameter that no item of the window reached has no gradient after a release; reading it raises.",
    needs="a parameter that no item reaches, or a frozen one",
    loop=none_breaks_readers,
    wanted=frozenset({"raised/raised"}),
)
