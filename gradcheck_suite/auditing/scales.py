"""The coefficient C of each objective over the run: the program's own, or a consequence of how
windows are cut up?

What a factor of a window may be, and the cause of the fault that it shows, is read by
`judge.naming`, as for a loop that is verified. It asks for a factor of a right weight, and here none
is known: a loss may have a coefficient, so that a factor counts only where windows of other lengths,
other losses or the trainer's settings show that it has not. One window is chance, two are not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, product

import numpy as np

from gradcheck_suite.auditing.events import FREE
from gradcheck_suite.auditing.places import Loop
from gradcheck_suite.auditing.replay import StepWindow, near
from gradcheck_suite.auditing.rules import Held, Rule, Sighting, decide, in_order, names
from gradcheck_suite.auditing.weights import WORDS, WRONG_COUNT, ComparedObjective, Key, spread
from gradcheck_suite.core.faults import remedy_of
from gradcheck_suite.core.findings import Occurrence
from gradcheck_suite.core.text import counted
from gradcheck_suite.judge.naming import factor_of
from gradcheck_suite.judge.weights import ADDED, MOST_ADDED


@dataclass
class ObjectiveInWindow:
    """One objective in one window, for the run to judge.

    Attributes:
        window: the window.
        objective: in it.
        length: the number of passes at the call sites that the objective comes from.
        whole: whether the objective is in every one of them.
        others: the objectives of the same window that have right weights.
        beside: all other objectives of the same window.
        alone: whether the fault is this objective's own: others are right or, where its weights are
            unequal, equal.
        taken_out: by what `.grad` was multiplied after the last pass, where that is a part of the
            weights; else 1.
        own: C by the count that fits the run.
        total: C of all objectives of the window together, where they have the same passes.
        together: these, in the window.
        right: whether C is 1, of this objective or of all together.
    """

    window: StepWindow
    objective: ComparedObjective
    length: int
    whole: bool
    others: Sequence[ComparedObjective]
    alone: bool
    beside: Sequence[ComparedObjective] = ()
    taken_out: float = 1.0
    count: str = ""
    own: float = 0.0
    total: float | None = None
    together: Sequence[ObjectiveInWindow] = ()
    right: bool = False

    @property
    def added(self) -> float:
        """What is added to each count so that none divides by 0, where each micro-batch then weighs
        1; else 0.
        """
        weight = self.objective.weight
        tolerance = self.objective.tolerance
        numbers = self.objective.counts.get(self.count, ())
        off = [1 - weight * n for n in numbers]
        if not off or not tolerance < min(off) <= max(off) < MOST_ADDED:
            return 0.0
        return next(
            (a for a in ADDED if all(near(weight * (n + a), 1.0, tolerance) for n in numbers)), 0.0
        )

    @property
    def masses(self) -> list[float]:
        """The weight of each micro-batch: of an item, times its count."""
        return [
            self.objective.weight * (n + self.added)
            for n in self.objective.counts.get(self.count, ())
        ]

    @property
    def items(self) -> float:
        """The window's count."""
        return sum(self.objective.counts.get(self.count, ()))

    @property
    def hides(self) -> bool:
        """Whether a factor of its weights may be in a tensor of weights that the loss is multiplied
        by.
        """
        return any(part.term.hides for part in self.objective.parts)

    @property
    def is_mean(self) -> bool:
        """Whether the reduction itself divides."""
        return self.objective.parts[0].term.mean


@dataclass(frozen=True)
class WrongScale:
    """A coefficient that is no coefficient of the program's.

    Attributes:
        use: where.
        note: what the factor is, in words.
        cause: of the fault, where the table of faults has a remedy for it; else empty.
        name: the name of the fault.
        expected: the coefficient that would be right.
        provisional: whether other windows may still show something else: that comes out when the
            run is over.
        shown_by: by what the weights of the losses are multiplied where they are shown.
    """

    use: ObjectiveInWindow
    note: str
    cause: str
    name: str = "wrong-scale"
    expected: float = 1.0
    provisional: bool = False
    shown_by: float = 1.0


def _choose_count(uses: Sequence[ObjectiveInWindow]) -> None:
    """Choose one way of counting for the whole run: the one that is right most often."""
    names = set.intersection(*(set(use.objective.coefficients) for use in uses))
    first = uses[0]
    own = uses[0].objective.parts[0].term.own
    tolerance = first.objective.tolerance

    def fits(name: str) -> tuple[int, bool, bool]:
        right = sum(
            near(use.objective.coefficients[name], 1.0, use.objective.tolerance) for use in uses
        )
        masses = list[float]()
        for use in uses:
            masses += [use.objective.weight * n for n in use.objective.counts.get(name, ())]
        ones = bool(masses) and near(masses[0], 1.0, tolerance) and spread(masses) <= tolerance
        return right, ones and not first.is_mean, name == own

    best = max(sorted(names), key=fits)
    for use in uses:
        use.count = best
        use.own = sum(use.masses) if use.added else use.objective.coefficients[best]
        use.right = near(use.own, 1.0, use.objective.tolerance)


def _count_together(windows: Sequence[Sequence[ObjectiveInWindow]]) -> None:
    """Add up the coefficients of some objectives in each window: those of (a + b) / 2 are 1
    together.

    Where none is right alone, as the terms of label smoothing, each is counted such that they are
    right together in the most windows, else the sum of a window's means.
    """
    if not any(use.right for use in chain.from_iterable(windows)):
        names = [
            set.intersection(*({*use.objective.coefficients} for use in uses))
            for uses in zip(*windows, strict=True)
        ]

        def fits(chosen: tuple[str, ...]) -> tuple[int, int, int]:
            right = summed = 0
            for several in windows:
                total = sum(
                    u.objective.coefficients[n] for u, n in zip(several, chosen, strict=True)
                )
                right += near(total, 1.0, several[0].objective.tolerance)
                summed += near(total, several[0].length, several[0].objective.tolerance)
            return (
                right,
                summed,
                sum(n == use.count for n, use in zip(chosen, windows[0], strict=True)),
            )

        chosen = max(islice(product(*map(sorted, names)), MOST_CHOICES), key=fits)
        fitting = windows if any(fits(chosen)[:2]) else ()
        for several in fitting:
            for use, name in zip(several, chosen, strict=True):
                use.count = name
                use.own = use.objective.coefficients[name]
    for several in windows:
        for use in several:
            use.total = sum(other.own for other in several)
            use.together = several
            use.right = use.right or near(use.total, 1.0, use.objective.tolerance)


