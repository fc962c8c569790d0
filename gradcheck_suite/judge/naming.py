"""From the weights that steps gave to micro-batches to the name of the fault: one list of
predicates, the surest first.

A predicate must hold for every wrong step, of one run or of two, and one wrong step at least must
tell: have enough micro-batches, of enough different counts, that nothing further down the list
looks the same. What none fits is `unrecognised-weights`, with the numbers. A finer cause is part of
the sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, within
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.judge.weights import (
    Array,
    Diagnosis,
    Steps,
    Weights,
    dropped_text,
    factor_text,
    first_of,
    places,
    repeated_text,
)

Holds = Callable[[Weights], bool]
Text = Callable[[Weights, Steps], str]
FORMATS = {
    name: round(-math.log2(UNIT_ROUNDOFF[name])) for name in ("bfloat16", "float16", "float32")
}
"""Precision of the formats that weights may have been rounded to, in binary digits, the narrowest first."""
MOST_DECIMALS = 6
MOST_TIMES = 64
"""How often a micro-batch may be there to be called repeated."""
LEAST_LOSS_SCALE = 2**7  # torch.amp.GradScaler begins with 2**16
MOST_MEANINGS = 3
"""Meanings of one factor that are named: a reader of more has learnt nothing."""
EXACT = 1e-9
"""Relative error of numbers that are solved for."""


# What the numbers of one step say.


def _is_of_own_window(w: Weights) -> bool:
    return not w.foreign and bool(len(w.inside))


def _long(w: Weights) -> bool:
    return len(w.inside) > 2


def _several(w: Weights) -> bool:
    return len(w.inside) > 1


def _always(_: Weights) -> bool:
    return True


def _counts_inside(w: Weights) -> Array:
    return np.array([w.counts[j] for j in w.inside])


def _has_unequal_counts(w: Weights) -> bool:
    return len({*_counts_inside(w)}) > 1


def _ranks(w: Weights) -> Array:
    return np.array([w.owners[j] if w.owners else 0 for j in w.inside])


# a factor of 0 is a missing gradient, which other predicates name
def _is_one_factor(w: Weights, values: Array) -> bool:
    """Whether numbers of the micro-batches inside are all the same and not 0."""
    return _is_of_own_window(w) and bool(np.all(values != 0)) and w.close(values, values.mean())


def _right(w: Weights) -> npt.NDArray[np.bool_]:
    """Return (inside,): whether each micro-batch weighs what it should."""
    right: npt.NDArray[np.bool_] = np.isclose(
        w.ratio,
        1.0,
        rtol=w.tolerance,
        atol=0,
    )
    return right


def _no_gradient_text(w: Weights, wrong: Steps) -> str:
    return "nothing of the window is in the gradient: it was reset before the step"


# Means that are not weighted by their counts.


def _share(w: Weights) -> str:
    """Return the weight of the means of micro-batches, in words."""
    share = float(w.per_mean.mean())
    found = (n for n in (len(w.window), w.accumulation_steps) if w.close(share, 1 / n))
    return next((f"1/{n}" for n in found), f"{share:.6g}")


def _plausible_means(w: Weights) -> bool:
    """Whether the means of micro-batches have one weight that they may well have."""
    # 1 for sums of means, the rest for means of means: another number is a scale, not a forgotten
    # count
    plausible = {
        1,
        len(w.window),
        w.accumulation_steps,
        w.accumulation_steps * w.world_size,
        len(w.inside),
    }
    # a sum has no count to forget: whatever the means weigh, they are means where sums are due
    return _is_one_factor(w, w.per_mean) and (
        w.reduction == "sum" or any(w.close(w.per_mean, 1 / n) for n in plausible)
    )


def _grouped(w: Weights) -> tuple[str, int, bool] | None:
    """Return into what micro-batches are dealt whose own means weigh alike: what, how many, and
    whether added up.
    """
    if not _is_of_own_window(w) or w.reduction == "sum":
        return None
    # micro-batches are dealt to groups in turn, by their place in the window
    at = np.array(places(w, lambda ratio: True))
    ways = [("ranks", _ranks(w))] if w.owners else []
    # of one window alone, some groups may fit by chance
    if w.windows:
        ways += [("groups", at % number) for number in range(2, max(3, len(w.window)))]
    for what, group in ways:
        # of what cannot be read, the counts are 0
        counts = np.array([_counts_inside(w)[group == g].sum() for g in group])
        weights = w.observed[w.inside] * counts
        number = len(set(group))
        # an average over the groups, an average over all ranks, or a sum of the groups' means
        for share in (number, w.world_size, 1):
            if w.close(weights, 1 / share):
                return what, number, share == 1
    return None


def _unequal_groups(w: Weights) -> bool:
    found = _grouped(w)
    if found is None:
        return False
    group = _ranks(w) if found[0] == "ranks" else np.array(places(w, lambda ratio: True)) % found[1]
    unequal = len({float(_counts_inside(w)[group == g].sum()) for g in set(group)}) > 1
    # groups of equal counts weigh what they should, unless their means are added up and not
    # averaged
    return unequal or (found[0] == "groups" and found[2] and found[1] < len(w.inside))


def means_text(w: Weights, wrong: Steps) -> str:
    """Return what weight the means of micro-batches have."""
    if w.reduction == "sum":
        return (
            f"each micro-batch's mean has weight {float(w.per_mean.mean()):.6g}, whatever its"
            " count, where sums are to be added up"
        )
    added = f" (plus {w.added:g})" if w.added else ""
    short = (
        f", in a window of {len(w.window)}"
        if len(w.window) != w.accumulation_steps * w.world_size
        else ""
    )
    return f"each micro-batch's mean has weight {_share(w)}, whatever its count{added}{short}"


def _grouped_text(w: Weights, wrong: Steps) -> str:
    what, number, added = _grouped(w) or ("groups", 1, False)
    if what == "ranks":
        how, share = ("added up", "1") if added else ("averaged", f"1/{number}")
        return (
            f"each rank's mean has weight {share}, whatever its count, as where ranks divide by"
            f" their own counts and gradients are {how}"
        )
    how = (
        "are added up, each with a count of its own"
        if added
        else "have one weight whatever their counts"
    )
    return (
        f"the micro-batches are dealt to {number} groups, as to tasks or ranks, and the groups'"
        f" means {how}"
    )


def _other_counts(w: Weights) -> Iterator[tuple[str, Array, float | None]]:
    """Yield what means may be weighted by in place of their counts.

    Yields:
        What it is in words, the number of each micro-batch, and what these are divided by; None
        where that may be anything.
    """
    own = _counts_inside(w)
    count = w.window_count
    beside = dict(w.beside)
    # a loop may count rows in place of targets, which is the commonest wrong count
    if w.items:
        beside["their numbers of items, as if every item of theirs counted alike"] = w.items
    for what, numbers in beside.items():
        yield (
            what,
            np.array([float(numbers[j]) for j in w.inside]),
            float(sum(numbers[j] for j in w.window)),
        )
    for word, whole in (("rounded down", np.floor), ("rounded", np.round), ("rounded up", np.ceil)):
        yield f"their counts {word}, and a count may be a fraction", whole(own), None
    for word, one in (("last", w.window[-1]), ("first", w.window[0])):
        yield (
            f"the count of the window's {word} micro-batch",
            np.full(len(own), w.counts[one]),
            count,
        )
    # where one cannot be read, the one before it is not its neighbour
    if len(w.window) == len(own):
        yield "the count of the micro-batch before it", np.array([np.nan, *own[:-1]]), count
        yield "the count of the micro-batch after it", np.array([*own[1:], np.nan]), count
    # powers are last: two micro-batches fit several of them
    for power, what in (
        (2.0, "the square of their counts"),
        (-1.0, "one over their counts"),
        (0.5, "the root of them"),
    ):
        yield what, own**power, None


def _weighted_by(w: Weights) -> list[str]:
    """Return what means may be weighted by in place of their counts."""
    if not _is_of_own_window(w) or not np.all(w.per_mean) or w.reduction == "sum":
        return []
    found = []
    for what, numbers, over in _other_counts(w):
        known = np.isfinite(numbers)
        # one number alone is proportional to anything
        if not numbers[known].all() or known.sum() < min(2, len(w.inside)):
            continue
        share = w.per_mean[known] / numbers[known]
        own = _counts_inside(w)[known]
        # numbers proportional to the counts show nothing, unless their own sum is the divisor
        is_new = over is not None or not w.close(numbers[known] * own[0], own * numbers[known][0])
        due = share[0] if over is None else 1 / over
        if w.close(share, due) and (is_new or not _has_unequal_counts(w)):
            found.append(what)
    return found


def _weighted_alike(wrong: Steps) -> list[str]:
    """Return what all wrong steps may weight means by."""
    return [what for what in _weighted_by(wrong[0]) if all(what in _weighted_by(w) for w in wrong)]


def _weighting_tells(w: Weights) -> bool:
    """Whether counts differ, and in three ways where each micro-batch may be there a number of
    times as well.
    """
    # of two different counts, one may be a whole multiple of the other by chance
    different = len({*_counts_inside(w)})
    return different > 2 or (different > 1 and not _times(w))


def rounded_to(w: Weights) -> str | None:
    """Return the format that the right weights, or some of them, seem to have been rounded to, or
    None.
    """
    if not _is_of_own_window(w):
        return None
    off = float(np.abs(w.ratio - 1).max())
    wrong = ~_right(w)
    # a loop rounds the weight of each loss, or that of each mean
    readings = (w.observed[w.inside][wrong], w.per_mean[wrong])
    for name, digits in FORMATS.items():
        # a product and a sum of rounded numbers is off by a few roundings, not by one
        if off <= 4 * 2.0**-digits and any(_has_digits(values, digits) for values in readings):
            return name
    return _decimals(w) if w.reduction == "mean" else None


def _has_digits(values: npt.NDArray[np.float64], digits: int) -> bool:
    """Whether no value has more binary digits, up to the rounding of float64."""
    # the mantissa times the format's precision is a whole number where the format holds the value
    scaled = np.frexp(values)[0] * 2.0**digits
    return bool(np.abs(scaled - np.round(scaled)).max() <= 2.0**digits * 2.0**-50)


def _decimals(w: Weights) -> str | None:
    """Return the number of decimals to which the weights of means seem to be rounded, or None."""
    right = w.expected * _counts_inside(w)
    for decimals in range(1, MOST_DECIMALS + 1):
        if w.close(w.per_mean, np.round(right, decimals)):
            return f"{decimals} decimal{'s' if decimals > 1 else ''}"
    return None


def _rounded_text(w: Weights, wrong: Steps) -> str:
    return (
        f"the weights have a relative error of {np.abs(w.ratio - 1).max():.1g}, and are rounded to "
        f"{rounded_to(w) or 'a narrower dtype'}"
    )


# Micro-batches that are missing, or there several times.


def _only_one(place: int) -> Holds:
    """Whether the first (0) or last (-1) micro-batch alone is there, with a weight that it may well
    have.
    """

    def fits(w: Weights) -> bool:
        # in a window of one micro-batch, the first is the last, and nothing is missing
        if not _is_of_own_window(w) or np.count_nonzero(w.ratio) != 1 or not w.ratio[place]:
            return len(w.inside) < 2 and w.is_right
        mean = w.per_mean[place]
        shares = (1.0, 1 / len(w.window), 1 / w.accumulation_steps)
        return w.close(w.ratio[place], 1.0) or any(w.close(mean, share) for share in shares)

    return fits


def _times(w: Weights) -> bool:
    """Whether each micro-batch is there a whole number of times, or once more by its mean.

    Some perhaps not at all.
    """
    ratio = w.ratio
    if not _is_of_own_window(w) or not np.any(ratio):
        return False
    # a micro-batch that is missing altogether is named in the same sentence
    if w.close(np.where(ratio == 0, 1, ratio), np.maximum(np.round(ratio), 1)):
        return bool(1.5 < ratio.max() <= MOST_TIMES)
    more = ~_right(w) & (ratio != 0)
    # what is there beyond once: a mean of its own, where the repeated loss was divided otherwise
    extra = w.per_mean * (1 - 1 / np.where(ratio == 0, 1, ratio))
    shares = (1.0, 1 / len(w.window), 1 / w.accumulation_steps)
    return bool(more.any()) and any(w.close(extra[more], share) for share in shares)


def _is_running_sum(w: Weights) -> bool:
    return _is_of_own_window(w) and w.close(w.ratio, np.arange(len(w.inside), 0, -1))


def _times_text(w: Weights, wrong: Steps) -> str:
    # of two micro-batches, the first may weigh twice as much for many reasons, such as its size
    if all(map(_is_running_sum, wrong)) and any(map(_long, wrong)):
        number = len(w.inside)
        times = (
            " and ".join(str(n) for n in range(number, 0, -1))
            if number < 3
            else f"{number}, {number - 1}, ..., 1"
        )
        return (
            f"the window's micro-batches are in the gradient {times} times: the running sum of the"
            " losses is differentiated each time"
        )
    return repeated_text(w, wrong)


def _has_idle_rank(w: Weights) -> bool:
    return len(set(_ranks(w))) < w.world_size


def _missing_ranks(w: Weights) -> bool:
    """Whether micro-batches of some ranks are missing while another rank's are all there."""
    if not w.owners or not _is_of_own_window(w):
        return False
    gone = w.ratio == 0
    rank = _ranks(w)
    if gone.all():
        # a rank that has none of the window's micro-batches has nothing of the other ranks' either
        return _has_idle_rank(w) and not w.alike
    # what each rank lacks, which tells a missing all-reduce from a dropped micro-batch
    missing = {r: int(gone[rank == r].sum()) for r in set(rank)}
    partly = any(0 < number < (rank == r).sum() for r, number in missing.items())
    # what is missing in the same way on all ranks was added up, unless a whole rank is missing
    if not gone.any() or all(missing.values()) or (w.alike and partly):
        return False
    there = w.ratio[~gone]
    # a gradient that DistributedDataParallel has not averaged weighs as many times too much as
    # there are ranks
    whole = np.isclose(there, 1, rtol=w.tolerance, atol=0) | np.isclose(
        there, w.world_size, rtol=w.tolerance, atol=0
    )
    return bool(whole.all()) or (
        len({int(r) for r, number in missing.items() if not number}) == 1 and not partly
    )


