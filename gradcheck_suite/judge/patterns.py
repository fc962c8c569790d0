"""The patterns of weights that known faults give, each a statement about every step of a run.

A pattern fits a step or does not. Which fault it is, `naming` decides from all steps of one or two runs: a pattern must
fit all that are wrong, also where its rivals differ from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradcheck_suite.judge.weights import (
    Array,
    Steps,
    Weights,
    alone,
    dropped_text,
    listed,
    more_than_one,
    more_than_two,
    repeated,
    repeated_text,
    some_dropped,
    some_missing,
)

SHARES = "divide each summed loss by the window's count (mean loss * count of the micro-batch / count of the window)"
FORMATS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Precision of the formats that weights may have been rounded to, in binary digits, the narrowest first."""
MOST_DECIMALS = 6


@dataclass(frozen=True)
class Pattern:
    """A known fault's pattern of weights.

    Attributes:
        name: of the fault.
        fits: whether a step's weights are the pattern's.
        sentence: what the loop did and what to do; or a function of the violated step and all steps that are wrong.
        priority: patterns of a lower number are more special, and win where they fit.
        tells: whether a wrong step separates the pattern from those of the next number; they are given as well where no
            step does.
        informs: whether a wrong step shows the pattern at all; at least one must.
    """

    name: str
    fits: Callable[[Weights], bool]
    sentence: str | Callable[[Weights, Steps], str]
    priority: int = 0
    tells: Callable[[Weights], bool] = lambda w: True
    informs: Callable[[Weights], bool] = lambda w: True

    def text(self, violated: Weights, wrong: Steps) -> str:
        """Return the sentence."""
        return self.sentence if isinstance(self.sentence, str) else self.sentence(violated, wrong)


def _unequal_counts(w: Weights) -> bool:
    return len({w.counts[j] for j in w.inside}) > 1


def units(w: Weights) -> Array | None:
    """Return (windows,): the multiple of each window's right gradient, or None where a window has no single one."""
    found = []
    for window in w.windows:
        counted = [j for j in window if w.counts[j] and j not in w.unread]
        if not counted:
            return None
        right = 1.0 if w.reduction == "sum" else 1.0 / w.count_of(window)
        multiples = w.observed[counted] / right
        if not w.close(multiples, multiples.mean()):
            return None
        found.append(float(multiples.mean()))
    return np.array(found)


# Weights inside the window


def _is_mean(w: Weights, share: float | None = None) -> bool:
    """Whether the means of the window's micro-batches have one weight, which is `share` if given."""
    means = w.per_mean
    return not w.foreign and bool(np.all(means != 0)) and w.close(means, means.mean() if share is None else share)


def _means(share: Callable[[Weights], float | None], text: Callable[[Weights], str], priority: int = 0) -> Pattern:
    def sentence(w: Weights, wrong: Steps) -> str:
        if w.reduction == "sum":
            return (
                f"each micro-batch's mean has weight {float(w.per_mean.mean()):.6g}, whatever its count, where sums "
                "are to be added up: do not divide a summed loss by the micro-batch's count"
            )
        short = f", in a window of {len(w.window)}" if len(w.window) != w.accumulation_steps * w.world_size else ""
        return f"each micro-batch's mean has weight {text(w)}, whatever its count{short}: {SHARES}"

    return Pattern("mean-of-means", lambda w: _is_mean(w, share(w)), sentence, priority, informs=_unequal_counts)


def _by_one_count(place: int, word: str) -> Pattern:
    """The pattern of means that all weigh what one micro-batch of the window should."""

    def share(w: Weights) -> float:
        return w.counts[w.window[place]] / w.window_count

    return Pattern(
        "wrong-count",
        lambda w: w.reduction == "mean" and _is_mean(w, share(w)),
        f"each micro-batch's mean is weighted by the count of the window's {word} micro-batch, and not by its own: "
        f"look for a count that is read {'late' if place else 'once'}, as from a variable that later ones share",
        informs=lambda w: (
            _unequal_counts(w) and not any(w.close(share(w), 1 / n) for n in (len(w.window), w.accumulation_steps))
        ),
    )


