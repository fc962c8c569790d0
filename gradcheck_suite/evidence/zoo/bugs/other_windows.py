"""Other windows: a step holds another window's gradient, beside its own or in its place."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import step_with, train_with_the_gradients_before, window_gradients
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, TrainingRun


def delayed_by_one(run: TrainingRun) -> None:
    """Step with the gradient of the window before, as a pipeline does that fills up first."""
    train_with_the_gradients_before(run, lambda own, before: before or {})


DELAYED_BY_ONE = Bug(
    name="delayed-by-one",
    mechanism="The step applies the gradient of the window before it; the first step has none.",
    needs="any case",
    loop=delayed_by_one,
    wanted=frozenset({"gradient/delayed-window"}),
)


def delayed_after_warm_up(run: TrainingRun) -> None:
    """Step with the first window's gradient twice, and from then on with that of the window before."""
    train_with_the_gradients_before(run, lambda own, before: own if before is None else before)


DELAYED_AFTER_WARM_UP = Bug(
    name="delayed-after-warm-up",
    mechanism="Communication overlaps the next window, and the step applies the gradient that has arrived by then.",
    needs="2 windows",
    loop=delayed_after_warm_up,
    wanted=frozenset({"gradient/delayed-window"}),
)


def reversed_windows(run: TrainingRun) -> None:
    """Pop the windows of an epoch from the end of a list."""
    for _ in range(run.epochs):
        batches = list(run.loader)
        k = run.accumulation_steps
        stack = [batches[first : first + k] for first in range(0, len(batches), k)]
        while stack:
            step_with(run, window_gradients(run, stack.pop()))


REVERSED_WINDOWS = Bug(
    name="reversed-windows",
    mechanism="The windows of an epoch are trained in reverse order.",
    needs="2 windows",
    loop=reversed_windows,
    wanted=frozenset({"gradient/other-window"}),
)


def swapped_pairs(run: TrainingRun) -> None:
    """Swap the windows 0 and 1, 2 and 3, and so on of every epoch."""
    for _ in range(run.epochs):
        batches = list(run.loader)
        k = run.accumulation_steps
        listed = [batches[first : first + k] for first in range(0, len(batches), k)]
        for i in range(len(listed)):
            step_with(run, window_gradients(run, listed[i ^ 1] if i ^ 1 < len(listed) else listed[i]))


SWAPPED_PAIRS = Bug(
    name="swapped-pairs",
    mechanism="Two buffers take turns, and the step reads the one that is being filled.",
    needs="2 windows",
    loop=swapped_pairs,
    wanted=frozenset({"gradient/other-window"}),
)


def first_window_always(run: TrainingRun) -> None:
    """Train on the first window again and again: a captured batch is never refilled."""
    first: list[Batch] | None = None
    for window in windows(run):
        first = first or window
        step_with(run, window_gradients(run, first))


FIRST_WINDOW_ALWAYS = Bug(
    name="first-window-always",
    mechanism="The static inputs of a captured step are never refilled: every step trains on the first window.",
    needs="2 windows",
    loop=first_window_always,
    wanted=frozenset({"gradient/other-window"}),
)


def prefetched_micro_batch(run: TrainingRun) -> None:
    """Send the next window's first micro-batch backward before the step, and again in its own window."""
    everything = list(windows(run))
    for i, window in enumerate(everything):
        run.optimizer.zero_grad()
        backward_window(run, window)
        if i + 1 < len(everything):
            following = everything[i + 1]
            part_of_window(run, following[0], window_count(run, following)).backward()
        run.optimizer.step()


PREFETCHED_MICRO_BATCH = Bug(
    name="prefetched-micro-batch",
    mechanism="The first micro-batch of the next window is computed ahead, and its gradient joins this window's.",
    needs="2 windows",
    loop=prefetched_micro_batch,
    wanted=frozenset({"gradient/later-window"}),
)


def traces_of_the_next(run: TrainingRun) -> None:
    """Add a ten-millionth of the next window's gradient."""
    everything = list(windows(run))
    gradients = [window_gradients(run, window) for window in everything]
    for i, own in enumerate(gradients):
        ahead = gradients[i + 1] if i + 1 < len(gradients) else {}
        both = {p: own.get(p, 0) + 1e-7 * ahead.get(p, torch.zeros_like(p)) for p in own.keys() | ahead.keys()}
        step_with(run, both)


TRACES_OF_THE_NEXT = Bug(
    name="traces-of-the-next",
    mechanism="An interpolation between windows has a weight of 1e-7 for the next one.",
    needs="2 windows",
    loop=traces_of_the_next,
    wanted=frozenset({"gradient/later-window"}),
)


def step_before_the_last(run: TrainingRun) -> None:
    """Step before the window's last backward: its gradient is left for the next window."""
    run.optimizer.zero_grad()
    for window in windows(run):
        total = window_count(run, window)
        for batch in window[:-1]:
            part_of_window(run, batch, total).backward()
        last = part_of_window(run, window[-1], total)
        for p in run.model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        run.optimizer.step()
        run.optimizer.zero_grad()
        last.backward()


STEP_BEFORE_THE_LAST = Bug(
    name="step-before-the-last",
    mechanism="The step comes before the window's last backward, whose gradient joins the next window.",
    needs="any case",
    loop=step_before_the_last,
    wanted=frozenset({"gradient/shifted-window"}),
)


def previous_batch_variable(run: TrainingRun) -> None:
    """Train on the batch that was fetched one iteration ago; the first one is taken twice."""
    before: Batch = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch if before is None else before, total).backward()
            before = batch
        run.optimizer.step()


PREVIOUS_BATCH_VARIABLE = Bug(
    name="previous-batch-variable",
    mechanism="A prefetcher returns the batch that it fetched one call before: all batches come one late.",
    needs="2 micro-batches",
    loop=previous_batch_variable,
    wanted=frozenset({"gradient/shifted-window"}),
)
