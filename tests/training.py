"""A sound training loop for tests to change: at its start, in a window's backward passes, and
around each step.
"""

from __future__ import annotations

import torch

from gradcheck_suite.loops.reset_modes import backward_window, windows


def _nothing(*_):
    pass


def trains(*, begin=_nothing, backward=backward_window, before=_nothing, after=_nothing):
    """Return a loop that is sound but for what it is given.

    Args:
        begin: is called once, with the run.
        backward: accumulates the gradient of a window, given the run and the window.
        before: is called before each step, with the run and the step's number.
        after: is called after each step, likewise.
    """

    def loop(run):
        begin(run)
        for step, window in enumerate(windows(run)):
            run.optimizer.zero_grad()
            backward(run, window)
            before(run, step)
            run.optimizer.step()
            after(run, step)

    return loop


def each_gradient(change):
    """Return what changes every gradient that is there, given it: for `before`."""
    return lambda run, step=0: [
        change(p.grad) for p in run.model.parameters() if p.grad is not None
    ]


def each_parameter(change):
    """Return what changes every parameter without a graph, given it: for `begin` and `after`."""

    def on(run, step=0):
        with torch.no_grad():
            for p in run.model.parameters():
                change(p)

    return on


def at(steps, change):
    """Return the change at some steps alone, by their numbers."""
    return lambda run, step: change(run, step) if step in steps else None


def accumulating(backward):
    """Decorate what accumulates a window's gradient, given the run and the window: it becomes a
    loop.
    """
    return trains(backward=backward)
