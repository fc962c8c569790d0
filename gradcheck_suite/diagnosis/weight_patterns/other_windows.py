"""Patterns of steps that hold micro-batches of other windows, beside their own or in their place.

An epoch's items are the same in every epoch, so in later epochs a gradient of another window may come from either side:
only the steps of the first epoch tell an earlier window from a later one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.patterns import Pattern, units
from gradcheck_suite.diagnosis.weight_patterns.presence import Steps
from gradcheck_suite.diagnosis.weight_patterns.weights import Weights, listed

RESET = "reset the gradients once after every step, the short last window's too"
FARTHEST = 3
"""The largest delay, in windows, that is looked for."""


def _earlier(w: Weights, micro_batch: int) -> bool:
    return micro_batch < w.window[0]


def _own_is_whole(w: Weights) -> bool:
    """Whether the window's own gradient is there, once, or in a later epoch with those of earlier ones."""
    if w.epoch and (w.foreign or len(w.windows) < 2):
        off = w.tolerance * (w.epoch + 1)
        return bool(np.all(w.ratio >= 1 - off) and np.all(w.ratio <= w.epoch + 1 + off))
    return w.close(w.ratio, 1.0)


def _stale(w: Weights) -> bool:
    return _own_is_whole(w) and (w.epoch > 0 or all(_earlier(w, j) for j in w.foreign))


def _stale_text(w: Weights, wrong: Steps) -> str:
    if not w.foreign:
        return f"the same window's gradient from earlier epochs is still in it: {RESET}"
    share = max(abs(w.observed[j] / w.expected) for j in w.foreign)
    trace = f", with {share:.3g} of an item's right weight" if share < 0.5 else ""
    return f"micro-batches {w.foreign} belong to earlier windows and are still in the gradient{trace}: {RESET}"


def _later(w: Weights) -> bool:
    # after the epoch's last window comes the next epoch's first
    is_last = w.index is not None and w.index == len(w.windows) - 1
    return _own_is_whole(w) and (w.epoch > 0 or is_last or not any(_earlier(w, j) for j in w.foreign))


def _later_text(w: Weights, wrong: Steps) -> str:
    return (
        f"micro-batches {w.foreign} belong to a later window and are in the gradient already: send a micro-batch "
        "backward after the step of the window before it"
    )


def _held(w: Weights) -> int | None:
    """Return the window whose right gradient a step has and nothing else, or None."""
    found = units(w)
    if found is None or np.count_nonzero(found) != 1:
        return None
    (window,) = np.flatnonzero(found)
    return int(window) if w.close(found[window], 1.0) else None


def _delayed(windows: int) -> Pattern:
    def fits(w: Weights) -> bool:
        assert w.index is not None
        if w.epoch * len(w.windows) + w.index < windows:
            # a delay begins with nothing, or with gradients that are used again later
            return not w.observed.any() or w.is_right
        return _held(w) == (w.index - windows) % len(w.windows)

    how_far = "the window before" if windows == 1 else f"{windows} windows before"
    return Pattern(
        "delayed-window",
        lambda w: bool(w.windows) and fits(w),
        lambda w, wrong: (
            f"the step holds the gradient of {how_far}, and not its own: read the gradient after it has been computed "
            "or communicated"
        ),
        # one window that stands in for all looks the same where only the first two are seen
        tells=lambda w: bool(w.index and w.index >= windows + 1 and not w.epoch),
        informs=lambda w: bool(w.foreign),
    )


def _one_window(w: Weights) -> bool:
    return bool(w.windows) and _held(w) is not None


def _wrong_window_text(w: Weights, wrong: Steps) -> str:
    held = [f"window {i} at window {v.index}" for v in wrong[:4] if v.windows and (i := _held(v)) is not None]
    kept = ""
    if all(v.epoch or (_held(v) or 0) < (v.index or 0) for v in wrong if v.windows):
        kept = ", and look for a buffer that keeps the gradients of an earlier one"
    return (
        f"the step holds the gradient of another window than its own ({', '.join(dict.fromkeys(held))}): train the "
        f"windows in the loader's order, each once{kept}"
    )


def _shifted(distance: Callable[[Weights], int]) -> Pattern:
    """The pattern of windows that begin and end so many micro-batches later than they should."""

    def fits(w: Weights) -> bool:
        by = distance(w)
        if not w.windows or not by:
            return False
        wanted = {j + by for j in w.window}
        if w.epoch == 0:
            wanted = {j for j in wanted if j >= 0}
        wrapped = {j % len(w.counts) for j in wanted}
        past = {j % len(w.counts) for j in wanted if j < len(w.counts)}
        seen = {j for j in range(len(w.counts)) if w.observed[j]}
        counted = {j for j, n in enumerate(w.counts) if n}
        # at the run's end nothing may follow
        return seen in (wrapped & counted, past & counted)

    def sentence(w: Weights, wrong: Steps) -> str:
        by = distance(w)
        return (
            f"windows begin and end {abs(by)} micro-batch{'es' if abs(by) > 1 else ''} too "
            f"{'early' if by < 0 else 'late'}, so the step holds {[j for j in range(len(w.counts)) if w.observed[j]]} "
            f"where it should hold {list(w.window)}: step after the window's last backward, on the batch that was just "
            "fetched"
        )

    return Pattern("shifted-window", fits, sentence, informs=lambda w: bool(w.foreign and np.any(w.ratio)))