def _groups(w: Weights, *, added: bool = False) -> int | None:
    """Return the number of ranks whose own means are averaged, or added, micro-batches dealt to them in turn."""
    if w.foreign or w.reduction == "sum":
        return None
    place = {j: i for i, j in enumerate(w.window)}
    for ranks in range(2, max(3, len(w.window))):
        counts = [w.count_of(w.window[r::ranks]) for r in range(ranks)]
        shared = 1 if added else sum(1 for count in counts if count)
        right = [1 / (shared * counts[place[j] % ranks]) for j in w.inside]
        if w.close(w.observed[w.inside], right):
            return ranks
    return None


def _counts_items(w: Weights) -> bool:
    """Whether means are weighted by their numbers of items, where those are not what the means divide by."""
    if not w.items or w.reduction == "sum" or w.foreign:
        return False
    items = np.array([w.items[j] for j in w.inside])
    return w.close(w.per_mean, items / sum(w.items[j] for j in w.window))


def _counts_whole(w: Weights) -> bool:
    """Whether means are weighted by their counts made whole numbers."""
    if w.reduction == "sum" or w.foreign or all(w.counts[j] == int(w.counts[j]) for j in w.inside):
        return False
    return any(
        w.close(w.per_mean, np.array([whole(w.counts[j]) for j in w.inside]) / total)
        for whole in (math.floor, round, math.ceil)
        for total in (sum(whole(w.counts[j]) for j in w.window), w.window_count, whole(w.window_count))
        if total
    )


def _power_of_count(power: int) -> Callable[[Weights], bool]:
    def fits(w: Weights) -> bool:
        own = np.array([w.counts[j] for j in w.inside]) ** float(power)
        scaled = w.ratio / own
        return not w.foreign and bool(np.all(scaled != 0)) and w.close(scaled, scaled.mean())

    return fits


def rounded_to(w: Weights) -> str | None:
    """Return the format that the right weights seem to have been rounded to, or None."""
    if w.foreign or not len(w.inside):
        return None
    off = float(np.abs(w.ratio - 1).max())
    for name, digits in FORMATS.items():
        if off > 4 * 2.0**-digits:
            continue
        for values in (w.observed[w.inside], w.per_mean):
            mantissa, _ = np.frexp(values)
            scaled = mantissa * 2.0**digits
            if np.abs(scaled - np.round(scaled)).max() <= 2.0**digits * 2.0**-50:
                return name
    if w.reduction == "mean":
        right = w.expected * np.array([w.counts[j] for j in w.inside])
        for decimals in range(1, MOST_DECIMALS + 1):
            if w.close(w.per_mean, np.round(right, decimals)):
                return f"{decimals} decimal{'s' if decimals > 1 else ''}"
    return None


def _countdown(count: int) -> str:
    return " and ".join(str(n) for n in range(count, 0, -1)) if count < 3 else f"{count}, {count - 1}, ..., 1"