MOST_CHOICES = 256
"""Ways of counting that are tried for the objectives of a window together."""


# One objective over the run, for rules to read.


@dataclass(frozen=True)
class Neighbours:
    """The windows beside one, of those that an objective has.

    Attributes:
        before: the last one before it; None where there is none.
        after: the first one after it; likewise.
    """

    before: ObjectiveInWindow | None
    after: ObjectiveInWindow | None


@dataclass(frozen=True)
class ObjectiveRun:
    """One objective in all windows of an optimizer.

    Attributes:
        uses: the windows.
        ranks: number of ranks.
        declared_k: the accumulation steps that the user states or the trainer is configured with.
    """

    uses: Sequence[ObjectiveInWindow]
    ranks: int
    declared_k: int | None

    @cached_property
    def by_length(self) -> Mapping[int, Sequence[ObjectiveInWindow]]:
        """The windows of each number of passes."""
        found: defaultdict[int, list[ObjectiveInWindow]] = defaultdict(list)
        for use in self.uses:
            found[use.length].append(use)
        return found

    @cached_property
    def typical_k(self) -> int:
        """The most frequent number of passes, the largest one of several."""
        return max(self.by_length, key=lambda length: (len(self.by_length[length]), length))

    @cached_property
    def neighbours(self) -> Mapping[int, Neighbours]:
        """Number of a window -> the windows before and after it."""
        ordered = [None, *sorted(self.uses, key=lambda use: use.window.number), None]
        found = dict[int, Neighbours]()
        for before, use, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            if use is not None:
                found[use.window.number] = Neighbours(before, after)
        return found

    @cached_property
    def right(self) -> Sequence[ObjectiveInWindow]:
        """The windows of several passes in which C is 1."""
        return [use for use in self.uses if use.right and use.length > 1]

    @cached_property
    def tolerance(self) -> float:
        """Relative, of the C of any window."""
        return max(use.objective.tolerance for use in self.uses)

    @cached_property
    def is_steady(self) -> Mapping[int, bool]:
        """Whether all windows of a number of passes have the same C."""
        return {
            length: all(near(use.own, several[0].own, self.tolerance) for use in several)
            for length, several in self.by_length.items()
        }

    @cached_property
    def is_whole(self) -> bool:
        """Whether the objective is in every pass of each window."""
        return all(use.whole for use in self.uses)

    @cached_property
    def _taken_out(self) -> Sequence[float]:
        return [
            use.taken_out for use in self.uses if use.right and not near(use.taken_out, 1, 1e-3)
        ]

    @property
    def taken_out(self) -> Sequence[float]:
        """By what right windows multiply `.grad` after the last pass, where two do."""
        # clipping may make one window right by chance
        return self._taken_out if len(self._taken_out) > 1 else []


@dataclass(frozen=True)
class UseInRun:
    """One objective in one window, and the same in all of them.

    Attributes:
        use: in the window.
        run: all.
    """

    use: ObjectiveInWindow
    run: ObjectiveRun

    @property
    def tolerance(self) -> float:
        """Relative, of C."""
        return self.use.objective.tolerance

    def is_near(self, value: float) -> bool:
        """Return whether C is a number."""
        return near(self.use.own, value, self.tolerance)

    @cached_property
    def is_constant_sum(self) -> bool:
        """Whether a sum is multiplied by one number in windows of different counts."""
        use = self.use
        weight = use.objective.weight
        if use.is_mean or all(other.items == use.items for other in self.run.uses):
            return False
        uses = self.run.uses
        return all(near(other.objective.weight, weight, self.tolerance) for other in uses)

    @cached_property
    def reading(self) -> Read | None:
        """What the factor is by itself, where it is known."""
        # a sum times a constant: that it fits the count of one window may be chance
        if not self.use.whole or self.is_constant_sum:
            return None
        return _read(self)


@dataclass(frozen=True)
class ScaleSighting(Sighting):
    """What a rule found of a coefficient.

    Attributes:
        expected: the coefficient that would be right.
        is_provisional: whether other windows may still show something else: one window is chance,
            two are not.
        causes: of the fault, where the rule has none of its own.
        shown_by: by what `.grad` is multiplied after the last pass, where that is the fault.
    """

    expected: float = 1.0
    is_provisional: bool = False
    causes: tuple[str, ...] = ()
    shown_by: float = 1.0


E = UseInRun
Seen = Sighting | bool | None


# The factor of a window by itself.


@dataclass(frozen=True)
class Reading:
    """What the coefficient of a window may be.

    Attributes:
        factors: the numbers whose product it is, as `judge.naming` knows them, and -1 for one over
            the number.
        applies: whether it may be that.
        says: why it is so; braces take `r` and `ranks`.
    """

    factors: Mapping[str, int]
    applies: Callable[[E], bool]
    says: str

    def value(self, use: ObjectiveInWindow, ranks: int) -> float:
        """Return the product in a window."""
        found = 1.0
        for name, power in self.factors.items():
            found *= factor_of(name, use.length, ranks, power).value
        return found

    def cause(self, use: ObjectiveInWindow, ranks: int) -> str:
        """Return the cause in the table of faults."""
        name, power = next(iter(self.factors.items()))
        return factor_of(name, use.length, ranks, power).cause