def _ranks_tell(w: Weights) -> bool:
    return len(set(_ranks(w))) > 1 or _has_idle_rank(w)


def _is_same_data(w: Weights) -> bool:
    """Whether one rank's micro-batches are there once for each rank, and no other's, on all ranks."""
    gone = w.ratio == 0
    rank = _ranks(w)
    there = w.ratio[~gone]
    if len(set(rank[~gone])) != 1 or len(set(rank)) != w.world_size or not w.alike:
        return False
    only = int(rank[~gone][0])
    if gone[rank == only].any():
        return False
    # the divisor is the count of all ranks' own micro-batches, or that of what each has counted
    counted = w.window_count / w.count_of_rank(only) if w.reduction == "mean" else w.world_size
    return w.close(there, float(w.world_size)) or w.close(there, counted)


def _missing_ranks_text(w: Weights, wrong: Steps) -> str:
    gone = w.ratio == 0
    rank = _ranks(w)
    if all(map(_is_same_data, wrong)):
        times = w.world_size
        if not w.close(w.ratio[~gone], float(times)):
            return (
                f"the gradient is that of the micro-batches of rank {rank[~gone][0]} alone, on every"
                " rank: every rank trains on the same data"
            )
        return (
            f"the micro-batches of rank {rank[~gone][0]} are in the gradient {times} times,"
            " and those of no other rank: every rank trains on the same data"
        )
    shares = [
        f"{np.sum(~gone[rank == r])} of the {np.sum(rank == r)} of rank {r}"
        for r in sorted(set(rank))
    ]
    return (
        f"of the window's micro-batches, {', '.join(shares)} are in the gradient: it was not added"
        " up over all ranks, or at another time than after the window's last gradient"
    )


