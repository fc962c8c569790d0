"""Faulty loops that no drawn case shows: they go wrong on large, small or non-finite gradients, or
in long plans.
"""

from __future__ import annotations

import torch

from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import train_with_sums, window_losses
from tests.training import accumulating, trains


def _gradients(run):
    return [p.grad for p in run.model.parameters() if p.grad is not None]


def before_step(change):
    """Return a sound loop with a change to the gradients before each step."""
    return trains(before=lambda run, step: change(run))


def _each(function):
    return before_step(lambda run: [g.copy_(function(g)) for g in _gradients(run)])


def _clip_by_norm(limit):
    return before_step(lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit))


def _sends(loss):
    """Return a loop that sends a change of each micro-batch's part of the window's loss backward,
    or none of it.
    """

    def backward(run, window):
        for part in window_losses(run, window):
            if (changed := loss(part)) is not None:
                changed.backward()

    return trains(backward=backward)


def reset_by_product(run):
    for window in windows(run):
        for gradient in _gradients(run):
            gradient.mul_(0)
        backward_window(run, window)
        run.optimizer.step()


def _steps_if(fine):
    """Return a loop that skips the step of every window whose gradients are not all fine."""

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            if all(fine(g) for g in _gradients(run)):
                run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


skips_steps = _steps_if(lambda g: torch.isfinite(g).all())


def zeroes_bad_gradients(run):
    if not all(torch.isfinite(g).all() for g in _gradients(run)):
        for gradient in _gradients(run):
            gradient.zero_()


def clips_micro_batches(run):
    train_with_sums(
        run,
        lambda j, total, g: g * (1000 / g.norm().clamp(min=1000)) + (0 if total is None else total),
    )


clips_to_a_limit_that_no_finite_gradient_reaches = _clip_by_norm(1e200)


def halves_after_a_non_finite_window(run):
    bad = False
    for window in windows(run):
        backward_window(run, window)
        if bad:
            for gradient in _gradients(run):
                gradient.mul_(0.5)
        bad = not all(torch.isfinite(g).all() for g in _gradients(run))
        run.optimizer.step()
        run.optimizer.zero_grad()


@accumulating
def raises_counts_to_1(run, window):
    """As `clamp(min=1)` does that is to avoid a division by 0: a sum of class weights may be below
    1.
    """
    total = max(float(window_count(run, window)), 1.0)
    for batch in window:
        part_of_window(run, batch, total).backward()


SIZES = {
    "reset by * 0": (reset_by_product, "poisoned-by-earlier-window"),
    "nan_to_num": (_each(torch.nan_to_num), "skipped-non-finite"),
    "nan_to_num to 0": (_each(lambda g: torch.nan_to_num(g, 0.0, 0.0, 0.0)), "skipped-non-finite"),
    "skips losses": (_sends(lambda loss: loss if loss.isfinite() else None), "skipped-non-finite"),
    "skips steps": (skips_steps, "skipped-non-finite"),
    "zeroes bad gradients": (before_step(zeroes_bad_gradients), "skipped-non-finite"),
    "skips large steps": (_steps_if(lambda g: not g.norm() > 1e4), "skipped-by-size"),
    "skips large losses": (
        _sends(lambda loss: loss * 0 if loss.abs() > 1e6 else loss),
        "skipped-by-size",
    ),
    "clip by norm at 1000": (_clip_by_norm(1000.0), "clipped"),
    "clip by value at 1000": (
        before_step(lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1000.0)),
        "clipped",
    ),
    "clip micro-batches at 1000": (clips_micro_batches, "clipped"),
    "flush below 1e-6": (_each(lambda g: torch.where(g.abs() < 1e-6, 0.0, g)), "skipped-by-size"),
    "flush below 1e-30": (_each(lambda g: torch.where(g.abs() < 1e-30, 0.0, g)), "skipped-by-size"),
    "drop below a share of the largest": (
        _each(lambda g: torch.where(g.abs() < 1e-4 * g.abs().max(), 0.0, g)),
        "not-linear",
    ),
    "halve above 100": (
        _each(lambda g: g / 2 if g.nan_to_num().abs().max() > 100 else g),
        "not-linear",
    ),
}


