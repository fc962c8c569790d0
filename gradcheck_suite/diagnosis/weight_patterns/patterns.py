"""The patterns of weights that known faults give, each a statement about every step of a run.

A pattern fits a step or does not. Which fault it is, `naming` decides from all steps of one or two runs: a pattern must
fit all that are wrong, also where its rivals differ from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.presence import (
    Steps,
    alone,
    alone_for_all,
    dropped_text,
    more_than_one,
    more_than_two,
    repeated,
    repeated_text,
    some_dropped,
    some_missing,
)
from gradcheck_suite.diagnosis.weight_patterns.weights import Array, Weights

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
        sentence: what the loop did and what to do, from the violated step and all steps that are wrong.
        rank: patterns of a lower rank are more special, and win where they fit.
        tells: whether a wrong step separates the pattern from those of the next rank; they are given as well where no
            step does.
        informs: whether a wrong step shows the pattern at all; at least one must.
    """

    name: str
    fits: Callable[[Weights], bool]
    sentence: Callable[[Weights, Steps], str]
    rank: int = 0
    tells: Callable[[Weights], bool] = lambda w: True
    informs: Callable[[Weights], bool] = lambda w: True


def _unequal(w: Weights) -> bool:
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


def _means(share: Callable[[Weights], float | None], text: Callable[[Weights], str], rank: int = 0) -> Pattern:
    def sentence(w: Weights, wrong: Steps) -> str:
        if w.reduction == "sum":
            return (
                f"each micro-batch's mean has weight {float(w.per_mean.mean()):.6g}, whatever its count, where sums "
                "are to be added up: do not divide a summed loss by the micro-batch's count"
            )
        short = f", in a window of {len(w.window)}" if len(w.window) != w.accumulation_steps * w.world_size else ""
        return f"each micro-batch's mean has weight {text(w)}, whatever its count{short}: {SHARES}"

    return Pattern("mean-of-means", lambda w: _is_mean(w, share(w)), sentence, rank, informs=_unequal)


def _by_one_count(place: int, word: str) -> Pattern:
    """The pattern of means that all weigh what one micro-batch of the window should."""

    def share(w: Weights) -> float:
        return w.counts[w.window[place]] / w.window_count

    return Pattern(
        "wrong-count",
        lambda w: w.reduction == "mean" and _is_mean(w, share(w)),
        lambda w, wrong: (
            f"each micro-batch's mean is weighted by the count of the window's {word} micro-batch, and not by its own: "
            f"look for a count that is read {'late' if place else 'once'}, as from a variable that later ones share"
        ),
        informs=lambda w: (
            _unequal(w) and not any(w.close(share(w), 1 / n) for n in (len(w.window), w.accumulation_steps))
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
        lambda w, wrong: "nothing of the window is in the gradient: it was reset before the step",
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
        informs=_unequal,
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
        informs=_unequal,
    ),
    Pattern(
        "wrong-count",
        _counts_items,
        lambda w, wrong: (
            "micro-batches' means are weighted as if every item of theirs counted alike, which here it does not: "
            "weight each by run.count(batch) over the window's count"
        ),
    ),
    Pattern(
        "wrong-count",
        lambda w: w.is_right or _counts_whole(w),
        lambda w, wrong: (
            "micro-batches' means are weighted by their counts made whole numbers, and a count may be a fraction, as a "
            "sum of class weights is: weight each by run.count(batch) as it is"
        ),
    ),
    *(
        Pattern(
            "weighted-by-count",
            _power_of_count(power),
            lambda w, wrong, how=how: f"{how} its micro-batch's count: {SHARES}",  # type: ignore[misc]
            informs=_unequal,
        )
        for power, how in (
            (1, "an item's weight is proportional to"),
            (-2, "an item's weight is divided by the square of"),
        )
    ),
    Pattern(
        "rounded-weights",
        lambda w: w.is_right or rounded_to(w) is not None,
        lambda w, wrong: (
            f"the weights have a relative error of {np.abs(w.ratio - 1).max():.1g}, and are rounded to "
            f"{rounded_to(w)}: compute counts, quotients and sums in the loss's dtype or in Python floats"
        ),
    ),
    Pattern(
        "running-loss",
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
        lambda w, wrong: (
            "only the window's last micro-batch is in the gradient: reset once per window, not per micro-batch, and "
            "add to the gradient, do not assign it"
        ),
        tells=more_than_two,
        informs=more_than_one,
    ),
    Pattern(
        "first-only",
        alone(0),
        lambda w, wrong: (
            "only the window's first micro-batch is in the gradient: look for what excludes the later ones (a flag, "
            "no_sync, a detached graph)"
        ),
        tells=more_than_two,
        informs=more_than_one,
    ),
    *(
        Pattern(
            "repeated-micro-batch",
            alone_for_all(place),
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