INSIDE: tuple[Pattern, ...] = (
    Pattern(
        "no-gradient",
        lambda w: not w.foreign and not np.any(w.ratio),
        "nothing of the window is in the gradient: it was reset before the step",
        # what cannot be read may be there
        tells=lambda w: w.inside == list(w.window),
    ),
    _means(lambda w: 1 / len(w.window), lambda w: f"1/{len(w.window)}"),
    _means(lambda w: 1 / w.accumulation_steps, lambda w: f"1/{w.accumulation_steps}"),
    _by_one_count(-1, "last"),
    _by_one_count(0, "first"),
    Pattern(
        "mean-of-means",
        lambda w: _groups(w) is not None,
        lambda w, wrong: (
            f"the micro-batches are dealt to {_groups(w)} groups, as to ranks, and the groups' means have one weight "
            f"whatever their counts: {SHARES}"
        ),
        informs=_unequal_counts,
    ),
    Pattern(
        "mean-of-means",
        lambda w: _groups(w, added=True) is not None,
        lambda w, wrong: (
            f"the micro-batches are dealt to {_groups(w, added=True)} groups, as to tasks or ranks, and the groups' "
            f"means are added up, each with a count of its own: {SHARES}"
        ),
        informs=lambda w: len(w.inside) > 2,
    ),
    Pattern(
        "wrong-scale",
        lambda w: w.reduction == "mean" and _is_mean(w, 1.0),
        lambda w, wrong: f"each micro-batch's mean has weight 1, {len(w.window)} times the mean of means: {SHARES}",
        informs=_unequal_counts,
    ),
    Pattern(
        "wrong-count",
        _counts_items,
        "micro-batches' means are weighted as if every item of theirs counted alike, which here it does not: "
        "weight each by run.count(batch) over the window's count",
    ),
    Pattern(
        "wrong-count",
        lambda w: w.is_right or _counts_whole(w),
        "micro-batches' means are weighted by their counts made whole numbers, and a count may be a fraction, as a "
        "sum of class weights is: weight each by run.count(batch) as it is",
    ),
    *(
        Pattern(
            "wrong-count",
            _power_of_count(power),
            f"{how} its micro-batch's count: {SHARES}",
            informs=_unequal_counts,
        )
        for power, how in (
            (1, "an item's weight is proportional to"),
            (-2, "an item's weight is divided by the square of"),
        )
    ),
    Pattern(
        "low-precision",
        lambda w: w.is_right or rounded_to(w) is not None,
        lambda w, wrong: (
            f"the weights have a relative error of {np.abs(w.ratio - 1).max():.1g}, and are rounded to "
            f"{rounded_to(w)}: compute counts, quotients and sums in the loss's dtype or in Python floats"
        ),
    ),
    Pattern(
        "repeated-micro-batch",
        lambda w: not w.foreign and w.close(w.ratio, np.arange(len(w.inside), 0, -1)),
        lambda w, wrong: (
            f"the window's micro-batches are in the gradient {_countdown(len(w.inside))} times: "
            "the running sum of the losses goes through backward each time; send each loss through once"
        ),
        tells=more_than_two,
        informs=more_than_one,
    ),
    Pattern(
        "reset-inside-window",
        alone(-1),
        "only the window's last micro-batch is in the gradient: reset once per window, not per micro-batch, and "
        "add to the gradient, do not assign it",
        tells=more_than_two,
        informs=more_than_one,
    ),
    Pattern(
        "first-only",
        alone(0),
        "only the window's first micro-batch is in the gradient: look for what excludes the later ones (a flag, "
        "no_sync, a detached graph)",
        tells=more_than_two,
        informs=more_than_one,
    ),
    *(
        Pattern(
            "repeated-micro-batch",
            alone(place, for_all=True),
            lambda w, wrong, word=word, why=why: (  # type: ignore[misc]
                f"the window's {word} micro-batch is in the gradient {len(w.inside)} times, and the others not at all: "
                f"{why}"
            ),
            tells=more_than_two,
            informs=more_than_one,
        )
        for place, word, why in (
            (-1, "last", "look for a closure that reads the loop's variable late"),
            (0, "first", "look for an iterator that is made anew for each micro-batch"),
        )
    ),
    _means(lambda w: None, lambda w: f"{float(w.per_mean.mean()):.6g}", 1),
    Pattern("dropped-micro-batch", some_dropped, dropped_text, 1),
    Pattern("repeated-micro-batch", repeated, repeated_text, 1, informs=lambda w: not w.close(w.ratio, w.ratio[0])),
    Pattern("dropped-micro-batch", some_missing, dropped_text, 2),
)
"""Patterns of the window's own micro-batches."""


def _by_count_of(w: Weights, away: int) -> bool:
    """Whether means are weighted by the counts of the micro-batches so many places away, over the window's count.

    The window's first or last micro-batch, which has none there, may have any weight.
    """
    if w.foreign or w.reduction == "sum" or len(w.inside) != len(w.window) or len(w.window) < 2:
        return False
    counts = np.roll([w.counts[j] for j in w.window], away) / w.window_count
    kept = slice(away, None) if away > 0 else slice(None, away)
    return w.close(w.per_mean[kept], counts[kept])


NEIGHBOURS = tuple(
    Pattern(
        "wrong-count",
        lambda w, away=away: _by_count_of(w, away),  # type: ignore[misc]
        f"each micro-batch's mean is weighted by the count of the micro-batch {where} it: {SHARES}",
        informs=lambda w: more_than_two(w) and len({w.counts[j] for j in w.inside}) > 1,
    )
    for away, where in ((1, "before"), (-1, "after"))
)
"""One for the count of the micro-batch before, as of a variable that is updated late, and one for that of the next."""