def _steps_of_ranks(w: Weights, values: Array) -> Array:
    """Return each micro-batch's number over that of the one before it, on each rank."""
    own = [values[_ranks(w) == rank] for rank in sorted(set(_ranks(w)))]
    return np.concatenate([part[1:] / part[:-1] for part in own])


def _rescaling_ratio(w: Weights) -> float | None:
    """Return how many times each micro-batch weighs the one before it, on each rank.

    None where that differs.
    """
    if not _is_of_own_window(w) or not np.all(w.ratio):
        return None
    k = w.accumulation_steps
    # two micro-batches have some factor in any case: only K between means that weigh 1/K and less
    # says that the running sum is divided each time
    if len(w.inside) == 2 and w.close(w.per_mean, [k**-2, k**-1]):
        return float(k)
    # the factor is between sums or between means, by whether the loop weights by counts
    for values in (w.ratio, w.per_mean):
        steps = _steps_of_ranks(w, values)
        if not len(steps) or steps[0] <= 0:
            continue
        if w.close(steps, steps[0]) and not w.close(steps[0], 1.0):
            return float(steps[0])
    return None


def _reduced_between(w: Weights) -> bool:
    """Whether micro-batches weigh powers of the number of ranks, and none more than the one before
    it on its rank.
    """
    if not w.owners or not _is_of_own_window(w) or not np.all(w.ratio > 0):
        return False
    # reduced once more each time, a contribution gets the number of ranks as a factor
    powers = np.log(w.ratio) / np.log(w.world_size)
    falls = bool((_steps_of_ranks(w, w.ratio) <= 1 + w.tolerance).all())
    return falls and within(powers, np.round(powers), 1e-6)


def _falls(w: Weights) -> bool:
    return bool((_steps_of_ranks(w, w.ratio) < 1 - w.tolerance).any())


def _rescaled_text(w: Weights, wrong: Steps) -> str:
    if all(map(_reduced_between, wrong)):
        return (
            "earlier micro-batches of a rank weigh more, by powers of the number of ranks,"
            f" {w.world_size}: the running sum goes through an all-reduce between micro-batches,"
            " which adds up what is already the sum of all ranks"
        )
    factor = _rescaling_ratio(w) or _rescaling_ratio(max(wrong, key=lambda v: len(v.inside))) or 1.0
    return (
        f"each micro-batch weighs {factor:.6g} times the one before it, as where the running sum"
        " itself is rescaled at every micro-batch, or a loss scale changes within the window"
    )


def _rescales(wrong: Steps) -> Holds:
    """Whether each step has the factor that the longest one has.

    A step of one micro-batch has any.
    """
    longest = max(wrong, key=lambda w: len(w.inside))
    factor = _rescaling_ratio(longest)
    k = longest.accumulation_steps
    if factor is not None and not _last_is_plausible(longest, factor):
        factor = None

    def fits(w: Weights) -> bool:
        own = _rescaling_ratio(w)
        if len(w.inside) < 2:
            return _is_of_own_window(w)
        if own is None or factor is None:
            return False
        # a loop that divides by K each time has another factor where another plan has another K
        return w.close(own, factor) or w.close([own, factor], [w.accumulation_steps, k])

    return fits