@dataclass(frozen=True)
class Read:
    """A coefficient that has a meaning.

    Attributes:
        value: of the coefficient.
        what: of which it is, where it is that of all losses together.
        why: the meaning.
        cause: of the fault.
        fits: the number of windows that show it.
        is_unclear: whether it may as well be the program's.
    """

    value: float
    what: str
    why: str
    cause: str
    fits: int
    is_unclear: bool


def _is_of_means(e: E) -> bool:
    """Return whether means are added up, those that are made by hand among them."""
    use = e.use
    by_hand = all(near(mass, 1.0, e.tolerance) for mass in use.masses)
    return use.length > 1 and (use.is_mean or (by_hand and use.items > len(use.masses)))


def _is_of_means_on_ranks(e: E) -> bool:
    return e.run.ranks > 1 and _is_of_means(e)


def _may_be_divided_twice(e: E) -> bool:
    use = e.use
    r = use.length
    # 1/2 is a common coefficient: two micro-batches alone show no second division
    return r > 2 and (use.is_mean or all(near(mass, 1 / r**2, e.tolerance) for mass in use.masses))


def _has_ranks(e: E) -> bool:
    return e.run.ranks > 1


def _has_two_passes(e: E) -> bool:
    return e.use.length == 2


_TWICE = "divided twice by its {r} micro-batches"
READINGS = (
    Reading({"K": 1}, _is_of_means, "the sum of {r} means, never divided by their number"),
    Reading(
        {"K": 1, "ranks": 1},
        _is_of_means_on_ranks,
        "the sum of {r} means, times the {ranks} ranks, never divided by their number",
    ),
    Reading({"K": -1}, _may_be_divided_twice, _TWICE),
    Reading({"ranks": 1}, _has_ranks, "the sum of the ranks' means"),
    Reading({"ranks": -1}, _has_ranks, "each loss is divided by the count of all ranks"),
    Reading({"K": -1}, _has_two_passes, _TWICE),
)
"""What a coefficient may be, the surest first."""


def _of_own(use: ObjectiveInWindow) -> float | None:
    return use.own


def _of_all(use: ObjectiveInWindow) -> float | None:
    return use.total


def _read(e: E) -> Read | None:
    """Return the first reading that fits, of this objective alone or of all together."""
    alone_or_together: list[tuple[str, Callable[[ObjectiveInWindow], float | None]]] = [
        ("", _of_own)
    ]
    if e.use.total is not None and not e.use.others:
        alone_or_together.append((" (all losses together)", _of_all))
    applying = [one for one in READINGS if one.applies(e)]
    for what, coefficient in alone_or_together:
        for reading in applying:
            if found := _fitting(e, reading, what, coefficient):
                return found
    return None


def _fitting(
    e: E, reading: Reading, what: str, coefficient: Callable[[ObjectiveInWindow], float | None]
) -> Read | None:
    """Return a reading where the coefficient of the window is its number."""
    use = e.use
    ranks = e.run.ranks
    fitting = []
    for one in e.run.uses:
        c = coefficient(one)
        # each within what its own window knows: a coarse one may fit where exact ones do not
        if c is not None and near(c, reading.value(one, ranks), one.objective.tolerance):
            fitting.append(one)
    if use not in fitting:
        return None
    cause = reading.cause(use, ranks)
    # of a coefficient that changes from step to step, one value may be any number
    alike = e.run.by_length[use.length]
    changes = any(not one.right and one not in fitting for one in alike)
    are_divided = bool(what) and any(map(_has_its_share, use.together))
    is_unclear = bool(use.others) or changes or are_divided or _may_be_own(e, cause, what)
    why = reading.says.format(r=use.length, ranks=ranks)
    return Read(
        reading.value(use, ranks),
        what,
        why,
        cause,
        len(fitting),
        is_unclear,
    )


def _has_its_share(use: ObjectiveInWindow) -> bool:
    """Return whether each micro-batch is seen to have its share of the window: then that several
    coefficients add up to its length is chance.
    """
    divisors = (use.length, use.items)
    is_divided = any(use.objective.is_divided_by(number) for number in divisors)
    return is_divided or spread(use.masses) > use.objective.tolerance


def _may_be_own(e: E, cause: str, what: str) -> bool:
    """Return whether the program may well have a factor as a coefficient."""
    use = e.use
    if cause == "divided-twice":
        # a small coefficient is a common one, of one loss beside a larger one above all
        return use.length == 2 or (use.total or 0.0) > 2 * use.own
    if cause != "not-divided":
        return False
    # of a mean that is made by hand, the number may be its own count
    return (use.is_mean and use.objective.is_divided_by(use.length)) or _may_be_divided(use, what)


def _may_be_divided(use: ObjectiveInWindow, what: str) -> bool:
    """Return whether a division by the window's length may be there, though the weights lack it."""
    r = use.length
    window = use.window
    by_data = any(part.term.by_data for part in use.objective.parts)
    is_squared = near(use.items, float(r * r), use.objective.tolerance)
    if not (use.is_mean or what or by_data) and is_squared and use.objective.is_divided_by(r):
        return True  # of as many items as passes in each: the number may be that of either
    # what was done to `.grad` after the last pass may be a division, and clipping by hand
    unknown = window.edit == FREE or window.left < (1 + 1e-3) / r
    return unknown and window.divided is None


def _is_wrong_factor(e: E) -> Seen:
    """Ask whether C is the window's length, the number of ranks, or one over them."""
    read = e.reading
    if read is None or read.is_unclear:
        return None
    share = f"{read.value:g}" if read.value > 1 else f"1/{1 / read.value:g}"
    numbers = {"share": share, "what": read.what, "why": read.why}
    return ScaleSighting(numbers, causes=(read.cause,), is_provisional=read.fits == 1)


def _is_unclear_factor(e: E) -> Seen:
    """Ask whether C is such a number, and may be a coefficient."""
    read = e.reading
    if read is None or not read.is_unclear:
        return None
    return _either(read.why, (read.cause,), "the objective has it")