# Steps that hold micro-batches of other windows, beside their own or in their place.


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
    # in later epochs, whose items are the same, a gradient of another window may come from either side
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
        "other-window",
        lambda w: bool(w.windows) and fits(w),
        f"the step holds the gradient of {how_far}, and not its own: read the gradient after it has been computed "
        "or communicated",
        # one window that stands in for all looks the same where only the first two are seen
        tells=lambda w: bool(w.index and w.index >= windows + 1 and not w.epoch),
        informs=lambda w: bool(w.foreign),
    )


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

    return Pattern("wrong-windows", fits, sentence, informs=lambda w: bool(w.foreign and np.any(w.ratio)))


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
            "other-window",
            _later,
            _later_text,
            informs=lambda w: w.epoch == 0 and any(j > w.window[-1] for j in w.foreign),
        ),
        *(_delayed(windows) for windows in range(1, FARTHEST + 1)),
        *shifts,
        Pattern("other-window", lambda w: bool(w.windows) and _held(w) is not None, _wrong_window_text, 1),
        # a window whose own weights are wrong as well
        Pattern(
            "stale-window",
            lambda w: _own_is_there(w) and (w.epoch > 0 or all(_earlier(w, j) for j in w.foreign)),
            lambda w, wrong: f"{_stale_text(w, wrong)}; the window's own weights are wrong as well",
            2,
        ),
        Pattern(
            "other-window",
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
    return (Pattern("stale-window", lambda w: True, said, -1),)


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
    return (Pattern("other-window", lambda w: True, said, 2, informs=lambda w: bool(w.foreign)),)


# Weights that depend on a micro-batch's place in its window, read off the longest one.


def _grows(w: Weights, step: float) -> bool:
    """Whether each micro-batch weighs so many times the one before it, by sums or by means."""
    if w.foreign or not len(w.inside) or np.any(w.ratio == 0):
        return False
    return any(w.close(values[1:] / values[:-1], step) for values in (w.ratio, w.per_mean))


def rescaled(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the patterns of a sum that is rescaled at every micro-batch: by K, or by what a long window shows."""
    steps: list[tuple[Callable[[Weights], float], Callable[[Weights], bool]]] = [
        # two micro-batches have some factor in any case: here it must be K, of means that weigh 1/K and less
        (
            lambda w: w.accumulation_steps,
            lambda w: w.close(w.per_mean[-2:], [w.accumulation_steps**-2, w.accumulation_steps**-1]),
        )
    ]
    longest = max(wrong, key=lambda w: len(w.inside))
    if len(longest.inside) > 2 and not np.any(longest.ratio == 0):
        k, size = longest.accumulation_steps, len(longest.window)
        for values, by_mean in ((longest.ratio, False), (longest.per_mean, True)):
            step, last = float(values[-1] / values[-2]), abs(float(values[-1]))
            # the latest contribution has its own weight, or was rescaled once
            usual = (1.0, 1 / k, 1 / size) if by_mean else (1.0, 1 / step if step else 1.0)
            if step > 0 and not longest.close(step, 1.0) and any(longest.close(last, share) for share in usual):
                steps.append((lambda w, step=step: step, lambda w: True))  # type: ignore[misc]

    def pattern(step: Callable[[Weights], float], last: Callable[[Weights], bool]) -> Pattern:
        return Pattern(
            "rescaled-accumulator",
            lambda w: w.is_right or (_grows(w, step(w)) and (len(w.inside) < 2 or last(w))),
            lambda w, wrong: (
                f"each micro-batch weighs {step(w):.6g} times the one before it: the running sum itself is rescaled at "
                "every micro-batch; scale each contribution instead"
            ),
            informs=more_than_one,
        )

    return tuple(pattern(*step) for step in steps)


def by_place(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of weights that the micro-batches' places in their windows determine, where they do."""
    longest = max(wrong, key=lambda w: len(w.inside))
    factors = longest.ratio
    if len(factors) < 3 or len(factors) < len(longest.window) or np.any(factors == 0):
        return ()
    # whole factors say how often a micro-batch went backward
    if longest.foreign or longest.close(factors, factors[0]) or longest.close(factors, np.round(factors)):
        return ()

    def fits(w: Weights) -> bool:
        places = [w.window.index(j) for j in w.inside]
        return not w.foreign and max(places, default=0) < len(factors) and w.close(w.ratio, factors[places])

    shown = ", ".join(f"{factor:.6g}" for factor in factors[:4]) + (", ..." if len(factors) > 4 else "")
    return (
        Pattern(
            "weighted-by-place",
            fits,
            f"a micro-batch's weight depends on its place in the window: {shown} times what it should be for the "
            f"first and those after it, whatever they count: {SHARES}",
            2,
            informs=lambda w: w is not longest and len(w.inside) > 1,
        ),
    )


# Weights that faults between ranks give, for the gradient of any rank.


REDUCE_ONCE = "add up the gradients of all ranks once, after the last backward of the window and before the step"
GLOBAL_COUNT = "add up the counts over all ranks (all_reduce) and divide every rank's summed losses by the total"


def _owned(w: Weights) -> Array:
    """Return the rank of each micro-batch inside the window."""
    return np.array([w.owners[j] for j in w.inside])


def _several(w: Weights) -> bool:
    """Whether micro-batches of several ranks can be read in the window."""
    return len(set(_owned(w))) > 1


def _unequal_counts_of_ranks(w: Weights) -> bool:
    return len({w.count_of_rank(rank) for rank in set(_owned(w))}) > 1


def _ranks_means(share: Callable[[Weights], float]) -> Callable[[Weights], bool]:
    """Whether each rank's own mean has a weight."""

    def fits(w: Weights) -> bool:
        if w.foreign or w.reduction == "sum" or not len(w.inside):
            return False
        return w.close(w.observed[w.inside], [share(w) / w.count_of_rank(rank) for rank in _owned(w)])

    return fits


def _only_one_rank(w: Weights) -> int | None:
    """Return the rank whose micro-batches alone are in its gradient, or None."""
    present = set(_owned(w)[w.ratio != 0])
    # where all ranks have the same gradient, it was added up, and what is missing in it has another reason
    if w.alike or w.foreign or len(present) != 1:
        return None
    (rank,) = present
    return int(rank) if np.all(w.ratio[_owned(w) == rank]) else None


def _complete_rank(w: Weights) -> int | None:
    """Return the rank whose micro-batches are all in its gradient, where some of the other ranks' are missing; or None.

    Those that were not averaged over ranks weigh as many times too much as there are ranks.
    """
    if w.alike or w.foreign:
        return None
    right, gone = np.isclose(w.ratio, 1, rtol=w.tolerance, atol=0), w.ratio == 0
    whole = right | np.isclose(w.ratio, w.world_size, rtol=w.tolerance, atol=0)

    def is_complete(rank: int) -> bool:
        own = _owned(w) == rank
        return bool(np.all(whole[own]) and np.all((right | gone)[~own]) and np.any(gone[~own]))

    complete = [int(rank) for rank in set(_owned(w)) if is_complete(int(rank))]
    return complete[0] if len(complete) == 1 else None


def _dropped_ranks(w: Weights) -> list[int]:
    """Return the ranks of which nothing is in the gradient, where all of the others' is right and was added up."""
    ranks = sorted(set(_owned(w)))
    dropped = [int(rank) for rank in ranks if not np.any(w.ratio[_owned(w) == rank])]
    # a gradient of one rank alone was added up only if all ranks have it
    if w.foreign or len(ranks) - len(dropped) < (1 if w.alike else 2):
        return []
    return dropped if w.close(w.ratio[~np.isin(_owned(w), dropped)], 1.0) else []


def _said_dropped(w: Weights, wrong: Steps) -> str:
    ranks = ", ".join(map(str, _dropped_ranks(w)))
    said = f"no micro-batch of rank {ranks} is in the gradient, and all of the others are: look for "
    if not w.alike:
        return f"{said}a process group that does not have all ranks"
    return f"{said}a broadcast in place of an all-reduce, a reduction that is no sum, a rank that adds zeros"


def _reduced_again(w: Weights) -> bool:
    """Whether each of a rank's micro-batches weighs as many times the next one of its as there are ranks."""
    if w.foreign or not len(w.inside):
        return False
    powers = np.zeros(len(w.inside))
    for rank in set(_owned(w)):
        own = np.flatnonzero(_owned(w) == rank)
        powers[own] = np.arange(len(own))[::-1]
    scaled = w.ratio / float(w.world_size) ** powers
    return bool(np.all(scaled != 0)) and w.close(scaled, scaled[0])


def _longer(w: Weights) -> bool:
    owners = list(_owned(w))
    return any(owners.count(rank) > 1 for rank in set(owners))


def _some_of_others(w: Weights) -> bool:
    """Whether micro-batches of several ranks are in the gradient, though not all of them."""
    return len(set(_owned(w)[w.ratio != 0])) > 1 and not np.all(w.ratio)


def _said_alone(w: Weights, wrong: Steps) -> str:
    return (
        f"only rank {_only_one_rank(w)}'s micro-batches are in the gradient: it was not added up over the ranks; look "
        "for a last micro-batch whose forward runs under no_sync (DistributedDataParallel decides in the forward "
        "whether backward reduces), a rank that leaves out its all-reduce, one that is not "
        f"waited for, a buffer that is no longer the gradient's; {REDUCE_ONCE}"
    )


def _said_partly(w: Weights, wrong: Steps) -> str:
    missing = [j for j, ratio in zip(w.inside, w.ratio, strict=True) if not ratio]
    some = f"micro-batches {listed(missing)} of other ranks are"
    if len(missing) == 1:
        some = f"micro-batch {missing[0]} of another rank is"
    return (
        f"rank {_complete_rank(w)}'s micro-batches are all in the gradient, and {some} not: the gradients were added "
        f"up at another time than after the last backward; {REDUCE_ONCE}"
    )


def by_rank(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of weights that micro-batches' ranks determine, where they do."""
    longest = max(wrong, key=lambda w: len(w.inside))
    if longest.foreign or not _several(longest):
        return ()
    factors = {rank: float(longest.ratio[_owned(longest) == rank][0]) for rank in sorted(set(_owned(longest)))}
    scaled = {rank: factor for rank, factor in factors.items() if not longest.close(factor, 1.0)}
    if not scaled or len(scaled) == len(factors) or not all(scaled.values()):
        return ()
    said = " and ".join(f"those of rank {rank} weigh {factor:.6g} times" for rank, factor in scaled.items())
    return (
        Pattern(
            "wrong-scale",
            lambda w: not w.foreign and w.close(w.ratio, [factors.get(rank, np.nan) for rank in _owned(w)]),
            f"of the window's micro-batches {said} what they should, and the other ranks' are right: look for what "
            "a rank does to its losses or gradients before the gradients are added up",
            2,
            informs=_longer,
        ),
    )


RANKS: tuple[Pattern, ...] = (
    Pattern("not-reduced", lambda w: _only_one_rank(w) is not None, _said_alone, -1, informs=_several),
    Pattern("not-reduced", lambda w: bool(_dropped_ranks(w)), _said_dropped, -1),
    Pattern("not-reduced", lambda w: _complete_rank(w) is not None, _said_partly, -1, informs=_some_of_others),
    *(
        Pattern(
            "mean-of-means",
            _ranks_means(share),
            f"each rank's mean has weight {text}, whatever its count, as where ranks divide by their own counts "
            f"and gradients are averaged: {GLOBAL_COUNT}",
            -1,
            informs=_unequal_counts_of_ranks,
        )
        for share, text in (
            (lambda w: 1 / w.world_size, "one over the number of ranks"),
            (lambda w: 1 / len(set(_owned(w))), "one over the number of ranks that have targets"),
        )
    ),
    Pattern(
        "mean-of-means",
        _ranks_means(lambda w: 1.0),
        f"each rank divides by its own count, and the gradients are added up: {GLOBAL_COUNT}",
        -1,
        informs=_unequal_counts_of_ranks,
    ),
    Pattern(
        "rescaled-accumulator",
        _reduced_again,
        lambda w, wrong: (
            f"each of a rank's micro-batches weighs {w.world_size} times its next one: the running sum goes through an "
            f"all-reduce at every micro-batch, which adds up what is already the sum of all ranks; {REDUCE_ONCE}"
        ),
        -1,
        informs=_longer,
    ),
)
"""Patterns of a window that several ranks share; they apply where the owners of micro-batches are known.

They are more special than the patterns of one rank, which describe micro-batches in an order that those of several
ranks do not have."""