def _last_is_plausible(w: Weights, factor: float) -> bool:
    """Whether the latest contribution has its own weight, or was rescaled once."""
    mean = abs(float(w.per_mean[-1]))
    divisors = {1, w.accumulation_steps, len(w.window)}
    if any(w.close(mean, 1 / divisor) for divisor in divisors):
        return True
    ratio = abs(float(w.ratio[-1]))
    return w.close(ratio, 1.0) or w.close(ratio, 1 / factor)


def _rescale_tells(w: Weights) -> bool:
    """Whether a step has three micro-batches, or two whose means weigh 1/K and less by K: any two
    have some factor.
    """
    k = w.accumulation_steps
    return _long(w) or (_several(w) and w.close(w.per_mean, [k**-2, k**-1]))


# What steps say together.


def _same_place(w: Weights, j: int) -> int:
    return w.window.index(j)


def _same_rank(w: Weights, j: int) -> int:
    return w.owners[j]


def _by_place(wrong: Steps, place: Callable[[Weights, int], int]) -> Holds:
    """Whether a micro-batch's factor is that of its place, the same wherever it is read, which is
    several times.
    """
    known: dict[int, float] = {}
    for w in wrong:
        # one place with two factors refutes the whole statement
        for j, factor in zip(w.inside, map(float, w.ratio), strict=True):
            if w.foreign or not w.close(known.setdefault(place(w, j), factor), factor):
                return lambda w: False
    # a place that is read once has a factor of its own in any case
    several = sum(len(w.inside) for w in wrong) > len(known)
    differ = len({f"{factor:.9g}" for factor in known.values()}) > 1
    return lambda w: several and differ and all(known.values())


def _by_place_text(w: Weights, wrong: Steps) -> str:
    longest = max(wrong, key=lambda v: len(v.inside))
    shown = ", ".join(factor_text(float(factor)) for factor in longest.ratio[:4]) + (
        ", ..." if len(longest.inside) > 4 else ""
    )
    return (
        f"a micro-batch's weight depends on its place in the window: {shown} times what it should"
        " be for the first and those after it, whatever they count"
    )


def _by_rank_text(w: Weights, wrong: Steps) -> str:
    factors = dict(zip(map(int, _ranks(w)), map(float, w.ratio), strict=True))
    message = " and ".join(
        f"those of rank {rank} weigh {factor:.6g} times"
        for rank, factor in factors.items()
        if not w.close(factor, 1)
    )
    return (
        f"of the window's micro-batches {message} what they should, and the other ranks' are right"
    )


def _earlier(w: Weights) -> bool:
    # in later epochs, whose items are the same, a gradient of another window may come from either
    # side
    return w.epoch > 0 or all(j < w.window[0] for j in w.foreign)


def _whole_and_earlier(w: Weights) -> bool:
    """Whether the window's own gradient is there once, and all that is foreign belongs to earlier
    windows.
    """
    # the window's own gradient of each earlier epoch may be in the sum as well, once each
    if w.epoch and (w.foreign or len(w.windows) < 2):
        off = w.tolerance * (w.epoch + 1)
        return bool(np.all(w.ratio >= 1 - off) and np.all(w.ratio <= w.epoch + 1 + off))
    return w.close(w.ratio, 1.0) and _earlier(w)


def _has_whole_windows(w: Weights) -> bool:
    """Whether all of the window's own is there, with any weights, and of each other window all or
    nothing.
    """
    if not np.all(w.ratio):
        return False
    for window in w.windows:
        there = {bool(w.observed[j]) for j in window if w.counts[j]}
        if window != w.window and len(there) > 1:
            return False
    return True


def _decay(wrong: Steps) -> float | None:
    """Return what every earlier window's gradient is multiplied by from step to step.

    None where that differs.
    """
    # the first epoch, where the items of no earlier step come back
    first = next((w for w in wrong if w.index and not w.epoch), None)
    # with one step before it, any number would fit
    if first is None or max(_steps_before(w) for w in wrong) < 2:
        return None
    # the window before it is the newest of those left over, and weighs the most
    before = _in_place_of_its_own(first, (first.index or 0) - 1)
    if not len(before) or not len(first.inside) or not first.ratio[0]:
        return None
    decay = float(before[0] / first.ratio[0])

    def fits(w: Weights) -> bool:
        number = len(w.windows)
        steps = _steps_before(w)
        if w.index is None or not len(w.inside):
            return False
        # how far back the steps of each window are: one epoch further each time
        powers = [
            sum(decay**n for n in range((w.index - i) % number, steps + 1, number))
            for i in range(number)
        ]
        own = w.ratio[0] / powers[w.index]
        return all(
            w.close(_in_place_of_its_own(w, i), own * power) for i, power in enumerate(powers)
        )

    # a decay of 1 is a reset that is missing altogether, which has a name of its own
    return decay if decay > 0 and not first.close(decay, 1.0) and all(map(fits, wrong)) else None


def _steps_before(w: Weights) -> int:
    return w.epoch * len(w.windows) + (w.index or 0)


def _in_place_of_its_own(w: Weights, window: int) -> Array:
    """Return the weights of another window's micro-batches over what is right in that window's
    step.
    """
    return replace(w, window=w.windows[window]).ratio


def _stale_text(w: Weights, wrong: Steps) -> str:
    off = (
        ""
        if all(map(_whole_and_earlier, wrong))
        else "; the window's own weights are wrong as well"
    )
    decay = _decay(wrong)
    if decay is not None:
        own = w.ratio[0] if len(w.inside) else 1.0
        how = "a reset that scales gradients and does not clear them"
        if not w.close(own, 1.0):
            how = f"a moving average; the window's own weighs {own:.3g} times what it should"
        return (
            f"the gradient of every earlier window is in the sum, and weighs {decay:.3g} times as"
            f" much with each further step, as by {how}"
        )
    if not w.foreign and w.epoch and np.any(w.ratio > 1):
        return f"the same window's gradient from earlier epochs is still in it{off}"
    if not w.foreign:
        return f"in other steps, the gradient of earlier windows is still in the sum{off}"
    # a trace of an earlier window is a reset that scales, and not one that is missing
    share = max(abs(w.observed[j] / w.expected) for j in w.foreign)
    trace = f", with {share:.3g} of an item's right weight" if share < 0.5 else ""
    return (
        f"micro-batches {w.foreign} belong to earlier windows and are still in the"
        f" gradient{trace}{off}"
    )