# Counters


def _counted(forget):
    """Return a sound loop that leaves out the micro-batches for which `forget(j, epoch)` is true."""

    def loop(run):
        seen = 0
        for step, window in enumerate(windows(run)):
            total = window_count(run, window)
            epoch = step // (-(-len(run.loader) // run.accumulation_steps))
            for batch in window:
                if not forget(seen, epoch):
                    part_of_window(run, batch, total).backward()
                seen += 1
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def _wraps(at):
    """Return a loop that counts micro-batches in a number that goes from `at` - 1 to 0, as a uint8
    does at 256.
    """

    def loop(run):
        for _ in range(run.epochs):
            micro_batches, counter, window = list(run.loader), 0, []
            for j, batch in enumerate(micro_batches):
                counter = (counter + 1) % at
                window.append(batch)
                if counter % run.accumulation_steps == 0 or j + 1 == len(micro_batches):
                    backward_window(run, window)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    window = []

    return loop


def capped(run):
    """Cut windows of more than 16 micro-batches."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), min(run.accumulation_steps, 16)
        for i in range(0, len(batches), k):
            backward_window(run, batches[i : i + k])
            run.optimizer.step()
            run.optimizer.zero_grad()


def keyed(run):
    """Keep each micro-batch's gradient under its index modulo 32."""
    for window in windows(run):
        total, parts = window_count(run, window), {}
        for j, batch in enumerate(window):
            part_of_window(run, batch, total).backward()
            parts[j % 32] = [p.grad for p in run.model.parameters()]
            run.optimizer.zero_grad()
        for p, gradients in zip(
            run.model.parameters(), zip(*parts.values(), strict=True), strict=True
        ):
            p.grad = sum(gradients)
        run.optimizer.step()
        run.optimizer.zero_grad()


def stale_later(run):
    """Reset the gradients after the first 50 steps only."""
    for step, window in enumerate(windows(run)):
        backward_window(run, window)
        run.optimizer.step()
        if step < 50:
            run.optimizer.zero_grad()


def _times(factor, where):
    """Return a loop that multiplies gradients by a factor where the run and the number of the step
    say so.
    """
    return trains(
        before=lambda run, step: [g.mul_(factor) for g in _gradients(run) if where(run, step)]
    )


LONG = {
    "counter modulo 16": (_wraps(16), "wrong-windows", 18, 17, 1),
    # from 257 on a window is short, and at 274 the number of steps is right again; of the plans
    # that are tried next, 257, 266, 270, 272 and 273 micro-batches have a step too many, which is a
    # fault of another kind
    "counter in uint8": (_wraps(256), "wrong-windows", 274, 3, 1),
    "windows in int8": (_times(0, lambda run, step: step & 128), "no-gradient", 129, 1, 1),
    "fourth epoch is scaled": (
        _times(1.5, lambda run, step: step // -(-len(run.loader) // run.accumulation_steps) >= 3),
        "wrong-scale",
        1,
        1,
        4,
    ),
    "fourth epoch is left out": (_counted(lambda j, epoch: epoch >= 3), "no-gradient", 1, 1, 4),
    "every 100th micro-batch is left out": (
        _counted(lambda j, epoch: j % 100 == 99),
        "dropped-micro-batch",
        100,
        2,
        1,
    ),
    "wrong from micro-batch 17 on": (_counted(lambda j, epoch: j >= 16), "no-gradient", 17, 1, 1),
    "K capped at 16": (capped, "wrong-windows", 18, 17, 1),
    "keyed modulo 32": (keyed, "dropped-micro-batch", 33, 33, 1),
    "stale after 50 steps": (stale_later, "stale-window", 52, 1, 1),
}
"""Faults of long plans: loop, diagnosis, and the smallest plan with that kind of violation: micro-batches, K, epochs.

Where windows are cut at 16, one of 17 alone gives a wrong number of steps, which is another kind."""
