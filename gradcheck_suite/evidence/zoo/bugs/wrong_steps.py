"""Wrong steps: the optimizer is stepped at other places than at the end of each window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import WHOLE_WINDOWS, TrainingRun


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