def _cut_elsewhere(wrong: Steps) -> bool:
    """Whether the steps hold runs of consecutive micro-batches that begin or end at other places
    than windows.
    """
    whole = True
    if all(map(_ranks_have_whole_parts, wrong)):
        return False
    for w in wrong:
        # consecutive numbers have one distance from their index: one group is one run of
        # micro-batches
        runs = [*groupby(enumerate(w.held), lambda pair: pair[1] - pair[0])]
        # after the last micro-batch of an epoch comes the first one
        is_end = w.epoch > 0 or w.index == len(w.windows) - 1
        # a step with another window alone is that window's, not cut elsewhere
        lacks_its_own = len(w.window) > 1 and not np.any(w.ratio)
        if w.foreign and (lacks_its_own or len(runs) > 1 + is_end):
            return False
        whole = whole and bool(np.all(w.ratio))
    # where each has its own window, and something beside it, none is cut
    return any(w.foreign and np.any(w.ratio) for w in wrong) and not whole


def _ranks_have_whole_parts(w: Weights) -> bool:
    """Whether each rank's micro-batches are all those of one window of its own, or none.

    A rank that is a window late begins and ends where the others do.
    """
    for rank in sorted(set(w.owners)):
        own = {j for j, count in enumerate(w.counts) if count and w.owners[j] == rank}
        held = {j for j in own if w.observed[j]}
        parts = [own.intersection(window) for window in w.windows]
        if held and held not in parts:
            return False
    return bool(w.owners)


def _cut_text(w: Weights, wrong: Steps) -> str:
    return (
        f"the step holds micro-batches {w.held}, where its window is {list(w.window)}: windows begin"
        " and end at other places"
    )


def _other_text(w: Weights, wrong: Steps) -> str:
    gone = w.missing
    held = f"micro-batches {w.foreign} of other windows are in the gradient" if w.foreign else ""
    missing = f"micro-batches {gone} of the window are not in the gradient" if gone else ""
    return ", and ".join(filter(None, (held, missing)))


# The meaning of one factor of a whole window: the quantities of a run, each with its cause in the
# table of faults.


@dataclass(frozen=True)
class Quantity:
    """A number of a run that a factor may be.

    Attributes:
        key: what it is, the same in every step.
        text: the same with the step's numbers.
        value: the number; one over it is looked for as well where `inverse` is given.
        cause: the cause of `wrong-scale` in the table of faults, where the factor is the number.
        inverse: the cause where it is one over it.
        rare: 1 if it counts only where nothing plainer fits, 2 if two windows must tell it from a
            coincidence as well.
    """

    key: str
    text: str
    value: float
    cause: str
    inverse: str = ""
    rare: int = 0


def quantities(w: Weights) -> Iterator[Quantity]:
    """Yield the numbers of a run that a factor of a whole window may be, or one over it, the
    plainest first.
    """
    k = w.accumulation_steps
    n = len(w.window)
    count = w.window_count
    ranks = w.world_size
    # the plainest reading comes first: a short window that is divided as if it were whole
    if n != k * ranks:
        message = f"accumulation_steps over the short window's micro-batches, {k}/{n}"
        yield Quantity("K over the short window", message, k / n, "other-count")
        message = f"the short window's micro-batches over accumulation_steps, {n}/{k}"
        yield Quantity("the short window over K", message, n / k, "short-window")
    yield Quantity("K", f"accumulation_steps = {k}", k, "not-divided", "divided-twice")
    if w.owners:
        yield Quantity("ranks", f"the number of ranks, {ranks}", ranks, "ranks", "ranks")
        yield Quantity(
            "squared", f"the square of the number of ranks, {ranks**2}", ranks**2, "ranks", "ranks"
        )
    yield Quantity("count", f"the window's count, {count:g}", count, "not-divided", "divided-twice")
    message = f"the {'short ' if n != k * ranks else ''}window's micro-batches, {n}"
    yield Quantity("micro-batches", message, n, "not-divided", "divided-twice", rare=1)
    # a learning rate that is scaled by the root of the batch is sometimes put into the loss
    message = f"accumulation_steps**0.5, with {k} accumulation steps"
    yield Quantity("root of K", message, k**0.5, "divided-twice", "divided-twice", rare=1)
    beside = () if w.reduction == "sum" else (*_other_items(w), *_other_windows(w), *_miscounts(w))
    for what, other, cause, rare in beside:
        # a count of 0 would divide by 0, which no loop survives
        if other > 0:
            message = f"the window's count over {what}, {count:g}/{other:g}"
            yield Quantity(what, message, count / other, cause, rare=rare)


@dataclass(frozen=True)
class Factor:
    """A quantity of a window, or one over it, as the factor of a fault.

    Attributes:
        value: of the factor.
        cause: of `wrong-scale` in the table of faults.
    """

    value: float
    cause: str


@lru_cache
def factor_of(key: str, length: int, ranks: int, power: int, *, k: int | None = None) -> Factor:
    """Return the factor that a quantity of a window gives.

    Args:
        key: of the quantity.
        length: the window's micro-batches on each rank.
        ranks: the number of ranks.
        power: 1, or -1 for one over the quantity.
        k: the accumulation steps; None for the window's length.
    """
    number = length * ranks
    w = Weights(
        observed=np.zeros(number),
        counts=(1.0,) * number,
        window=tuple(range(number)),
        accumulation_steps=k or length,
        epoch=0,
        reduction="mean",
        owners=tuple(range(ranks)) * length if ranks > 1 else (),
    )
    quantity = next(one for one in quantities(w) if one.key == key)
    return Factor(quantity.value**power, quantity.cause if power > 0 else quantity.inverse)


Beside = Iterator[tuple[str, float, str, int]]
"""What a loop may divide by in place of the window's count, in words, the number, the cause, and how rare it is."""


def _other_items(w: Weights) -> Beside:
    count = w.window_count
    # where each item counts one, both readings are the same number
    if w.items and w.items != w.counts:
        items = sum(w.items[j] for j in w.window)
        empty = sum(w.items[j] for j in w.window if not w.counts[j])
        yield "its items", items, "items", 0
        yield "that and its items together", count + items, "extra-target", 0
        yield (
            "that and the items of micro-batches without valid targets",
            count + empty,
            "ignored-targets",
            0,
        )
    yield "the same raised to 1", max(count, 1.0), "at-least-1", 0
    # `clamp(min=1)` guards against a division by 0 in two places: once for the window, or for each
    # micro-batch
    each = sum(max(w.counts[j], 1.0) for j in w.window)
    yield "one in which every micro-batch counts at least 1", each, "at-least-1", 0
    for word, whole in (("down", np.floor), ("", np.round), ("up", np.ceil)):
        rounded = float(whole(count))
        each = float(sum(whole(w.counts[j]) for j in w.window))
        yield f"the same made a whole number {word}".strip(), rounded, "rounded-count", 1
        yield f"the sum of its counts made whole numbers {word}".strip(), each, "rounded-count", 1


