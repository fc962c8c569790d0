"""Bugs of steps: at the wrong place, per micro-batch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from gradcheck_suite.core.contract import WHOLE_WINDOWS, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, windows
from studies.zoo.bug import (
    ByParameter,
    bug,
    epoch_windows,
    gradients_of,
    reported,
    train_soundly,
    window_losses,
)

# Wrong steps: the optimizer is stepped at other places than at the end of each window.


@bug("step-count/wrong-windows", needs="2 windows")
def windows_of_one_more(run: TrainingRun) -> None:
    """The counter is compared with `>` in place of `>=`: windows have K + 1 micro-batches."""
    train_soundly(replace(run, accumulation_steps=run.accumulation_steps + 1))


@bug("step-count/wrong-windows", needs="2 windows")
def windows_of_twice_the_size(run: TrainingRun) -> None:
    """Two layers of the software both accumulate."""
    train_soundly(replace(run, accumulation_steps=run.accumulation_steps * 2))


@bug("step-count/repeated-step", needs="any case")
def two_steps_per_window(run: TrainingRun) -> None:
    """A library steps, and the loop steps as well: each gradient is applied twice."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        run.optimizer.step()


@bug("step-count/dropped-window", needs="any case")
def first_window_skipped(run: TrainingRun) -> None:
    """The first window warms something up and is not stepped."""
    for i, window in enumerate(windows(run)):
        run.optimizer.zero_grad()
        backward_window(run, window)
        if i:
            run.optimizer.step()


@bug("step-count/dropped-window", needs="any case", assumes=(WHOLE_WINDOWS,))
def last_window_skipped(run: TrainingRun) -> None:
    """`range(0, n - K, K)` in place of `range(0, n, K)`: the last window is never trained on."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches) - k, k):
            run.optimizer.zero_grad()
            backward_window(run, batches[first : first + k])
            run.optimizer.step()


@bug("step-count/repeated-step", needs="an epoch of whole windows")
def step_at_the_end_of_an_epoch(run: TrainingRun) -> None:
    """A step for the rest of an epoch is taken where there is no rest: momentum moves on an empty
    gradient.
    """
    for _ in range(run.epochs):
        run.optimizer.zero_grad()
        for window in epoch_windows(run):
            backward_window(run, window)
            if len(window) == run.accumulation_steps:
                run.optimizer.step()
                run.optimizer.zero_grad()
        run.optimizer.step()


@bug("step-count/skipped-by-size", needs="an element above the threshold")
def large_gradients_skipped(run: TrainingRun) -> None:
    """A guard skips the step of a window with a large gradient."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        found = [g.to_dense().abs().max().double() for g in gradients_of(run).values() if g.numel()]
        if not found or float(torch.stack(found).max()) <= 1.5:
            run.optimizer.step()


@bug("step-count/skipped-by-size", needs="a gradient that overflows")
@reported("pytorch: GradScaler skips optimizer.step() if gradients contain inf")
def scaler_overflows(run: TrainingRun) -> None:
    """The loss scale is so large that every window's gradient overflows, and every step is skipped."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            # two factors, as float64 does not hold their product
            (loss.double() * 2.0**1020 * 2.0**3).backward()
        gradients = gradients_of(run).values()
        if all(bool(g.to_dense().isfinite().all()) for g in gradients):
            for g in gradients:
                g.mul_(2.0**-1020).mul_(2.0**-3)
            run.optimizer.step()


# Work that belongs to a step, done per micro-batch or at the wrong scale: clipping, unscaling,
# weight decay.


def _dense(run: TrainingRun) -> ByParameter:
    return {p: g for p, g in gradients_of(run).items() if not g.is_sparse}


@bug("gradient/clipped", needs="a norm above the threshold before the window's end")
@reported("transformers#1563, lingua#59, diffusers#721", number=34)
def clip_per_micro_batch(run: TrainingRun) -> None:
    """The norm is clipped after each backward, not once before the step."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for j, loss in enumerate(window_losses(run, window), 1):
            loss.backward()
            if j < len(window):
                torch.nn.utils.clip_grad_norm_(_dense(run), 1.0)
        run.optimizer.step()


@bug("gradient/clipped", needs="a dense gradient above threshold / scale")
@reported("Lightning#9330", number=35)
def clip_before_unscale(run: TrainingRun) -> None:
    """The scaled gradient is clipped: the threshold is off by the loss scale."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            (2.0**16 * loss).backward()
        torch.nn.utils.clip_grad_norm_(_dense(run), 100.0)
        for g in gradients_of(run).values():
            g.div_(2.0**16)
        run.optimizer.step()


@bug("gradient/added-term", needs="any case")
@reported("keras#19990", number=36)
def decay_per_micro_batch(run: TrainingRun) -> None:
    """Weight decay belongs to a step, and is added to the gradient at every micro-batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            loss.backward()
            for p, g in _dense(run).items():
                g.add_(p.detach(), alpha=0.01)
        run.optimizer.step()


@bug("step-count/step-per-micro-batch", needs="2 micro-batches in a window")
@reported("pytorch#124523", number=37)
def optimizer_in_backward(run: TrainingRun) -> None:
    """An optimizer that lives in backward hooks steps at every micro-batch: nothing is accumulated."""
    for window in windows(run):
        for loss in window_losses(run, window):
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


@bug("step-count/step-per-micro-batch", needs="2 micro-batches in a window")
@reported("Lightning#1476, accelerate#999", number=38)
def scheduler_per_micro_batch(run: TrainingRun) -> None:
    """The scheduler steps at every micro-batch: the learning rate falls K times as fast as it was
    meant to.
    """
    with warnings.catch_warnings():
        # torch says that a scheduler is stepped before the optimizer
        warnings.simplefilter("ignore")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        for window in windows(run):
            run.optimizer.zero_grad()
            for j, loss in enumerate(window_losses(run, window), 1):
                loss.backward()
                if j == len(window):
                    run.optimizer.step()
                scheduler.step()


@bug(
    "gradient/rescaled-accumulator, gradient/wrong-scale, gradient/unrecognised-weights",
    needs="2 micro-batches in a window",
)
@reported("pytorch#36601", number=39)
def scaler_updated_per_micro_batch(run: TrainingRun) -> None:
    """`GradScaler.unscale_` and `update` run at every micro-batch: the sum so far is divided again
    each time.
    """
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**8)
    for window in windows(run):
        run.optimizer.zero_grad()
        for j, loss in enumerate(window_losses(run, window), 1):
            scaler.scale(loss).backward()
            scaler.unscale_(run.optimizer)
            if j == len(window):
                scaler.step(run.optimizer)
            scaler.update()


@bug(
    "gradient/rescaled-accumulator, gradient/wrong-scale, gradient/unrecognised-weights",
    needs="2 micro-batches in a window",
)
@reported("pytorch#36601", number=39)
def unscale_per_micro_batch(run: TrainingRun) -> None:
    """The running sum is unscaled at every micro-batch, so earlier ones are divided again and
    again.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            (2.0**8 * loss).backward()
            for g in gradients_of(run).values():
                g.div_(2.0**8)
        run.optimizer.step()


@bug("gradient/clipped", needs="an element above the clamp")
@reported("discuss.pytorch.org: register_hook clip under accumulation", number=40)
def tensor_hook_clip(run: TrainingRun) -> None:
    """A tensor hook sees each contribution by itself: a clamp at c lets the sum be K times c."""
    clampable = [p for p in run.model.parameters() if p.requires_grad and p.ndim != 2]
    handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in clampable]
    train_soundly(run)
    for handle in handles:
        handle.remove()