COEFFICIENT = "the loss has a coefficient"


def _either(why: str, causes: Sequence[str], own: str) -> Sighting:
    """Return that a coefficient is the program's own, or else a fault."""
    said = f": if {own}, nothing is to be done; else it is {why}"
    return Sighting(more=said, remedy=remedy_of("wrong-scale", causes))


# Windows that are right.


def _is_right(e: E) -> bool:
    return e.use.right


def _has_other_count(e: E) -> Seen:
    """Ask whether one denominator counts more than the valid targets."""
    use = e.use
    own = use.objective.parts[0].term.own
    found = use.objective.coefficients.get(own)
    if not use.right or use.count == own or own not in ("counted", "valid"):
        return None
    if not found or near(found, 1.0, e.tolerance):
        return None
    counts = WORDS.get(use.count.partition("@")[0], use.count)
    remedy = f"for a mean over {WORDS[own]}, divide by their number"
    return Sighting({"counts": counts, "own": WORDS[own]}, remedy=remedy)


def _is_plain_sum(e: E) -> bool:
    """Ask whether every item weighs 1, and nothing that other steps divide by is left in."""
    use = e.use
    is_plain = not use.is_mean and near(use.objective.weight, 1.0, e.tolerance)
    return is_plain and not _is_left_in(e) and not _lacks_factor(e)


# What the trainer's settings and a GradScaler show.


def _is_short_of_configured(e: E) -> Seen:
    """Ask whether C is r/K: nothing in the run shows K where every window is shorter."""
    use = e.use
    k = e.run.declared_k
    if k is None or use.length >= k or not use.whole:
        return None
    if not e.is_near(factor_of("the short window over K", use.length, 1, 1, k=k).value):
        return None
    return ScaleSighting({"r": use.length, "k": k, "passes": counted(use.length, "micro-batch")})


def _scale_left(e: E) -> float | None:
    """Return by what `.grad` is multiplied after the last pass, times the scale of a GradScaler
    that C is; None where it is none.
    """
    window = e.use.window
    scale = next((one for one in window.step.passed_by if e.is_near(one)), None)
    if window.edit is not None or window.factor is None or scale is None:
        return None
    return window.factor * scale


def _is_still_scaled(e: E) -> Seen:
    """Ask whether nothing has divided by the scale.

    No clipping makes a gradient larger: where more is left than there should be, nothing has.
    """
    left = _scale_left(e)
    return ScaleSighting() if left is not None and left > 1 + 1e-3 else None


def _is_scaled_and_clipped(e: E) -> bool:
    left = _scale_left(e)
    return left is not None and left < 1 - 1e-3


def _is_scaled_by_program(e: E) -> bool:
    return _scale_left(e) is not None


# What windows of other lengths, and other steps, show.


def _is_divided_again(e: E) -> Seen:
    """Ask whether a sum over the window's count is divided once more by K, or by the window's
    length.
    """
    use = e.use
    if use.is_mean or use.others or use.length < 2 or not use.whole:
        return None
    uses = e.run.uses
    k = e.run.declared_k or e.run.typical_k
    for number, lengths in ((k, [k] * len(uses)), (use.length, [u.length for u in uses])):
        pairs = zip(uses, lengths, strict=True)
        if number > 2 and all(near(u.own, 1 / r, e.tolerance) for u, r in pairs):
            return ScaleSighting({"number": number}, is_provisional=len(uses) == 1)
    return None


def _other_lengths(e: E) -> Sequence[float]:
    """Return C in windows of other lengths, where all are known and steady."""
    run = e.run
    if not run.is_steady[e.use.length] or not run.is_whole:
        return []
    return [
        several[0].own
        for length, several in run.by_length.items()
        if length != e.use.length and run.is_steady[length]
    ]


def _is_same_in_others(e: E) -> bool:
    """Ask whether windows of other lengths have the same coefficient."""
    return any(near(other, e.use.own, e.run.tolerance) for other in _other_lengths(e))


def _is_made_a_sum(use: ObjectiveInWindow) -> bool:
    """Return whether each mean is multiplied by its number of rows or of elements, as YOLOv5's are.

    Such a loss is one of a batch of any size: the window's gradient is that of all its rows together.
    """
    for part in use.objective.parts:
        own = (part.term.rows, part.term.counts.get("elements"))
        if not any(factor > 1 and factor in own for factor in part.term.factors):
            return False
    return True


def _base(e: E) -> float:
    """Return the coefficient that a window would have if it were like those beside it; else 0."""
    run = e.run
    use = e.use
    weight = run.uses[0].objective.weight
    # a sum times a constant weighs the same whatever the window
    is_constant = near(use.objective.weight, weight, run.tolerance)
    if is_constant and use.is_mean and all(map(_is_made_a_sum, run.uses)):
        return 0.0
    if run.right:
        return run.right[0].own
    is_sum = is_constant and not use.is_mean
    if is_sum or use.length == run.typical_k or not run.is_steady[run.typical_k]:
        return 0.0
    return run.by_length[run.typical_k][0].own


def _is_divided_by_other_length(e: E) -> Seen:
    """Ask whether C is r/q: the loss is divided by q in a window of r."""
    use = e.use
    base = _base(e) if _other_lengths(e) else 0.0
    if not base or not use.own:
        return None
    divisor = use.length * base / use.own
    whole = round(divisor)
    is_length = 1 <= whole <= max(e.run.by_length) and whole != use.length
    if abs(divisor - whole) >= 1e-3 or not is_length:
        return None
    what = _divided_by(e, base, whole)
    passes = counted(use.length, "micro-batch")
    numbers = {"r": use.length, "q": whole, "what": what, "passes": passes}
    return ScaleSighting(numbers, expected=base)


def _is_longer_than_its_divisor(e: E) -> Seen:
    """Ask whether a window has the passes of several whole ones, and is divided by the length of one:
    a step did not come.
    """
    seen = _is_divided_by_other_length(e)
    if not isinstance(seen, ScaleSighting):
        return None
    passes = e.use.length
    whole = seen.numbers["q"]
    is_several = isinstance(whole, int) and passes > whole and passes % whole == 0
    return seen if is_several and whole in e.run.by_length else None