def _other_windows(w: Weights) -> Beside:
    if w.windows:
        at = w.windows.index(w.window)
        of = [w.count_of(window) for window in w.windows]
        # index -1 is the last window of the epoch before, which the first epoch has not
        before = of[at - 1] if at or w.epoch else 0
        yield "the previous window's", before, "other-count", 2
        yield (
            "its own and the previous window's together",
            w.window_count + before,
            "running-count",
            2,
        )
        yield "the next window's", of[(at + 1) % len(of)], "other-count", 2
        yield "the first window's", of[0], "other-count", 2
        yield "the whole epoch's", sum(of), "other-count", 2
        yield "the mean count of the epoch's windows", sum(of) / len(of), "other-count", 2
        so_far = w.epoch * sum(of) + sum(of[: at + 1])
        yield "that of all windows up to it", so_far, "running-count", 2
    for rank in sorted(set(w.owners)):
        yield f"that of rank {rank}", w.count_of_rank(rank), "other-count", 0
        yield (
            f"the number of ranks times that of rank {rank}",
            w.world_size * w.count_of_rank(rank),
            "other-count",
            0,
        )


def _miscounts(w: Weights) -> Beside:
    count = w.window_count
    n = len(w.window)
    if w.window[-1] + 1 < len(w.counts):
        yield "that of one micro-batch more", count + w.counts[w.window[-1] + 1], "other-count", 2
    yield "that without its last micro-batch", count - w.counts[w.window[-1]], "other-count", 2
    yield "that without its first micro-batch", count - w.counts[w.window[0]], "other-count", 2
    yield "one with one target too few for each micro-batch", count - n, "off-by-one", 2
    yield "one with one target too many for each micro-batch", count + n, "off-by-one", 2
    # a loop that takes all micro-batches to be as large as one of them
    own = [w.counts[j] for j in w.window]
    for word, own_count in (("first", own[0]), ("last", own[-1]), ("largest", max(own))):
        times_k = w.accumulation_steps * own_count
        times_n = n * own_count
        yield f"accumulation_steps times that of its {word} micro-batch", times_k, "equal-counts", 2
        yield f"its micro-batches times that of its {word} micro-batch", times_n, "equal-counts", 2


Quantities = dict[str, Quantity]
"""The quantities of a step, by their keys."""


@dataclass(frozen=True)
class Meaning:
    """What a factor may be.

    Attributes:
        text: the quantity, or one over it, in words.
        cause: of `wrong-scale` in the table of faults.
    """

    text: str
    cause: str


def factor_meanings(wrong: Steps, right: Steps = ()) -> list[Meaning]:
    """Return what the factor of each wrong step is; no more than three.

    Args:
        wrong: steps whose items have one wrong weight.
        right: other steps. What they refute is left out where something else is left. One number
            may be anything: where there is one wrong step, they must agree with what it is.
    """
    known = [_quantities_by_key(w) for w in wrong]
    elsewhere = [_quantities_by_key(w) for w in right]
    counts_differ = len({w.window_count for w in wrong}) > 1
    found: list[Meaning] = []
    doubtful: list[Meaning] = []
    # the plainest quantities come first, and what is rare is asked about where none of them fits
    for key, first in known[0].items():
        is_refuted = _is_refuted(key, wrong[0], elsewhere)
        if is_refuted and len(wrong) == 1:
            continue
        if first.rare and (found or doubtful):
            continue
        if first.rare == 2 and not counts_differ:
            continue
        meanings = _meanings_of(first, wrong, [numbers.get(key) for numbers in known])
        (doubtful if is_refuted else found).extend(meanings)
    return (found or doubtful)[:MOST_MEANINGS]


def _quantities_by_key(w: Weights) -> Quantities:
    return {quantity.key: quantity for quantity in quantities(w)}


def _is_refuted(key: str, wrong: Weights, elsewhere: Sequence[Quantities]) -> bool:
    """Whether a right step has a quantity that is not 1, which would have made it wrong as well."""
    return any(key in known and not wrong.close(known[key].value, 1.0) for known in elsewhere)


def _meanings_of(
    first: Quantity, wrong: Steps, of_steps: Sequence[Quantity | None]
) -> Iterator[Meaning]:
    """Yield that the factor of each wrong step is a quantity of it, or one over that.

    Args:
        first: the quantity of the first wrong step.
        wrong: the steps.
        of_steps: the same quantity of each of them; None where it has none.
    """
    for power, cause, before in ((1, first.cause, ""), (-1, first.inverse, "one over ")):
        if cause and all(
            _is_power_of(w, quantity, power) for w, quantity in zip(wrong, of_steps, strict=True)
        ):
            yield Meaning(before + first.text, cause)


def _is_power_of(w: Weights, quantity: Quantity | None, power: int) -> bool:
    """Whether a step's factor is a power of a quantity that is not 1 there."""
    if quantity is None or w.close(quantity.value, 1.0):
        return False
    return w.close(float(w.ratio.mean()), float(quantity.value) ** power)


def constant_meaning(factor: float) -> tuple[str, str]:
    """Return what a factor that is the same in all windows means, and the cause.

    Empty where it says nothing.
    """
    # before the quantities: no count is negative
    if factor == -1:
        return "the sign is wrong", "sign"
    # 0 has no logarithm; any fraction says that it is no power of two
    exponent = float(np.log2(abs(factor))) if factor else 0.5
    if exponent == round(exponent) and 2 ** abs(exponent) >= LEAST_LOSS_SCALE:
        what = "never divided out" if exponent > 0 else "divided out twice"
        return f"2**{exponent:.0f}, such as a loss scale that is {what}", "loss-scale"
    return "", ""


NO_COUNT = ", which no usual count or quotient of counts gives in every window"


