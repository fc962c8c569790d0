"""Values: what is done to a gradient depends on its size, or does not depend on the loss at all."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import Gradients, step_with, train_with_gradients
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun

LOSS_SCALE = 2.0**16


def _norm(gradients: Gradients) -> torch.Tensor:
    return torch.stack([g.norm().double() for g in gradients.values()]).norm()


def clip_norm_per_window(run: TrainingRun) -> None:
    """Clip the norm of the window's gradient at 0.5."""

    def clip(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        factor = float((0.5 / _norm(gradients).clamp(min=1e-300)).clamp(max=1)) if gradients else 1.0
        for g in gradients.values():
            g.mul_(factor)

    train_with_gradients(run, clip)


CLIP_NORM_PER_WINDOW = Bug(
    name="clip-norm-per-window",
    mechanism="The window's gradient is clipped, on purpose or by a default.",
    needs="a norm above the threshold",
    loop=clip_norm_per_window,
    wanted=frozenset({"gradient/clipped"}),
)


def clip_value_per_window(run: TrainingRun) -> None:
    """Clamp the elements of the window's gradient."""
    train_with_gradients(run, lambda gradients, parameters: [g.clamp_(-0.05, 0.05) for g in gradients.values()])  # type: ignore


CLIP_VALUE_PER_WINDOW = Bug(
    name="clip-value-per-window",
    mechanism="Elements of the gradient are clamped.",
    needs="an element above the threshold",
    loop=clip_value_per_window,
    wanted=frozenset({"gradient/clipped"}),
)


def clip_each_micro_batch(run: TrainingRun) -> None:
    """Clip every micro-batch's own gradient before it is added, as in private training."""
    for window in windows(run):
        total = window_count(run, window)
        sums: Gradients = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            own = {p: p.grad.to_dense() for p in run.model.parameters() if p.grad is not None}
            factor = float((0.2 / _norm(own).clamp(min=1e-300)).clamp(max=1)) if own else 1.0
            for p, g in own.items():
                sums[p] = sums.get(p, torch.zeros_like(p)) + factor * g
        step_with(run, sums)


CLIP_EACH_MICRO_BATCH = Bug(
    name="clip-each-micro-batch",
    mechanism="Each micro-batch's gradient is clipped before it is added.",
    needs="a norm above the threshold",
    loop=clip_each_micro_batch,
    wanted=frozenset({"gradient/clipped"}),
)


def normalized_gradient(run: TrainingRun) -> None:
    """Divide the gradient by its norm."""

    def normalize(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        size = _norm(gradients) if gradients else torch.zeros(())
        for g in gradients.values():
            g.div_(float(size) or 1.0)

    train_with_gradients(run, normalize)


NORMALIZED_GRADIENT = Bug(
    name="normalised-gradient",
    mechanism="The gradient is divided by its norm.",
    needs="any case",
    loop=normalized_gradient,
    wanted=frozenset({"gradient/normalised"}),
)


def signs_only(run: TrainingRun) -> None:
    """Replace the gradient by its sign."""
    train_with_gradients(run, lambda gradients, parameters: [g.sign_() for g in gradients.values()])  # type: ignore


SIGNS_ONLY = Bug(
    name="signs-only",
    mechanism="The gradient is compressed to its signs.",
    needs="any case",
    loop=signs_only,
    wanted=frozenset({"gradient/normalised"}),
)


def penalty_in_the_gradient(run: TrainingRun) -> None:
    """Add the gradient of a penalty on the parameters, which the objective does not have."""

    def add(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for p, g in gradients.items():
            g.add_(p.detach(), alpha=0.01)

    train_with_gradients(run, add)


PENALTY_IN_THE_GRADIENT = Bug(
    name="penalty-in-the-gradient",
    mechanism="Weight decay is added to the gradient, and the optimizer has its own.",
    needs="any case",
    loop=penalty_in_the_gradient,
    wanted=frozenset({"gradient/added-term"}),
    says=("decay",),
)


def noise_in_the_gradient(run: TrainingRun) -> None:
    """Add noise of a fixed size to the gradient."""
    train_with_gradients(
        run,
        lambda gradients, parameters: [g.add_(1e-3 * torch.randn_like(g)) for g in gradients.values()],  # type: ignore
    )


NOISE_IN_THE_GRADIENT = Bug(
    name="noise-in-the-gradient",
    mechanism="Noise is added to the gradient.",
    needs="any case",
    loop=noise_in_the_gradient,
    wanted=frozenset({"gradient/added-term"}),
)


def small_elements_dropped(run: TrainingRun) -> None:
    """Send only the elements above a threshold."""

    def drop(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for g in gradients.values():
            g[g.abs() < 0.1] = 0

    train_with_gradients(run, drop)


SMALL_ELEMENTS_DROPPED = Bug(
    name="small-elements-dropped",
    mechanism="Small elements of the gradient are not communicated.",
    needs="an element below the threshold",
    loop=small_elements_dropped,
    wanted=frozenset({"gradient/flushed-to-zero"}),
)


def never_unscaled(run: TrainingRun) -> None:
    """Scale the loss, and never divide the gradient."""
    train_with_gradients(run, lambda gradients, parameters: [g.mul_(LOSS_SCALE) for g in gradients.values()])  # type: ignore


NEVER_UNSCALED = Bug(
    name="never-unscaled",
    citations=("discuss.pytorch.org: scaler.scale(loss).backward() and optimizer.step()",),
    mechanism="The loss is scaled, and `optimizer.step()` is called in place of `scaler.step(optimizer)`.",
    needs="any case",
    loop=never_unscaled,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("loss scale",),
)


def unscaled_twice(run: TrainingRun) -> None:
    """Divide by the loss scale twice."""
    train_with_gradients(run, lambda gradients, parameters: [g.div_(LOSS_SCALE) for g in gradients.values()])  # type: ignore


UNSCALED_TWICE = Bug(
    name="unscaled-twice",
    mechanism="The gradient is unscaled by hand and by the scaler.",
    needs="any case",
    loop=unscaled_twice,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("loss scale",),
)