def _divided_by(e: E, base: float, whole: int) -> str:
    """Return in words by what a window is divided beside its coefficient."""
    use = e.use
    typical_k = e.run.typical_k
    if near(base, 1.0, e.run.tolerance):
        return f"divided by {whole}"
    if whole != typical_k:
        return f"divided by {whole} (beside the loss's coefficient of {base:.6g})"
    # a coefficient and a division by the usual number, or a smaller coefficient and no division:
    # only the product of both is seen
    weight = use.own / use.length
    return (
        f"each micro-batch of the term {use.objective.term} weighs {weight:.6g} as in windows of"
        f" {typical_k}"
    )


def _is_begun_anew(e: E) -> Seen:
    """Ask whether passes stand before a whole window, where other windows are right and shorter."""
    use = e.use
    masses = use.masses
    if len(e.run.right) < 2 or use.length <= max(other.length for other in e.run.right):
        return None
    whole = next((k for k in range(1, len(masses)) if near(sum(masses[-k:]), 1, e.tolerance)), None)
    if whole is None:
        return None
    return ScaleSighting({"more": use.own - 1, "whole": counted(whole, "micro-batch")})


def _is_left_in(e: E) -> Seen:
    """Ask whether `.grad` is multiplied after the last pass by the inverse of what other losses
    have.

    No clipping makes the weights of two windows right.
    """
    use = e.use
    is_common = any(near(use.taken_out, other, 1e-5) for other in e.run.taken_out)
    return ScaleSighting({"own": use.own}) if is_common and e.is_near(use.taken_out) else None


def _lacks_factor(e: E) -> Seen:
    """Ask whether other steps multiply `.grad` by a number after the last pass, and this one does
    not.
    """
    use = e.use
    window = use.window
    is_untouched = window.edit is None and near(window.left, 1.0, 1e-3)
    if not e.run.taken_out or not is_untouched or not near(use.taken_out, 1.0, 1e-3):
        return None
    return ScaleSighting({"own": use.own, "other": e.run.taken_out[0]})


# What a window's one denominator counts.


def _is_of_planned_count(e: E) -> Seen:
    """Ask whether a loss is divided by the count of other windows."""
    use = e.use
    if not use.whole or not e.is_constant_sum or use.length < 2:
        return None
    planned = Counter(other.items for other in e.run.right).most_common(1)
    if not planned or planned[0][1] < 2:
        return None
    return Sighting({"count": planned[0][0], "own": use.items})


def _denominator(e: E) -> int | None:
    """Return the one denominator of a window, which is not its count, where it may count something.

    One denominator for the window is no fault of accumulation, whatever it counts, unless another
    window or rank shows the right one.
    """
    use = e.use
    if not use.whole or e.is_constant_sum or use.is_mean or use.length < 2:
        return None
    varies = any(not near(other.own, use.own, e.tolerance) for other in e.run.uses)
    return _divisor(use) if varies else None


def _divisor(use: ObjectiveInWindow) -> int | None:
    """Return one over the weight of an item, where it is a number of about the window's count."""
    weight = use.objective.weight
    divisor = 1 / weight if weight > 0 else 0.0
    # what counts something of the window is of its size; any other whole number, 2 above all, may be
    # a coefficient of the program's
    is_count = divisor > 2 and 0.5 * use.items < divisor < 2 * use.items
    return round(divisor) if is_count and near(divisor, round(divisor), 1e-4) else None


ROUGHEST = 1e-2
"""Relative error of a weight by which one count is still told from another one."""
FEWEST_COUNTS = 3
"""Counts of windows that may show a rule of their denominators: of two, the same rest may be chance."""


def _is_off_by_a_count(uses: Sequence[ObjectiveInWindow]) -> bool:
    """Return whether each window's denominator is its count and a rest, which is the same in all or
    goes with something else that is counted, such as one target for each row.
    """
    is_known = all(use.objective.weight > 0 for use in uses)
    if not is_known or len({use.items for use in uses}) < FEWEST_COUNTS:
        return False
    rests = [round(1 / use.objective.weight) - use.items for use in uses]
    names = set.intersection(*(set(use.objective.counts) for use in uses)) - {uses[0].count}
    others = [[sum(use.objective.counts[name]) for use in uses] for name in sorted(names)]
    candidates = ([1.0] * len(uses), [float(use.length) for use in uses], *others)
    return any(_is_proportional(rests, counts) for counts in candidates)


def _follows_no_count(uses: Sequence[ObjectiveInWindow]) -> bool:
    """Return whether the denominators change from window to window, and go with nothing that is
    counted, as the count of the window before.
    """
    # where all windows count alike, a constant goes with anything that is counted
    if len({use.items for use in uses}) < FEWEST_COUNTS or not all(map(_divisor, uses)):
        return False
    divisors = [float(_divisor(use) or 0) for use in uses]
    names = set.intersection(*(set(use.objective.counts) for use in uses))
    others = [[sum(use.objective.counts[name]) for use in uses] for name in sorted(names)]
    candidates = ([1.0] * len(uses), [float(use.length) for use in uses], *others)
    return not any(_is_proportional(divisors, counts) for counts in candidates)


def _is_proportional(rests: Sequence[float], counts: Sequence[float]) -> bool:
    pairs = zip(rests, counts, strict=True)
    shares = [rest / count if count else 0.0 for rest, count in pairs]
    return bool(shares[0]) and all(near(share, shares[0], 1e-6) for share in shares)


def _is_wrong_count(e: E) -> Seen:
    """Ask whether a denominator is no count of the window, and other windows show that."""
    divisor = _denominator(e)
    if divisor is None:
        return None
    uses = e.run.uses
    is_shown = (
        len({use.items for use in e.run.right}) > 1
        or _is_off_by_a_count(uses)
        or _follows_no_count(uses)
    )
    return ScaleSighting({"divisor": divisor, "items": e.use.items}) if is_shown else None