@dataclass(frozen=True)
class ScaleReason:
    """What is known of the factors by which whole windows are wrong.

    Attributes:
        why: follows the factor in the sentence.
        causes: of `wrong-scale` in the table of faults.
        is_explained: whether something of the run explains the factors.
    """

    why: str
    causes: tuple[str, ...]
    is_explained: bool = True

    def sentence(self, w: Weights, wrong: Steps) -> str:
        """Return what a step does wrong."""
        return (
            f"every item of the window weighs {factor_text(float(w.ratio.mean()))} times what it"
            f" should{self.why}"
        )


def _scale_reason(steps: Steps) -> ScaleReason:
    """Return what explains the factors of the wrong steps: the surest reason that fits."""
    wrong = [w for w in steps if not w.is_right]
    ratios = [float(w.ratio.mean()) for w in wrong]
    is_constant = wrong[0].close(ratios, ratios[0])
    meaning, cause = constant_meaning(ratios[0]) if is_constant else ("", "")
    if meaning:
        return ScaleReason(f": {meaning}", (cause,))
    found = factor_meanings(wrong, [w for w in steps if w.is_right])
    if found:
        why = f", which is {' or '.join(one.text for one in found)}"
        return ScaleReason(why, tuple(one.cause for one in found))
    added = _added_to_counts(wrong, ratios)
    if added is not None:
        why = f", as where {added:.3g} is added to the window's count"
        return ScaleReason(why, ("divided-twice",))
    power = _power_of_steps(wrong, ratios)
    if power is not None:
        why = f", and that of each step is {power:.6g} times that of the step before it"
        return ScaleReason(why, ("growing",))
    if len(wrong) == 1:
        # one number that is none of the run's is no pattern
        return ScaleReason(NO_COUNT, ("varying",), is_explained=False)
    if is_constant:
        return ScaleReason(", in every wrong window alike, whatever its counts", ("constant",))
    shown = first_of([factor_text(ratio) for ratio in ratios], 4)
    why = f"; over the wrong windows the factors are {shown}{NO_COUNT}"
    return ScaleReason(why, ("varying",), is_explained=False)


def _added_to_counts(wrong: Steps, ratios: Sequence[float]) -> float | None:
    """Return the number that all wrong windows' divisors have more than their different counts, or
    None.
    """
    # windows of one count have one divisor, from which no summand can be told
    counts = np.array([w.window_count for w in wrong])
    if wrong[0].reduction == "sum" or len({*counts}) < 2:
        return None
    # divisor = count + summand, and ratio = count / divisor
    more = counts / ratios - counts
    rounding = 2 * wrong[0].tolerance * float(counts.max())
    # a number so small may be the rounding of the weights
    if abs(more[0]) <= 100 * rounding:
        return None
    same = np.allclose(
        more,
        more[0],
        rtol=EXACT,
        atol=rounding,
    )
    return float(more[0]) if same else None


def _power_of_steps(wrong: Steps, ratios: Sequence[float]) -> float | None:
    """Return b where each ratio is b to the power of the number of steps before it.

    None where no b fits.
    """
    before = [_steps_before(w) for w in wrong]
    # a step with none before it has the power 0, which is 1 for every base
    if len(set(before)) < 2 or not all(before) or not min(ratios) > 0:
        return None
    bases = [ratio ** (1 / steps) for ratio, steps in zip(ratios, before, strict=True)]
    return bases[0] if wrong[0].close(bases, bases[0]) else None


# The list.


@dataclass(frozen=True)
class WeightPredicate:
    """A fault as a statement about steps.

    Attributes:
        name: the name of the fault.
        holds: whether a wrong step is as the fault makes it; all must be.
        tells: whether a wrong step tells the fault from those that follow in the list; one must.
        text: what the loop did, of the violated step and of all wrong ones.
        causes: causes of the fault for which the table of faults has remedies of their own.
    """

    name: str
    holds: Holds
    tells: Holds
    text: Text
    causes: tuple[str, ...] = ()


def _predicates_of_other_windows(wrong: Steps) -> Iterator[WeightPredicate]:
    causes = () if _decay(wrong) is None else ("average",)

    def from_earlier(w: Weights) -> bool:
        return _has_whole_windows(w) and _earlier(w)

    yield WeightPredicate(
        "stale-window",
        _whole_and_earlier,
        lambda w: bool(w.foreign or w.epoch),
        _stale_text,
        causes,
    )
    yield WeightPredicate("wrong-windows", lambda w: _cut_elsewhere(wrong), _always, _cut_text)
    yield WeightPredicate(
        "stale-window", from_earlier, lambda w: bool(w.foreign), _stale_text, causes
    )
    yield WeightPredicate("other-window", _always, lambda w: bool(w.foreign), _other_text)


def _predicates(steps: Steps, wrong: Steps, *, known_only: bool) -> Iterator[WeightPredicate]:
    # first, since the predicates after these speak of the window's own micro-batches; with one
    # window in an epoch, an earlier epoch's gradient is that window's own
    if any(w.foreign or (w.epoch and len(w.windows) < 2) for w in wrong):
        yield from _predicates_of_other_windows(wrong)
    yield WeightPredicate(
        "no-gradient",
        lambda w: not w.foreign and not np.any(w.ratio) and not _missing_ranks(w),
        # what cannot be read may be there
        lambda w: not any(w.counts[j] for j in w.unread.intersection(w.window)),
        _no_gradient_text,
    )
    same = ("same-data",) if all(map(_is_same_data, wrong)) else ()
    # before `dropped-micro-batch`, which a gradient that was not added up over ranks looks like too
    yield WeightPredicate("not-reduced", _missing_ranks, _ranks_tell, _missing_ranks_text, same)
    yield WeightPredicate("rescaled-accumulator", _reduced_between, _falls, _rescaled_text)
    of_sum = ("sum",) if wrong[0].reduction == "sum" else ()
    yield WeightPredicate(
        "mean-of-means", _plausible_means, _has_unequal_counts, means_text, of_sum
    )
    yield WeightPredicate(
        "mean-of-means", lambda w: _grouped(w) is not None, _unequal_groups, _grouped_text
    )
    yield WeightPredicate(
        "low-precision", lambda w: rounded_to(w) is not None, _always, _rounded_text
    )
    # after `mean-of-means`: where all counts are equal, the two are one and the same factor
    if all(_is_one_factor(w, w.ratio) for w in wrong):
        reason = _scale_reason(steps)
        if reason.is_explained or not known_only:
            yield WeightPredicate(
                "wrong-scale",
                _always,
                lambda w: reason.is_explained or _several(w),
                reason.sentence,
                reason.causes,
            )
    yield WeightPredicate(
        "wrong-count", lambda w: bool(_weighted_alike(wrong)), _weighting_tells, _wrong_count_text
    )
    yield WeightPredicate("reset-inside-window", _only_one(-1), _long, _last_text)
    yield WeightPredicate("first-only", _only_one(0), _long, _first_text)
    yield WeightPredicate("rescaled-accumulator", _rescales(wrong), _rescale_tells, _rescaled_text)
    yield WeightPredicate(
        "repeated-micro-batch", _times, lambda w: not w.close(w.ratio, w.ratio[0]), _times_text
    )
    yield WeightPredicate(
        "dropped-micro-batch",
        lambda w: _is_of_own_window(w) and not np.all(w.ratio),
        _some_missing,
        dropped_text,
    )
    # last come the predicates with a free number for each place: they fit almost anything
    sign = ("sign",) if any(np.any(w.ratio < 0) for w in wrong) else ()
    yield WeightPredicate(
        "weighted-by-place", _by_place(wrong, _same_place), _long, _by_place_text, sign
    )
    if wrong[0].owners:
        yield WeightPredicate(
            "wrong-scale", _by_place(wrong, _same_rank), _several, _by_rank_text, ("one-rank",)
        )
    yield WeightPredicate(
        "mean-of-means",
        lambda w: _is_one_factor(w, w.per_mean),
        _has_unequal_counts,
        means_text,
        of_sum,
    )


