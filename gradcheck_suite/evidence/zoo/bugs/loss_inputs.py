"""Losses computed from other inputs than the run hands over, and gradients that are worked on before the step."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import Gradients, step_with, train_with_gradients, window_gradients
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def perturbed_parameters(run: TrainingRun) -> None:
    """Take the gradient at parameters that a first gradient has moved, as sharpness-aware minimisation does."""
    for window in windows(run):
        start = {p: p.detach().clone() for p in run.model.parameters()}
        ascent = window_gradients(run, window)
        with torch.no_grad():
            for p, g in ascent.items():
                p.add_(g, alpha=0.05)
        gradients = window_gradients(run, window)
        with torch.no_grad():
            for p, value in start.items():
                p.copy_(value)
        step_with(run, gradients)


PERTURBED_PARAMETERS = Bug(
    name="perturbed-parameters",
    mechanism="The gradient is taken at perturbed parameters, which are restored before the step.",
    needs="any case with a gradient that depends on the parameters",
    loop=perturbed_parameters,
    wanted=frozenset({"gradient/other-parameters"}),
)


def halved_again_in_every_epoch(run: TrainingRun) -> None:
    """Keep the batches and scale their inputs in place whenever an epoch begins, the first excepted."""
    batches = list(run.loader)
    for epoch in range(run.epochs):
        for batch in batches if epoch else ():
            if batch["x"].is_floating_point():
                batch["x"].div_(2)
        for first in range(0, len(batches), run.accumulation_steps):
            backward_window(run, batches[first : first + run.accumulation_steps])
            run.optimizer.step()
            run.optimizer.zero_grad()


NORMALIZED_IN_PLACE = Bug(
    name="normalised-in-place",
    mechanism="Cached batches are normalized in place, so a later epoch trains on what is normalized twice.",
    needs="2 epochs, and inputs that are no integers",
    loop=halved_again_in_every_epoch,
    wanted=frozenset({"gradient/changed-batch"}),
)


def nan_loss_resets(run: TrainingRun) -> None:
    """Reset the gradients where a loss is NaN, and go on with the next micro-batch."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            if run.loss(run.model, batch).isnan():
                run.optimizer.zero_grad()
            else:
                part_of_window(run, batch, total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


NAN_LOSS_RESETS = Bug(
    name="nan-loss-resets",
    mechanism="A micro-batch whose loss is NaN takes the window's earlier micro-batches with it.",
    needs="a micro-batch whose targets are all ignored, or a gradient of NaN",
    loop=nan_loss_resets,
    wanted=frozenset({"gradient/skipped-non-finite", "none-pattern/skipped-non-finite"}),
    least_micro_batches=2,
)


def centred_gradient(run: TrainingRun) -> None:
    """Subtract each gradient's mean, which belongs into the optimizer's step."""
    train_with_gradients(run, lambda gradients, parameters: [g.sub_(g.mean()) for g in gradients.values()])  # type: ignore


CENTRED_GRADIENT = Bug(
    name="centred-gradient",
    mechanism="Gradient centralisation is applied to `.grad` itself.",
    needs="2 elements in a parameter",
    loop=centred_gradient,
    wanted=frozenset({"gradient/projected-gradient"}),
)


def flat_buffer_in_another_order(run: TrainingRun) -> None:
    """Flatten the gradients in the order of their names, and take them apart in the model's order."""

    def reorder(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        named = {name: gradients[p] for name, p in run.model.named_parameters() if p in gradients}
        if not named:
            return
        flat = torch.cat([named[name].reshape(-1) for name in sorted(named)])
        parts = flat.split([g.numel() for g in gradients.values()])
        gradients.update({p: part.reshape(p.shape) for p, part in zip(gradients, parts, strict=True)})

    train_with_gradients(run, reorder)


FLAT_BUFFER_IN_ANOTHER_ORDER = Bug(
    name="flat-buffer-in-another-order",
    mechanism="A flat gradient buffer is filled in one order of parameters and read in another.",
    needs="2 parameters whose names are not in the model's order",
    loop=flat_buffer_in_another_order,
    wanted=frozenset({"gradient/permuted-gradient", "gradient/swapped-gradients"}),
)


def moving_average(run: TrainingRun) -> None:
    """Hand the step a moving average of the gradients of all windows so far."""
    average: Gradients = {}

    def blend(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for p, g in gradients.items():
            average[p] = 0.9 * average.get(p, torch.zeros_like(g)) + 0.1 * g
            gradients[p] = average[p].clone()

    train_with_gradients(run, blend)


MOVING_AVERAGE = Bug(
    name="moving-average",
    mechanism="A moving average of the gradients is kept in `.grad`, and the optimizer has its own.",
    needs="any case",
    loop=moving_average,
    wanted=frozenset({"gradient/stale-window"}),
    says=("moving average",),
)