def _is_running_count(e: E) -> Seen:
    """Ask whether what is added up is divided by a count that is never reset: of all windows so far,
    in each of them.
    """
    counts = [use.objective.counts for use in e.run.uses]
    for name in sorted(set.intersection(*map(set, counts))):
        of_windows = [float(sum(of[name])) for of in counts]
        found = _divided_by_numbers(e, list(map(float, np.cumsum(of_windows))), of_windows)
        if found is not None:
            return found
    return None


def _is_count_of_last(e: E) -> Seen:
    """Ask whether what is added up is divided by the count of the window's last micro-batch, in each
    window: a number of micro-batches that do not have it all alike.
    """
    counts = [use.objective.counts for use in e.run.uses]
    for name in sorted(set.intersection(*map(set, counts))):
        lasts = [of[name][-1] for of in counts]
        # one number in all windows may be a coefficient; 1 is that of a plain sum
        if len(set(lasts)) == 1:
            continue
        # a mean of each that is made by hand has equal counts
        is_mean = _is_proportional(lasts, [sum(of[name]) for of in counts])
        found = None if is_mean else _divided_by_numbers(e, lasts, [sum(of[name]) for of in counts])
        if found is not None:
            return found
    return None


def _divided_by_numbers(e: E, numbers: Sequence[float], counts: Sequence[float]) -> Seen:
    """Ask whether an item of each window weighs one over a number of it, and not over its count: the
    loss is divided by it, or `.grad` after the last pass.
    """
    uses = e.run.uses
    if len(uses) < FEWEST_COUNTS or not e.run.is_whole or e.use.is_mean:
        return None
    at = next(i for i, use in enumerate(uses) if use is e.use)
    items = counts[at]
    if numbers[at] == items:
        return None
    told = {"divisor": numbers[at], "items": items}
    if _are_shares(uses, [1.0] * len(uses), numbers):
        return ScaleSighting(told)
    # of a window that is right with it, the factor is a part of the weights already
    factors = [1.0 if use.taken_out != 1.0 else use.window.factor or 1.0 for use in uses]
    if _are_shares(uses, factors, numbers):
        expected = e.use.own * numbers[at] / items
        return ScaleSighting(told, expected=expected, shown_by=factors[at])
    return None


def _are_shares(
    uses: Sequence[ObjectiveInWindow], factors: Sequence[float], totals: Sequence[float]
) -> bool:
    """Return whether an item of each window weighs one over a number of it."""
    for use, factor, total in zip(uses, factors, totals, strict=True):
        # each element of `.grad` is rounded when it is divided: in bfloat16 to 1/256
        tolerance = max(use.objective.tolerance, 2 * use.window.factor_error, 1e-5)
        # of gradients in bfloat16 that the program puts together a coefficient may be off by its size
        if tolerance > ROUGHEST or not near(use.objective.weight * factor * total, 1.0, tolerance):
            return False
    return True


def _is_miscounted(e: E) -> Seen:
    """Ask whether the one denominator of a window is none of what its loss may count."""
    if _denominator(e) is None:
        return None
    # one sentence for the run, with the numbers of its first window
    first = e.run.uses[0]
    items = first.items
    said = counted(round(items), "item") if items == round(items) else f"{items:g}"
    return Sighting({"divisor": round(1 / first.objective.weight), "items": said})


# What other losses show, and what is left.


def _is_scaled(objective: ComparedObjective, scale: float) -> bool:
    """Return whether each loss is seen to be multiplied by a scale."""
    return objective.is_divided_by(1 / scale)


def _lacks_scale(e: E) -> Seen:
    """Ask whether a loss is not multiplied by the scale of the GradScaler that divides the gradient
    by it, where another one of the window is.
    """
    use = e.use
    scale = use.window.step.scale
    if not scale or near(scale, 1.0, 1e-6) or _is_scaled(use.objective, scale):
        return None
    # a scale that is in no number on its way, as in a tensor of weights, is in its weight
    is_small = use.own * scale <= use.length * (1 + use.objective.tolerance)
    if not is_small or not any(_is_scaled(one, scale) for one in use.beside):
        return None
    return ScaleSighting({"scale": scale}, expected=use.own * scale)


def _is_undivided_elsewhere(e: E) -> Seen:
    """Ask whether a loss is divided by the window's length at another line of it, and here not."""
    use = e.use
    one = use.objective
    r = len(use.window.passes)
    alike = [o for o in use.beside if o.key[1] == one.key[1] and o.place != one.place]
    beside = next((o for o in alike if o.is_divided_by(r)), None)
    if beside is None or use.length == r or one.is_divided_by(r):
        return None
    if not all(near(mass, 1.0, one.tolerance) for mass in use.masses):
        return None
    numbers = {"term": one.term, "line": beside.line, "beside": beside.term}
    return Sighting(numbers, where=one.line)


def _is_undivided(e: E) -> Seen:
    """Ask whether no division of a loss by the window's length is seen, where another loss is a
    mean over the window.

    This is no fault, since a coefficient may be meant for each micro-batch.
    """
    use = e.use
    r = use.length
    one = use.objective
    has_no_count = use.is_mean or one.parts[0].term.of_parameters
    beside = next(
        (
            o
            for o in use.others
            if o.is_divided_by(r) or (has_no_count and not o.parts[0].term.mean)
        ),
        None,
    )
    if r < 2 or not use.whole or beside is None:
        return None
    # by the window's count it may be divided, too, or multiplied by its share of it
    if one.is_divided_by(r) or one.is_divided_by(use.items) or spread(use.masses) > one.tolerance:
        return None
    numbers = {"term": one.term, "line": beside.line, "beside": beside.term}
    return Sighting(numbers, where=one.line)