def _some_missing(w: Weights) -> bool:
    # what cannot be read may be there
    return not np.all(w.ratio) and bool(np.any(w.ratio) or w.unread.intersection(w.window))


def _last_text(w: Weights, wrong: Steps) -> str:
    return "only the window's last micro-batch is in the gradient"


def _first_text(w: Weights, wrong: Steps) -> str:
    return "only the window's first micro-batch is in the gradient"


def _wrong_count_text(w: Weights, wrong: Steps) -> str:
    return f"micro-batches' means are weighted by {_weighted_alike(wrong)[0]}"


OF_SEVERAL = "windows of several micro-batches"
NOT_A_SUM = (
    "; or the micro-batches' gradients are combined by a median, a minimum or an agreement of signs"
    " in place of a sum: on the weight probe each element is nonzero in one micro-batch only, so"
    " such a combination gives 0"
)
"""What a probe shows as a missing gradient as well."""


def diagnose(
    violated: Weights,
    others: Sequence[Weights] = (),
    *,
    known_only: bool = False,
    where: str = "",
    only: Collection[str] = FAULTS.keys(),
) -> Diagnosis:
    """Name the fault that gives such weights; `unrecognised-weights` where no known one does.

    Args:
        violated: the weights of the step that is violated.
        others: those of other steps, of this run or of another one, in the order of a run.
        known_only: whether factors that change from window to window and are none of the run's are
            no name.
        where: which steps are wrong, as the end of a sentence; empty for what they have in common.
        only: the names that are asked about.
    """
    steps = [violated, *others]
    where = where or _common_kind(steps) or _which_steps(violated, steps)
    wrong = [w for w in steps if not w.is_right]
    faults = _predicates(steps, wrong, known_only=known_only) if wrong else ()
    for fault in faults:
        if (
            fault.name in only
            and all(fault.holds(w) for w in wrong)
            and any(fault.tells(w) for w in wrong)
        ):
            if fault.name == "no-gradient" and OF_SEVERAL in where:
                where += NOT_A_SUM
            return Diagnosis(fault.name, fault.text(violated, wrong) + where, causes=fault.causes)
    found = _unrecognised(violated)
    return replace(found, sentence=found.sentence + where)


def names_nothing(diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis says no more than that the weights are wrong."""
    return diagnosis.name == "unrecognised-weights"


def _ranks_inside(w: Weights) -> int:
    return len({w.owners[j] for j in w.window})


KINDS_OF_STEPS: tuple[tuple[str, Holds], ...] = (
    ("short windows", lambda w: len(w.window) < w.accumulation_steps * w.world_size),
    ("whole windows", lambda w: len(w.window) == w.accumulation_steps * w.world_size),
    ("epochs after the first", lambda w: w.epoch > 0),
    ("the first epoch", lambda w: w.epoch == 0),
    ("the first window of the run", lambda w: not w.epoch and not w.index),
    ("windows after the first of the run", lambda w: bool(w.epoch or w.index)),
    ("the first window of an epoch", lambda w: w.index == 0),
    ("windows after the first of an epoch", lambda w: bool(w.index)),
    (OF_SEVERAL, lambda w: len(w.inside) > 1),
    (
        "windows in which a rank has no micro-batch",
        lambda w: bool(w.owners) and _ranks_inside(w) < w.world_size,
    ),
    (
        "windows with a micro-batch without valid targets",
        lambda w: any(not w.counts[j] for j in w.window),
    ),
)
"""What steps may have in common that are wrong."""


def _common_kind(steps: Steps) -> str:
    """Return what all wrong steps are and no right one is, as the end of a sentence.

    Empty where there is no such.
    """
    # where all steps are wrong, or all right, nothing sets the wrong ones apart
    if all(w.is_right == steps[0].is_right for w in steps) or not all(w.windows for w in steps):
        return ""
    found = (kind for kind, is_one in KINDS_OF_STEPS if all(is_one(w) != w.is_right for w in steps))
    kind = next(found, None)
    return "" if kind is None else f" (only in {kind})"


def _which_steps(violated: Weights, steps: Steps) -> str:
    """Return which steps of the violated run are right, as the end of a sentence."""
    # steps of a second run, under another plan, are counted in no sentence about this one
    own = [w for w in steps if w.windows == violated.windows and w.counts == violated.counts]
    right = [w for w in own if w.is_right]
    if not right or len(own) == 1:
        return ""
    shown = first_of([f"window {w.index} of epoch {w.epoch}" for w in own if not w.is_right])
    return f" (only {shown} of this run; {len(right)} of {len(own)} steps are right)"


def _unrecognised(w: Weights) -> Diagnosis:
    shown = ", ".join(f"{weight:.6g}" for weight in w.observed[w.inside])
    also = (
        f", and micro-batches {w.foreign} of other windows are in the gradient" if w.foreign else ""
    )
    return Diagnosis(
        "unrecognised-weights",
        f"the window's micro-batches weigh {shown} per count, where {w.expected:.6g} is right for"
        f" each{also}",
    )