def _mixed_text(w: Weights, wrong: Steps) -> str:
    return f"micro-batches {listed(w.foreign, 6)} of other windows are in the gradient beside or in place of its own"


def _own_is_there(w: Weights) -> bool:
    return bool(w.foreign) and bool(np.all(w.ratio != 0))


def outside(accumulation_steps: int) -> tuple[Pattern, ...]:
    """Return the patterns of other windows; shifts reach up to `accumulation_steps`."""
    shifts = [_shifted(lambda w, by=sign * by: by) for by in range(1, accumulation_steps) for sign in (-1, 1)]  # type: ignore
    # a step at i % K == 0 comes K - 1 too early, whatever K is
    shifts += [_shifted(lambda w: 1 - w.accumulation_steps), _shifted(lambda w: w.accumulation_steps - 1)]
    return (
        Pattern("stale-window", _stale, _stale_text),
        Pattern(
            "later-window",
            _later,
            _later_text,
            informs=lambda w: w.epoch == 0 and any(j > w.window[-1] for j in w.foreign),
        ),
        *(_delayed(windows) for windows in range(1, FARTHEST + 1)),
        *shifts,
        Pattern("other-window", _one_window, _wrong_window_text, 1),
        # a window whose own weights are wrong as well
        Pattern(
            "stale-window",
            lambda w: _own_is_there(w) and (w.epoch > 0 or all(_earlier(w, j) for j in w.foreign)),
            lambda w, wrong: f"{_stale_text(w, wrong)}; the window's own weights are wrong as well",
            2,
        ),
        Pattern(
            "later-window",
            lambda w: _own_is_there(w) and w.epoch == 0 and not any(_earlier(w, j) for j in w.foreign),
            lambda w, wrong: f"{_later_text(w, wrong)}; the window's own weights are wrong as well",
            2,
        ),
        Pattern("other-window", lambda w: bool(w.foreign), _mixed_text, 3),
    )


def averaged(steps: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of a step's gradient that is added to a share of the gradient of the step before it.

    Args:
        steps: of one run or of two, right ones as well.
    """
    shares: set[tuple[float, float]] = set()
    runs: dict[object, dict[int, Weights]] = {}
    for w in steps:
        runs.setdefault((w.windows, w.counts), {})[w.epoch * len(w.windows) + (w.index or 0)] = w
    for run in runs.values():
        for step, w in run.items():
            before = run.get(step - 1)
            right = np.zeros(len(w.counts))
            right[w.inside] = w.expected
            if step == 0:
                continue
            if before is None or not before.observed.any() or not w.windows:
                return ()
            (own, kept), _, rank, _ = np.linalg.lstsq(np.stack([right, before.observed]).T, w.observed, rcond=1e-9)
            if rank < 2:
                continue
            close = 1e-6 * np.abs(w.observed).max(initial=0.0)
            if (np.abs(own * right + kept * before.observed - w.observed) > close).any() or abs(kept) < 1e-6:
                return ()
            shares.add((round(float(own), 6), round(float(kept), 6)))
    if len(shares) != 1:
        return ()
    ((own, kept),) = shares
    if own in (0, 1):
        return ()  # a delay, or nothing but an incomplete reset
    said = (
        f"each step's gradient is {own:g} times its own window's, plus {kept:g} times that of the step before it: a "
        "moving average or a momentum is kept in the gradient; hand the optimizer the window's own gradient"
    )
    return (Pattern("stale-window", lambda w: True, lambda w, wrong: said, -1),)


def reordered(steps: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of epochs whose micro-batches are dealt to its windows in another order than the loader's.

    Args:
        steps: of one run or of two, right ones as well.
    """
    epochs: dict[object, list[Weights]] = {}
    for w in steps:
        epochs.setdefault((w.windows, w.counts, w.epoch), []).append(w)
    for epoch in epochs.values():
        counted = np.array([n != 0 for n in epoch[0].counts])
        held = np.stack([w.observed[counted] != 0 for w in epoch])
        if len(epoch) != len(epoch[0].windows) or not (held.sum(axis=0) == 1).all():
            return ()
    if max(map(len, epochs.values())) < 3:
        return ()  # two windows may just be exchanged
    said = (
        "each micro-batch of an epoch is in one step, and some in another window than their own: the loop trains them "
        "in another order than the loader yields them; shuffle or sort the data before the loader, or within a window"
    )
    return (Pattern("other-window", lambda w: True, lambda w, wrong: said, 2, informs=lambda w: bool(w.foreign)),)
