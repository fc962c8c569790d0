"""Leaks: a part of an earlier window's gradient, in some parameter or of some size, survives the reset."""

from __future__ import annotations

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import Gradients, step_with, window_gradients
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.contract import TrainingRun


def _leak(run: TrainingRun, share: float) -> None:
    """Add a share of what the step before had to every window's gradient."""
    before: Gradients = {}
    for window in windows(run):
        gradients = window_gradients(run, window)
        for p, left in before.items():
            gradients[p] = gradients[p] + share * left if p in gradients else share * left
        step_with(run, gradients)
        before = gradients


def faded_reset(run: TrainingRun) -> None:
    """Multiply the gradients by 0.1 in place of a reset."""
    _leak(run, 0.1)


FADED_RESET = Bug(
    name="faded-reset",
    mechanism="A momentum of 0.1 is kept in the gradient itself: every step has a tenth of the one before.",
    needs="2 windows",
    loop=faded_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def leak_of_a_hundred_millionth(run: TrainingRun) -> None:
    """Leave 1e-8 of the gradients behind."""
    _leak(run, 1e-8)


LEAK_OF_A_HUNDRED_MILLIONTH = Bug(
    name="leak-of-1e-8",
    mechanism="An epsilon of 1e-8 in a blend keeps that share of the gradient of the step before.",
    needs="2 windows",
    loop=leak_of_a_hundred_millionth,
    wanted=frozenset({"gradient/stale-window"}),
)


def leak_of_a_trillionth(run: TrainingRun) -> None:
    """Leave 1e-11 of the gradients behind."""
    _leak(run, 1e-11)


LEAK_OF_A_TRILLIONTH = Bug(
    name="leak-of-1e-11",
    mechanism="The same with 1e-11, which float32 does not see.",
    needs="2 windows",
    loop=leak_of_a_trillionth,
    wanted=frozenset({"gradient/stale-window"}),
)


def reset_every_second_step(run: TrainingRun) -> None:
    """Reset after every second step."""
    for step, window in enumerate(windows(run)):
        backward_window(run, window)
        run.optimizer.step()
        if step % 2:
            run.optimizer.zero_grad()


RESET_EVERY_SECOND_STEP = Bug(
    name="reset-every-second-step",
    mechanism="The reset is under a condition that every second step meets.",
    needs="2 windows",
    loop=reset_every_second_step,
    wanted=frozenset({"gradient/stale-window"}),
)


def biases_are_not_reset(run: TrainingRun) -> None:
    """Reset the parameters of two and more dimensions."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.ndim > 1:
                p.grad = None


BIASES_ARE_NOT_RESET = Bug(
    name="biases-are-not-reset",
    mechanism="A reset by hand goes over the matrices alone: biases and scales keep their sums.",
    needs="2 windows, and a parameter of one dimension",
    loop=biases_are_not_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def short_windows_are_not_reset(run: TrainingRun) -> None:
    """Step after every window, and reset after whole ones."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if len(window) == run.accumulation_steps:
            run.optimizer.zero_grad()


SHORT_WINDOWS_ARE_NOT_RESET = Bug(
    name="short-windows-are-not-reset",
    mechanism="The short last window is stepped and not cleared: it joins the next epoch's first window.",
    needs="a short last window, and 2 epochs",
    loop=short_windows_are_not_reset,
    wanted=frozenset({"gradient/stale-window"}),
)
