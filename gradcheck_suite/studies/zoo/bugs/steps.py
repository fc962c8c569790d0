"""Bugs of steps: at the wrong place, per micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from gradcheck_suite.core.contract import WHOLE_WINDOWS, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from gradcheck_suite.studies.zoo.bug import Bug, dense

# Wrong steps: the optimizer is stepped at other places than at the end of each window.


def _train_in_windows_of(run: TrainingRun, size: Callable[[int], int]) -> None:
    """Train in windows of another size than K."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), size(run.accumulation_steps)
        for first in range(0, len(batches), k):
            run.optimizer.zero_grad()
            backward_window(run, batches[first : first + k])
            run.optimizer.step()


def windows_of_one_more(run: TrainingRun) -> None:
    """Train in windows of K + 1."""
    _train_in_windows_of(run, lambda k: k + 1)


WINDOWS_OF_ONE_MORE = Bug(
    name="windows-of-one-more",
    mechanism="The counter is compared with `>` in place of `>=`: windows have K + 1 micro-batches.",
    needs="2 windows",
    loop=windows_of_one_more,
    wanted=frozenset({"step-count/wrong-window-size"}),
)


def windows_of_twice_the_size(run: TrainingRun) -> None:
    """Train in windows of 2 K, as where two libraries both accumulate."""
    _train_in_windows_of(run, lambda k: 2 * k)


WINDOWS_OF_TWICE_THE_SIZE = Bug(
    name="windows-of-twice-the-size",
    mechanism="Two layers of the software both accumulate.",
    needs="2 windows",
    loop=windows_of_twice_the_size,
    wanted=frozenset({"step-count/wrong-window-size"}),
)


def two_steps_per_window(run: TrainingRun) -> None:
    """Step twice after each window."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        run.optimizer.step()


TWO_STEPS_PER_WINDOW = Bug(
    name="two-steps-per-window",
    mechanism="A library steps, and the loop steps as well: each gradient is applied twice.",
    needs="any case",
    loop=two_steps_per_window,
    wanted=frozenset({"step-count/repeated-step"}),
)


def first_window_skipped(run: TrainingRun) -> None:
    """Skip the first window's step, as a warm-up does."""
    for i, window in enumerate(windows(run)):
        run.optimizer.zero_grad()
        backward_window(run, window)
        if i:
            run.optimizer.step()


FIRST_WINDOW_SKIPPED = Bug(
    name="first-window-skipped",
    mechanism="The first window warms something up and is not stepped.",
    needs="any case",
    loop=first_window_skipped,
    wanted=frozenset({"step-count/dropped-window"}),
)


def last_window_skipped(run: TrainingRun) -> None:
    """Leave out every epoch's last window, whole or not."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches) - k, k):
            run.optimizer.zero_grad()
            backward_window(run, batches[first : first + k])
            run.optimizer.step()


LAST_WINDOW_SKIPPED = Bug(
    name="last-window-skipped",
    mechanism="`range(0, n - K, K)` in place of `range(0, n, K)`: the last window is never trained on.",
    needs="any case",
    loop=last_window_skipped,
    wanted=frozenset({"step-count/dropped-window"}),
    assumes=(WHOLE_WINDOWS,),
)


def step_at_the_end_of_an_epoch(run: TrainingRun) -> None:
    """Step after every epoch, also where its last window was whole."""
    for _ in range(run.epochs):
        run.optimizer.zero_grad()
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches), k):
            window = batches[first : first + k]
            backward_window(run, window)
            if len(window) == k:
                run.optimizer.step()
                run.optimizer.zero_grad()
        run.optimizer.step()


STEP_AT_THE_END_OF_AN_EPOCH = Bug(
    name="step-at-the-end-of-an-epoch",
    mechanism="A step for the rest of an epoch is taken where there is no rest: momentum moves on an empty gradient.",
    needs="an epoch of whole windows",
    loop=step_at_the_end_of_an_epoch,
    wanted=frozenset({"step-count/empty-step"}),
)


def large_gradients_skipped(run: TrainingRun) -> None:
    """Skip the step where an element of the gradient is large, as a guard against spikes does."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        found = [p.grad.to_dense().abs().max() for p in run.model.parameters() if p.grad is not None and p.numel()]
        if not found or float(torch.stack([f.double() for f in found]).max()) <= 1.5:
            run.optimizer.step()


LARGE_GRADIENTS_SKIPPED = Bug(
    name="large-gradients-skipped",
    mechanism="A guard skips the step of a window with a large gradient.",
    needs="an element above the threshold",
    loop=large_gradients_skipped,
    wanted=frozenset({"step-count/skipped-steps", "step-count/skipped-by-size"}),
)


def scaler_overflows(run: TrainingRun) -> None:
    """Scale the loss so far that the gradient overflows: GradScaler skips every step, and nothing is trained."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (part_of_window(run, batch, total).double() * 2.0**1020 * 2.0**3).backward()
        found = [p.grad.to_dense() for p in run.model.parameters() if p.grad is not None]
        if all(bool(g.isfinite().all()) for g in found):
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(2.0**-1020).mul_(2.0**-3)
            run.optimizer.step()


SCALER_OVERFLOWS = Bug(
    name="scaler-overflows",
    citations=("pytorch: GradScaler skips optimizer.step() if gradients contain inf",),
    mechanism="The loss scale is so large that every window's gradient overflows, and every step is skipped.",
    needs="a gradient that overflows",
    loop=scaler_overflows,
    wanted=frozenset({"step-count/skipped-steps", "step-count/skipped-by-size"}),
)


# Work that belongs to a step, done per micro-batch or at the wrong scale: clipping, unscaling, weight decay.


def clip_per_micro_batch(run: TrainingRun) -> None:
    """Clip the norm after every micro-batch but the last."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            part_of_window(run, batch, total).backward()
            if j + 1 < len(window):
                torch.nn.utils.clip_grad_norm_(dense(run), 1.0)
        run.optimizer.step()