def _is_beside_right(e: E) -> bool:
    return bool(e.use.others)


def _is_coefficient(e: E) -> bool:
    return e.use.length > 1


# The table.


def _wrong(
    name: str,
    holds: Callable[[E], Seen],
    says: str,
    *causes: str,
    called: str = "wrong-scale",
) -> Rule[E]:
    return Rule(
        name,
        called,
        holds,
        says,
        causes=causes,
    )


def _silent(name: str, holds: Callable[[E], Seen]) -> Rule[E]:
    return Rule(
        name,
        "coefficient",
        holds,
        is_silent=True,
    )


_LEFT_IN = (
    _wrong(
        "left in",
        _is_left_in,
        "{own:.6g}: `.grad` is multiplied by it after the last pass, and no loss is divided by it,"
        " as those of other steps are",
        "loss-scale",
    ),
    _wrong(
        "lacking factor",
        _lacks_factor,
        "{own:.6g}: other steps multiply `.grad` by {other:.6g} after the last pass, and this one"
        " does not",
        "loss-scale",
    ),
)
_OTHER_COUNT = Rule[E](
    "other count",
    "other-count",
    _has_other_count,
    "the loss is divided by {counts}, more than {own}: the accumulation is right, since the"
    " whole window has one denominator",
)
_UNDIVIDED = Rule[E](
    "undivided",
    "undivided-term",
    _is_undivided,
    "no division of this term ({term}) by the number of micro-batches is seen, where the one at"
    " {line} ({beside}) is a mean over the window",
)
_ELSEWHERE = Rule[E](
    "undivided elsewhere",
    "undivided-term",
    _is_undivided_elsewhere,
    "no division of this term ({term}) by the number of micro-batches is seen, where the one at"
    " {line} ({beside}) is divided by the number of all of the window's",
)
_COEFFICIENT = Rule[E]("coefficient", "coefficient", _is_coefficient, COEFFICIENT)
_IN_ORDER = in_order(
    _wrong(
        "running count",
        _is_running_count,
        "each weighs 1/{divisor:g}, the count of all windows so far, where {items:g} count in this"
        " one",
        "running",
        called=WRONG_COUNT,
    ),
    _wrong(
        "count of the last",
        _is_count_of_last,
        "each weighs 1/{divisor:g}, the count of the last micro-batch, where {items:g} count in the"
        " window",
        called=WRONG_COUNT,
    ),
    _wrong(
        "not scaled",
        _lacks_scale,
        "1/{scale:g}: this loss is not multiplied by the scale of the GradScaler, by which the"
        " gradient is divided before the step, and others of the window are",
        "not-scaled",
    ),
    _silent("plain sum", _is_plain_sum),
    _wrong(
        "short of configured",
        _is_short_of_configured,
        "{r}/{k}: divided by {k}, where the window has {passes}",
        "short-window",
    ),
    _wrong(
        "still scaled",
        _is_still_scaled,
        "the scale of a GradScaler: nothing divides by it before this step",
        "loss-scale",
    ),
    Rule[E](
        "scaled and clipped",
        "scaled-clipping",
        _is_scaled_and_clipped,
        "the loss is multiplied by the scale of a GradScaler, and `.grad` by less than one over it"
        " before the step, as by clipping",
    ),
    _silent("scaled by the program", _is_scaled_by_program),
    _wrong(
        "divided again",
        _is_divided_again,
        "1/{number}: divided twice, by the window's count and by {number}, its micro-batches",
        "divided-twice",
    ),
    _silent("same in other windows", _is_same_in_others),
    # the numbers of the row below, but the step is to be mended and not the divisor: a remedy belongs
    # to a row
    _wrong(
        "missing step",
        _is_longer_than_its_divisor,
        "{r}/{q}: {what}, where the window has {passes}",
        "long-window",
    ),
    _wrong(
        "other length",
        _is_divided_by_other_length,
        "{r}/{q}: {what}, where the window has {passes}",
        "short-window",
    ),
    _wrong(
        "window begun anew",
        _is_begun_anew,
        "1 + {more:.6g}: its last {whole} are a whole mean, and what went backward before was not"
        " reset",
        "begun-anew",
        called="repeated-micro-batch",
    ),
    Rule[E](
        "planned count",
        "planned-count",
        _is_of_planned_count,
        "the loss is divided by {count:g}, the count of other windows, where this one has {own:g}:"
        " the accumulation is right, since the whole window has one denominator",
    ),
    Rule[E]("unclear factor", "coefficient", _is_unclear_factor, COEFFICIENT),
    _wrong("wrong factor", _is_wrong_factor, "{share}{what}: {why}"),
    _silent("beside right losses", _is_beside_right),
    _wrong(
        "wrong count",
        _is_wrong_count,
        "each weighs 1/{divisor}, where {items:g} count",
        called=WRONG_COUNT,
    ),
    Rule[E](
        "miscounted",
        "miscounted",
        _is_miscounted,
        "the loss is divided by {divisor}, but it adds up {items} (padding or shifted labels"
        " counted?)",
    ),
    # of what is the program's own, a division that is missing may be said all the same
    below=(_COEFFICIENT.name,),
    of_faults=(*names(_LEFT_IN), _UNDIVIDED.name),
)
_RIGHT = _silent("right", _is_right)
_NOT_RIGHT = (*_IN_ORDER, *_LEFT_IN, _UNDIVIDED, _COEFFICIENT)
SCALE_RULES: Sequence[Rule[E]] = (
    _OTHER_COUNT,
    replace(_ELSEWHERE, before=(_UNDIVIDED.name, _COEFFICIENT.name)),
    replace(_RIGHT, before=names(_NOT_RIGHT)),
    *_NOT_RIGHT,
)
"""What the coefficient of an objective may be; of several words on it, the first one is said."""


# Windows that begin or end at the wrong micro-batch.


