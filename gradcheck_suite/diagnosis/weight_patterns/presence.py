"""Which micro-batches of the window are in the gradient, and how often: none, one, some, or some several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.weights import Weights

Steps = Sequence[Weights]

MOST_TIMES = 64
"""How often a micro-batch may be there to be called repeated."""


def more_than_two(w: Weights) -> bool:
    """Whether more than two of the window's micro-batches can be read."""
    return len(w.inside) > 2


def more_than_one(w: Weights) -> bool:
    """Whether more than one of the window's micro-batches can be read."""
    return len(w.inside) > 1


def alone(place: int) -> Callable[[Weights], bool]:
    """Whether the window's first (0) or last (-1) micro-batch alone is there, with a weight that it may well have."""

    def fits(w: Weights) -> bool:
        ratio = w.ratio
        if w.foreign or not len(ratio) or not ratio[place] or np.count_nonzero(ratio) != 1:
            return False
        mean = w.per_mean[place]
        return any(w.close(*pair) for pair in ((ratio[place], 1), (mean, 1 / w.accumulation_steps), (mean, 1))) or (
            w.close(mean, 1 / len(w.window))
        )

    return fits


def alone_for_all(place: int) -> Callable[[Weights], bool]:
    """Whether the window's first or last micro-batch stands for all of them."""

    def fits(w: Weights) -> bool:
        ratio = w.ratio
        return bool(
            not w.foreign
            and len(ratio) > 1
            and bool(ratio[place])
            and np.count_nonzero(ratio) == 1
            and w.close(ratio[place], len(ratio))
        )

    return fits


def some_dropped(w: Weights) -> bool:
    """Whether some micro-batches are missing, and the others have one weight, by sums or by means."""
    for values in (w.ratio, w.per_mean):
        kept = values[values != 0]
        if not w.foreign and len(kept) < len(values) and (not len(kept) or w.close(kept, kept[0])):
            return True
    return False


def some_missing(w: Weights) -> bool:
    """Whether some micro-batches are missing and some are there, with any weights."""
    return not w.foreign and bool(0 < np.count_nonzero(w.ratio) < len(w.ratio))


def repeated(w: Weights) -> bool:
    """Whether some micro-batches are there several times, or a second time by their means, and others perhaps not."""
    if w.foreign:
        return False
    ratio = w.ratio
    if w.close(np.where(ratio == 0, 1, ratio), np.maximum(np.round(ratio), 1)):
        return bool((ratio > 1.5).any() and (ratio <= MOST_TIMES).all())
    extra = w.per_mean * (1 - 1 / np.where(ratio == 0, 1, ratio))
    more = ~np.isclose(ratio, 1, rtol=w.tolerance, atol=0)
    return bool(more.any()) and any(
        w.close(extra[more], share) for share in (1.0, 1 / len(w.window), 1 / w.accumulation_steps)
    )


def places(w: Weights, chosen: Callable[[float], bool]) -> tuple[int, ...]:
    """Return which of the window's micro-batches have a ratio that is chosen, by their place in the window."""
    return tuple(w.window.index(j) for j, ratio in zip(w.inside, w.ratio, strict=True) if chosen(float(ratio)))


def dropped_text(w: Weights, wrong: Steps) -> str:
    """Return which micro-batches are missing, and what usually drops these."""
    gone = {places(v, lambda ratio: ratio == 0) for v in wrong}
    missing = [j for j, ratio in zip(w.inside, w.ratio, strict=True) if ratio == 0]
    said = f"micro-batches {missing} of the window are not in the gradient"
    last = {tuple(range(len(v.window) - 1, len(v.window))) for v in wrong}
    several = any(more_than_two(v) for v in wrong)
    if any((v.ratio > 1 + v.tolerance).any() and not some_dropped(v) for v in wrong):
        more = "and others weigh more than they should: look for micro-batches that are sampled with replacement"
        return f"{said}, {more}, or that stand in for others"
    if several and gone == {(0,)}:
        why = "look for a reset after its backward, or for what takes it away before the loop"
        return f"{said}, in every wrong window the first: {why}"
    if several and all(places(v, lambda ratio: ratio == 0) == (len(v.window) - 1,) for v in wrong) and last:
        return f"{said}, in every wrong window the last: look for a loop that ends one early"
    if several and all(places(v, lambda ratio: ratio == 0) == tuple(range(1, len(v.window), 2)) for v in wrong):
        return f"{said}, in every wrong window each second one: the iterator is advanced twice"
    if several and all(_has_twin(v) for v in wrong):
        return f"{said}, and each has the count of another in its window: look for what is kept by size or by value"
    return f"{said}{_in_common(wrong)}: look for a `continue`, a `break` or a reset between them"


def _has_twin(w: Weights) -> bool:
    kept = {w.counts[j] for j, ratio in zip(w.inside, w.ratio, strict=True) if ratio}
    return all(w.counts[j] in kept for j, ratio in zip(w.inside, w.ratio, strict=True) if not ratio)


def repeated_text(w: Weights, wrong: Steps) -> str:
    """Return which micro-batches are there several times, how often, and which are missing."""
    twice = [j for j, ratio in zip(w.inside, w.ratio, strict=True) if ratio > 1 and not w.close(ratio, 1)]
    gone = [j for j, ratio in zip(w.inside, w.ratio, strict=True) if ratio == 0]
    times = sorted({f"{ratio:.6g}" for ratio in w.ratio if ratio > 1 and not w.close(ratio, 1)})
    said = f"micro-batches {twice} of the window are in the gradient {' or '.join(times)} times"
    said = said.replace(" 2 times", " twice")
    said += f"{f', and {gone} not at all' if gone else ''}{_in_common(wrong)}"
    if any(more_than_one(v) for v in wrong) and all(_weighs_its_number(v) for v in wrong):
        return (
            f"{said}, as often as the window has micro-batches: multiply no loss by them, and send each backward once"
        )
    return f"{said}: send each loss backward once, and multiply none"


def _weighs_its_number(w: Weights) -> bool:
    more = w.ratio[w.ratio > 1.5]
    return any(w.close(more, float(number)) for number in (len(w.window), w.accumulation_steps))


def _in_common(wrong: Steps) -> str:
    """Return the size that all wrong micro-batches of several steps have and no right one, as a part of a sentence."""
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for w in wrong if all(w.items for w in wrong) else ():
        for j, ratio in zip(w.inside, w.ratio, strict=True):
            sizes[w.close(ratio, 1.0)].add(w.items[j])
    if len(wrong) < 2 or len(sizes[False]) != 1 or sizes[False] & sizes[True] or not sizes[True]:
        return ""
    (size,) = sizes[False]
    return f"; in {len(wrong)} wrong steps they all have {size} item{'s' if size > 1 else ''}, and no right one has"