CLIP_PER_MICRO_BATCH = Bug(
    number=34,
    name="clip-per-micro-batch",
    citations=("transformers#1563", "lingua#59", "diffusers#721"),
    mechanism="The norm is clipped after each backward, not once before the step.",
    needs="a norm above the threshold before the window's end",
    loop=clip_per_micro_batch,
    wanted=frozenset({"gradient/clipped"}),
)


def clip_before_unscale(run: TrainingRun) -> None:
    """Clip the scaled gradient at a threshold that is meant for the unscaled one, which never reaches it."""
    scale, threshold = 2.0**16, 100.0
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (scale * part_of_window(run, batch, total)).backward()
        torch.nn.utils.clip_grad_norm_(dense(run), threshold)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(scale)
        run.optimizer.step()


CLIP_BEFORE_UNSCALE = Bug(
    number=35,
    name="clip-before-unscale",
    citations=("Lightning#9330",),
    mechanism="The scaled gradient is clipped: the threshold is off by the loss scale.",
    needs="a dense gradient above threshold / scale",
    loop=clip_before_unscale,
    wanted=frozenset({"gradient/clipped"}),
)


def decay_per_micro_batch(run: TrainingRun) -> None:
    """Add the decay to the gradient after each backward; the optimizer has its own as well."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            with torch.no_grad():
                for p in dense(run):
                    p.grad.add_(p, alpha=0.01)  # type: ignore[union-attr]
        run.optimizer.step()


DECAY_PER_MICRO_BATCH = Bug(
    number=36,
    name="decay-per-micro-batch",
    citations=("keras#19990",),
    mechanism="Weight decay belongs to a step, and is added to the gradient at every micro-batch.",
    needs="any case",
    loop=decay_per_micro_batch,
    wanted=frozenset({"gradient/added-term"}),
)


def optimizer_in_backward(run: TrainingRun) -> None:
    """Step when a backward ends, to free the gradients at once."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


OPTIMIZER_IN_BACKWARD = Bug(
    number=37,
    name="optimizer-in-backward",
    citations=("pytorch#124523",),
    mechanism="An optimizer that lives in backward hooks steps at every micro-batch: nothing is accumulated.",
    needs="2 micro-batches in a window",
    loop=optimizer_in_backward,
    wanted=frozenset({"step-count/step-per-micro-batch"}),
)


def scheduler_per_micro_batch(run: TrainingRun) -> None:
    """Step the learning rate scheduler in the loop over micro-batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a scheduler is stepped before the optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        for window in windows(run):
            run.optimizer.zero_grad()
            total = window_count(run, window)
            for j, batch in enumerate(window):
                part_of_window(run, batch, total).backward()
                if j + 1 == len(window):
                    run.optimizer.step()
                scheduler.step()


SCHEDULER_PER_MICRO_BATCH = Bug(
    number=38,
    name="scheduler-per-micro-batch",
    citations=("Lightning#1476", "accelerate#999"),
    mechanism="The scheduler steps at every micro-batch: the learning rate falls K times as fast as it was meant to.",
    needs="2 micro-batches in a window",
    loop=scheduler_per_micro_batch,
    wanted=frozenset({"step-count/scheduler-per-micro-batch"}),
)


def scaler_updated_per_micro_batch(run: TrainingRun) -> None:
    """Unscale and update a gradient scaler after every micro-batch."""
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**8)
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            scaler.scale(part_of_window(run, batch, total)).backward()
            scaler.unscale_(run.optimizer)
            if j + 1 == len(window):
                scaler.step(run.optimizer)
            scaler.update()


SCALER_UPDATED_PER_MICRO_BATCH = Bug(
    number=39,
    name="scaler-updated-per-micro-batch",
    citations=("pytorch#36601",),
    mechanism="`GradScaler.unscale_` and `update` run at every micro-batch: the sum so far is divided again each time.",
    needs="2 micro-batches in a window",
    loop=scaler_updated_per_micro_batch,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)


def unscale_per_micro_batch(run: TrainingRun) -> None:
    """Divide the accumulated gradient by the loss scale after each backward."""
    scale = 2.0**8
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (scale * part_of_window(run, batch, total)).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(scale)
        run.optimizer.step()


UNSCALE_PER_MICRO_BATCH = Bug(
    number=39,
    name="unscale-per-micro-batch",
    citations=("pytorch#36601",),
    mechanism="The running sum is unscaled at every micro-batch, so earlier ones are divided again and again.",
    needs="2 micro-batches in a window",
    loop=unscale_per_micro_batch,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)


def tensor_hook_clip(run: TrainingRun) -> None:
    """Clamp each parameter's gradient in a hook, as recipes against exploding gradients do."""
    clampable = [p for p in run.model.parameters() if p.requires_grad and p.ndim != 2]
    handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in clampable]
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
    for handle in handles:
        handle.remove()


TENSOR_HOOK_CLIP = Bug(
    number=40,
    name="tensor-hook-clip",
    citations=("discuss.pytorch.org: register_hook clip under accumulation",),
    mechanism="A tensor hook sees each contribution by itself: a clamp at c lets the sum be K times c.",
    needs="an element above the clamp",
    loop=tensor_hook_clip,
    wanted=frozenset({"gradient/clipped"}),
)