def _as_window(e: E, scale: WrongScale) -> WrongScale:
    """Name a window that is divided by another one's length as `verify` does."""
    use = e.use
    by_length = e.run.by_length
    usual = by_length[e.run.typical_k]
    is_rare = len(by_length[use.length]) < len(usual)
    if is_rare and e.run.typical_k < use.length < 2 * e.run.typical_k:
        return _as_leak(use, scale, usual)
    return _of_windows(use, scale, e.run)


def _as_leak(
    use: ObjectiveInWindow, scale: WrongScale, usual: Sequence[ObjectiveInWindow]
) -> WrongScale:
    """Name a window that is longer than whole ones.

    What leaks comes beside whole windows, and whole windows follow it: until one does, nothing is
    said.
    """
    if all(other.window.number <= use.window.number for other in usual):
        return replace(scale, provisional=True)
    # a step that is left out in the middle of a loop ends no epoch
    loops = {seen.records[0].loop for seen in use.window.passes.values()}
    is_inside = len(loops) == 1 and None not in loops
    return replace(scale, name=scale.name if is_inside else "tail-leak", cause="")


def _loops(use: ObjectiveInWindow) -> list[Loop | None]:
    """Return where in its outer loops the program was in each pass."""
    return [seen.records[0].loop for _, seen in sorted(use.window.passes.items())]


def _of_windows(use: ObjectiveInWindow, scale: WrongScale, run: ObjectiveRun) -> WrongScale:
    """Name a window of another length that begins or ends at the wrong micro-batch."""
    usual = round(use.length * scale.expected / use.own) if use.own else 0
    loops = _loops(use)
    # without the program's place in its loops it is not known where a round begins
    if None in loops or usual < 2:
        return scale
    of_round = sum(loop == loops[-1] for loop in loops)
    # what an epoch has left over stands before a whole window of the next one
    if of_round == usual < use.length < 2 * usual:
        return replace(scale, name="tail-leak", cause="")
    if use.length >= usual or not _begins_round(use, run):
        return scale
    # that the first step of a round comes too early is one fault, in whichever round it shows
    alike = run.by_length[use.length]
    if any(_begins_round(one, run) and _is_followed(one, usual, run) for one in alike):
        return replace(scale, name="wrong-windows", cause="")
    is_last = run.neighbours[use.window.number].after is None
    return replace(scale, provisional=scale.provisional or is_last)


def _begins_round(use: ObjectiveInWindow, run: ObjectiveRun) -> bool:
    """Return whether a window is the first one of its round of the outer loops, and ends in it."""
    loops = _loops(use)
    before = run.neighbours[use.window.number].before
    is_first = use.window.first if before is None else _loops(before)[-1] != loops[0]
    return is_first and len({*loops}) == 1


def _is_followed(use: ObjectiveInWindow, usual: int, run: ObjectiveRun) -> bool:
    """Return whether a whole window comes next, in the same round."""
    after = run.neighbours[use.window.number].after
    if after is None or after.length != usual:
        return False
    return _loops(after)[0] == _loops(use)[-1]


# The run.


def scales(
    history: Mapping[Key, list[ObjectiveInWindow]],
    ranks: int,
    declared_k: int | None,
    notes: Counter[Occurrence],
) -> list[WrongScale]:
    """Return the coefficients that follow from how windows are cut up.

    Args:
        history: the uses of each objective of one optimizer.
        ranks: number of ranks.
        declared_k: the accumulation steps that the user states or the trainer is configured with.
        notes: takes what is worth knowing and no fault.
    """
    by_window: defaultdict[int, list[ObjectiveInWindow]] = defaultdict(list)
    for uses in history.values():
        _choose_count(uses)
        for use in uses:
            by_window[id(use.window)].append(use)
    together: defaultdict[tuple[Key, ...], list[list[ObjectiveInWindow]]] = defaultdict(list)
    for several in by_window.values():
        if len(several) > 1 and len({use.length for use in several}) == 1:
            together[tuple(use.objective.key for use in several)].append(several)
    for windows in together.values():
        _count_together(windows)
    found = list[WrongScale]()
    for uses in history.values():
        found += _of_objective(ObjectiveRun(uses, ranks, declared_k), notes)
    return found


def _of_objective(run: ObjectiveRun, notes: Counter[Occurrence]) -> Iterator[WrongScale]:
    """Yield the faults of one objective, and note what else its windows show."""
    for use in run.uses:
        e = UseInRun(use, run)
        decided = decide(SCALE_RULES, e)
        fault = decided.fault
        if fault is not None and _may_be_hidden(e, fault):
            notes[_hidden(e, fault)] += 1
        elif fault is not None:
            scale = _scale_of(e, fault)
            yield _as_window(e, scale) if scale.cause == "short-window" else scale
        else:
            said = next((one for one in decided.findings if not one.rule.is_silent), None)
            if said is not None:
                place = said.seen.where or str(use.objective.place)
                notes[said.rule.finding(replace(said.seen, where=place))] += 1


def _may_be_hidden(e: E, fault: Held[E]) -> bool:
    """Return whether the tensor of weights that a loss is multiplied by may have the inverse of a
    factor.

    Where a window is right without, or the trainer's settings show the factor, it has not.
    """
    return e.use.hides and fault.rule.name != "short of configured" and not e.run.right


def _hidden(e: E, fault: Held[E]) -> Occurrence:
    scale = _scale_of(e, fault)
    own = "the weights of the samples have its inverse"
    seen = replace(_either(scale.note, (scale.cause,), own), where=str(e.use.objective.place))
    return _COEFFICIENT.finding(seen)


def _scale_of(e: E, fault: Held[E]) -> WrongScale:
    """Return the fault of a coefficient."""
    seen = fault.seen
    assert isinstance(seen, ScaleSighting)
    cause = next(iter((*fault.rule.causes, *seen.causes)), "")
    return WrongScale(
        e.use,
        fault.rule.says.format(**seen.numbers),
        cause,
        fault.rule.called,
        seen.expected,
        seen.is_provisional,
        seen.shown_by,
    )
