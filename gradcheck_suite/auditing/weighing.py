"""The weights of the windows of one optimizer, judged together, and the violations that faults of a
window are.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

import numpy as np

from gradcheck_suite.auditing import weights as reading_weights
from gradcheck_suite.auditing.events import PassRecord
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import BackwardPass, Source, StepWindow, near
from gradcheck_suite.auditing.rules import Change, Rule, Sighting, StepFault, decide
from gradcheck_suite.auditing.scales import ObjectiveInWindow, WrongScale, scales
from gradcheck_suite.auditing.weights import (
    ACROSS_SITES,
    MEAN_OF_MEANS,
    UNEQUAL,
    UNEVEN,
    ComparedObjective,
    Key,
    Reading,
    coefficient,
    evidence,
)
from gradcheck_suite.core.faults import FAULTS, FIX, remedy_of
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.results import Unknown, Violation, Weight
from gradcheck_suite.judge.naming import diagnose, means_text, names_nothing
from gradcheck_suite.judge.weights import Diagnosis, Weights

MAX_ROWS = 64
"""Rows of the table of weights that a violation keeps."""
OF_ACCUMULATION = frozenset({"rescaled-accumulator", "repeated-micro-batch"})
"""Faults of how losses are added up, as weights alone may show them."""
DECLARE = (
    "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean"
    " divides by"
)
OF_GIVEN = (
    "see that the forward which the given gradient was computed from had the same parameters and"
    " random numbers as this one; `--without weights` judges the rest alone"
)


@dataclass(frozen=True)
class WindowReadings:
    """A window whose weights are judged with those of the others.

    Attributes:
        window: the window.
        coefficients: of its passes.
        readings: the weights, with the factor by which `.grad` was multiplied after the last pass,
            and without it, where there is one: it may be a part of the loss (a mean over K at the
            end) or none (clipping).
        factor: this factor; 1 where there is none.
        read: reads the weights with a factor after the last pass.
        kept: where the program has put `.grad` together from what it kept, each kept gradient as a
            window of its own.
        scaled: whether a common factor of the weights matters: it does not where the gradient is
            normalized.
    """

    window: StepWindow
    coefficients: Mapping[Source, float]
    readings: Sequence[Reading]
    factor: float
    read: Callable[[float], Reading]
    kept: Sequence[WindowReadings] = ()
    scaled: bool = True

    @property
    def length(self) -> int:
        """The number of passes that are in `.grad`."""
        return len({index for _, index in self.coefficients})

    @property
    def factor_error(self) -> float:
        """Relative, of the factor, as it was measured."""
        return 0.0 if self.factor == 1.0 else self.window.factor_error

    def with_factor(self, factor: float) -> WindowReadings:
        """Return the window with another factor after its last pass."""
        readings = [self.read(factor), *self.readings[1:]]
        return replace(self, factor=factor, readings=readings)

    @property
    def places(self) -> set[Place]:
        """Where its passes were called."""
        return {self.window.passes[index].site for _, index in self.coefficients}

    @property
    def is_right(self) -> bool:
        """Whether the losses weigh their items rightly with the coefficients of the passes, as far
        as all are read.
        """
        found = reading_weights.objectives(self.readings[-1], {})
        passes = [self.window.passes[index] for _, index in self.coefficients]
        records = chain.from_iterable(seen.records for seen in passes)
        terms = chain.from_iterable(record.terms for record in records)
        return (
            _are_right(found)
            and not any(term.opaque for term in terms)
            and all(len(objective.parts) > 1 for objective in found)
        )

    def taken_out(self, found: Sequence[ComparedObjective]) -> float:
        """Return by what `.grad` was multiplied after the last pass, in a reading in which that is
        a weight; else 1.
        """
        part = found[0].parts[0]
        scale = self.window.step.scale or 1.0
        factor = part.coefficient * scale / self.coefficients[part.source]
        # rounded, since factors of several windows are counted as the same
        return float(f"{factor:.6g}")


Repeated = tuple[Violation, set[int | None]]
United = dict[tuple[str, str | None], Repeated]
"""Diagnosis and place -> the first of the violations, and the steps of all."""


@dataclass
class WeightVerdict:
    """What the weights of an optimizer's windows showed.

    Attributes:
        violations: with the number of the step.
        provisional: more of them, that no second window shows yet: a coefficient that changes may
            have any value in one.
        united: the same, one for each diagnosis and place.
        notes: what is worth knowing -> how often.
        unknown: what could not be judged, and what to do -> how often.
        steps: the steps whose weights were judged.
    """

    violations: list[Violation] = field(default_factory=list)
    provisional: list[Violation] = field(default_factory=list)
    united: United = field(default_factory=dict)
    notes: Counter[Occurrence] = field(default_factory=Counter)
    unknown: Counter[Unknown] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)


@np.errstate(all="ignore")  # weights may be infinite, and the script's output stays what it was
def judge_weights(
    pending: Sequence[WindowReadings],
    typical_k: int | None,
    declared_k: int | None,
    ranks: int,
    name_of: Callable[[int], str | None],
) -> WeightVerdict:
    """Judge the weights of the windows of one optimizer.

    Args:
        pending: the windows.
        typical_k: the most frequent number of passes.
        declared_k: the accumulation steps that the user states or the trainer is configured with.
        ranks: number of ranks.
        name_of: the name of a parameter.
    """
    result = WeightVerdict()
    pending = _with_known_factors(pending, (typical_k, ranks))
    found_in = _objectives(pending, (typical_k, ranks))
    uses = ObjectiveUses()
    for one, found in zip(pending, found_in, strict=True):
        # a loss that goes backward twice explains the weights of its window: they are not judged
        # beside it
        if _judge_losses(one, result):
            continue
        unreadable, partial = _note_unknown(one, found, result, name_of)
        if one.length == 1 or ((found or partial) and not unreadable):
            result.steps.add(one.window.number)
        for use in _uses(one, found):
            uses.take(use, result.notes, is_scaled=one.scaled)
    # a loss that is right in some window has no coefficient of its own
    shown = {objective.key for objective in chain.from_iterable(found_in) if objective.right()}
    for key, several in uses.unequal.items():
        if any(_has_returns(use.objective) for use in several):
            place = several[0].objective.place
            said = "each pass weighs another number, some of them negative, as returns or advantages do"
            result.notes[finding("changing-coefficient", said, place)] += len(several)
            continue
        unnamed = [use.objective for use in several if use.objective.named is None]
        # named once over all windows: one window may be explained by many rules
        general = _named(unnamed) if unnamed else None
        result.violations += [_of_unequal(use, general, is_shown=key in shown) for use in several]
    for scale in scales(uses.equal, ranks, declared_k, result.notes):
        violations = result.provisional if scale.provisional else result.violations
        violations.append(_of_scale(scale))
    return result


@dataclass
class ObjectiveUses:
    """The objectives of an optimizer's windows.

    Attributes:
        equal: those whose items have one weight in a window.
        unequal: those whose items have not.
    """

    equal: defaultdict[Key, list[ObjectiveInWindow]] = field(
        default_factory=lambda: defaultdict(list)
    )
    unequal: defaultdict[Key, list[ObjectiveInWindow]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, use: ObjectiveInWindow, notes: Counter[Occurrence], *, is_scaled: bool) -> None:
        """Take an objective in a window."""
        objective = use.objective
        if objective.status == UNEQUAL and _is_coefficient(use):
            said = "a coefficient changes within a window"
            notes[finding("changing-coefficient", said, objective.place)] += 1
        elif objective.status == UNEQUAL and _is_difference(objective):
            said = (
                "a loss is added in half of a window's passes and subtracted in the others, as that"
                " of a critic: if it is no difference of two, a sign is wrong"
            )
            notes[finding("changing-coefficient", said, objective.place)] += 1
        elif objective.status == UNEQUAL:
            self.unequal[objective.key].append(use)
        elif is_scaled:
            self.equal[objective.key].append(use)


def _objectives(
    pending: Sequence[WindowReadings], divisors: Sequence[int | None]
) -> list[list[ComparedObjective]]:
    """Return the objectives of each window, as the windows together show them."""
    modes = reading_weights.best_modes([one.readings for one in pending])
    found_in = [_objectives_of(one, modes, divisors) for one in pending]
    across_sites = {o.key for o in chain.from_iterable(found_in) if o.key[2] == ACROSS_SITES}
    # clipping makes no two windows right
    right = Counter(
        one.taken_out(found)
        for one, found in zip(pending, found_in, strict=True)
        if _are_right(found)
    )
    taken_out = {factor for factor, times in right.items() if times > 1} - {1.0}
    if not across_sites and not taken_out:
        return found_in
    return [_objectives_of(one, modes, divisors, across_sites, taken_out) for one in pending]


def _with_known_factors(
    pending: Sequence[WindowReadings], divisors: Sequence[int | None]
) -> Sequence[WindowReadings]:
    """Return windows with the factor after their last pass as it is, where rounding hides its digits.

    In 16 bits each element of `.grad` is rounded when it is divided. Clipping makes no `.grad` of
    every window one over a number of that window.
    """
    if len(pending) < FEWEST_FACTORS or all(one.factor_error <= SHARE for one in pending):
        return pending
    numbers = [_numbers_of(one, divisors) for one in pending]
    for name in sorted(set.intersection(*map(set, numbers)), key=str):
        shares = [1 / of[name] if of[name] else 0.0 for of in numbers]
        pairs = list(zip(pending, shares, strict=True))
        if all(near(one.factor, share, max(SHARE, one.factor_error)) for one, share in pairs):
            return [one.with_factor(share) for one, share in pairs]
    return pending


def _numbers_of(one: WindowReadings, divisors: Sequence[int | None]) -> Mapping[Key, float]:
    """Return what a program may divide the `.grad` of a window by: the number of its passes or of
    those of other windows, of ranks, or of what its losses count.
    """
    found: dict[Key, float] = {("passes",): one.length}
    found |= {("usual", place): float(number) for place, number in enumerate(divisors) if number}
    for objective in reading_weights.objectives(one.readings[-1], {}):
        for name, counts in objective.counts.items():
            found["sum", objective.key[1:], name] = sum(counts)
    return found


SHARE = 1e-5
"""Relative error of a factor up to which one window tells what it is one over."""
FEWEST_FACTORS = 2
"""Windows from which on factors that are known badly tell it together: one may be chance."""


def _judge_losses(one: WindowReadings, result: WeightVerdict) -> bool:
    """Judge losses whose weights say nothing, such as one that goes backward twice.

    Return whether there are some.
    """
    held = decide(OF_LOSSES, one).fault
    if held is None:
        return False
    result.steps.add(one.window.number)
    fault = held.rule.fault(held.seen)
    result.violations.append(violation_of(fault, one.window, one.window.where))
    return True


def _objectives_of(
    one: WindowReadings,
    modes: Mapping[Key, Sequence[str]],
    divisors: Sequence[int | None],
    across_sites: Collection[Key] = frozenset(),
    taken_out: Collection[float] = frozenset(),
) -> list[ComparedObjective]:
    """Return the objectives of a window, the factor after its last pass taken as a part of them or
    not.

    Args:
        one: the window.
        modes: of each expression, the best one first.
        divisors: the most frequent number of passes, and that of ranks.
        across_sites: the keys of objectives that are right at several places together in some
            window.
        taken_out: factors that are a part of the weights in other windows.
    """
    found = [reading_weights.objectives(reading, modes, across_sites) for reading in one.readings]
    # a factor of 1/K after the last pass is the mean over K, and where all items weigh 1/K
    # together, or one over the number of ranks, they were divided twice; any other factor may be
    # clipping, which is no weight
    shares = {1 / (divisor or one.length) for divisor in (one.length, *divisors)} - {1.0}
    totals = set(chain.from_iterable(objective.coefficients.values() for objective in found[0]))
    is_part = any(near(one.factor, share, SHARE) for share in shares.union(taken_out))
    is_divided_again = any(near(*pair, SHARE) for pair in product(totals, shares))
    takes_out = len(found) > 1 and any(map(_weighs_one, found[0]))
    is_weight = is_part or is_divided_again or takes_out or _are_right(found[0])
    return found[0] if is_weight else found[-1]


def _weighs_one(objective: ComparedObjective) -> bool:
    """Return whether unequal weights weigh 1 together: what was multiplied into the loss, such as a
    scale against underflow, is taken out after the last pass.
    """
    if objective.status != UNEQUAL or objective.named is None:
        return False
    masses = zip(objective.weights, objective.counts_of(objective.count), strict=True)
    return near(sum(weight * count for weight, count in masses), 1.0, objective.tolerance)


def _are_right(found: Sequence[ComparedObjective]) -> bool:
    return bool(found) and all(objective.right() for objective in found)


def _repeated_terms(one: WindowReadings) -> list[tuple[int, int]]:
    """Return of each pass how many of its terms have gone backward before, and how many it has."""
    found = [one.window.passes[index].records[rank].terms for rank, index in one.coefficients]
    return [(sum(term.repeated for term in terms), len(terms)) for terms in found if terms]


def _is_running_sum(one: WindowReadings) -> bool:
    """Ask whether earlier losses go backward with new ones."""
    return any(0 < times < number for times, number in _repeated_terms(one))


def _is_repeated(one: WindowReadings) -> bool:
    """Ask whether losses go backward more than once."""
    return any(times for times, _ in _repeated_terms(one))


PARTIAL = (
    "the loss sees items through which no gradient flows, and is no sum over the window's"
    " micro-batches"
)


def _has_unequal_replays(one: WindowReadings) -> Sighting | None:
    """Ask whether one loss over cached items weighs another number in each pass.

    Each pass has the whole loss, and lets the gradient through to its own items: these weigh what
    the loss weighs there.
    """
    weights = defaultdict[tuple[str, ...], list[float]](list)
    for rank, index in sorted(one.coefficients):
        record = one.window.passes[index].records[rank]
        partial = [term for term in record.terms if term.partial and not term.opaque]
        # a term with a gradient to all its items beside it can be compared as usual
        if len(partial) != len(record.terms):
            return None
        for term in partial:
            whole = (term.weight or 0.0) * term.counts.get(term.own, 0.0)
            weights[term.expression].append(whole * one.coefficients[rank, index])
    # passes of several lines have losses of their own
    if len({one.window.passes[index].site for _, index in one.coefficients}) != 1:
        return None
    for found in weights.values():
        if len(found) == one.length > 1 and not near(min(found), max(found), 1e-3):
            return Sighting({"weights": ", ".join(f"{weight:.4g}" for weight in found[:6])})
    return None


OF_LOSSES: Sequence[Rule[WindowReadings]] = (
    Rule[WindowReadings](
        "running sum",
        "repeated-micro-batch",
        _is_running_sum,
        "earlier losses go backward several times, as when the running sum of the losses goes"
        " backward each time",
        before=("repeated", "unequal replays"),
    ),
    Rule[WindowReadings](
        "repeated",
        "repeated-micro-batch",
        _is_repeated,
        "a loss goes backward more than once in the window",
        before=("unequal replays",),
    ),
    Rule[WindowReadings](
        "unequal replays",
        "unrecognised-weights",
        _has_unequal_replays,
        "each pass computes the whole loss of the window, with a gradient to some of its items, and"
        " the loss weighs another number in each ({weights}), so that items do",
    ),
)
"""What the losses of a window show that have no weights to be compared."""


def read_joined(passes: Mapping[int, BackwardPass], sources: Iterable[Source]) -> None:
    """Read a term as a sum over items again where the rows that it joins without a gradient are no
    cached items.

    Cached items are those of the window's other passes, or of the other ranks: together the passes,
    or the ranks of each, let a gradient through to every item once. Rows of zeros as padding, or a
    bank of negatives, are others.
    """
    records = [(index, passes[index].records[rank]) for rank, index in sources]
    shares: defaultdict[int, float] = defaultdict(float)
    for index, record in records:
        shares[index] += next((term.partial[0] for term in record.terms if term.partial), 0.0)
    of_ranks = len(records) > len(shares) and all(
        near(share, 1.0, 1e-6) for share in shares.values()
    )
    if of_ranks or near(sum(shares.values()), 1.0, 1e-6):
        return
    for _, record in records:
        record.whole = []
        for term in record.terms:
            term.partial = None


def _note_unknown(
    one: WindowReadings,
    found: Sequence[ComparedObjective],
    result: WeightVerdict,
    name_of: Callable[[int], str | None],
) -> tuple[bool, bool]:
    """Note what of a window's losses could not be read.

    Return whether there is such a part, and one that is no sum. A loss that is no sum over the
    window's micro-batches has no weights, so that none are missing.
    """
    window = one.window
    records = {source: window.passes[source[1]].records[source[0]] for source in one.coefficients}
    unreadable = set[Unknown]()
    partial = set[Unknown]()
    for record in records.values():
        for term in record.terms:
            if term.opaque:
                remedy = OF_GIVEN if term.expression[0] == "given" else DECLARE
                place = str(record.place)
                one_loss = Unknown(
                    "weights",
                    place,
                    term.opaque,
                    remedy,
                    name="unreadable-loss",
                )
                unreadable.add(one_loss)
            elif term.partial:
                partial.add(
                    Unknown(
                        "weights",
                        str(record.place),
                        PARTIAL,
                        name="joined-items",
                    )
                )
    if one.length > 1:
        result.unknown.update(unreadable | partial)
        result.notes.update(_repeated_outside(one, [*records.values()], name_of))
    reason = "the number of terms differs between micro-batches"
    uneven = [
        Unknown(
            "weights",
            str(one.place),
            reason,
            DECLARE,
            name="uneven-terms",
        )
        for one in found
        if one.status == UNEVEN
    ]
    result.unknown.update(uneven)
    return bool(unreadable or uneven), bool(partial)


def _repeated_outside(
    one: WindowReadings, records: Sequence[PassRecord], name_of: Callable[[int], str | None]
) -> Iterator[Occurrence]:
    """Yield that parameters outside of cached items get a gradient from each pass over the same
    items.
    """
    whole = set[int]().union(*(record.whole for record in records)) & {*one.window.keys}
    places = set[object]()
    for record in records:
        places |= {term.partial[1] for term in record.terms if term.partial}
    if not whole or len(places) != one.length:
        return
    names = ", ".join(sorted(str(name_of(key)) for key in whole))
    said = (
        f"outside of the cached items, the gradient of {names} arrives from each of the"
        f" {one.length} passes over the same items: it is {one.length} times too large"
    )
    remedy = f"divide it by {one.length} before the step"
    yield finding("repeated-outside-cache", said, one.window.where, remedy)


def _uses(one: WindowReadings, found: Sequence[ComparedObjective]) -> Iterator[ObjectiveInWindow]:
    """Yield each objective of a window whose terms can be compared."""
    window = one.window
    site = {
        source: window.passes[source[1]].records[source[0]].place for source in one.coefficients
    }
    right = [o for o in found if o.right() and not o.parts[0].term.of_parameters]
    for objective in (_beside_empty(o, window) for o in found if o.status != UNEVEN):
        sources = {part.source for part in objective.parts}
        # the window's length is that of the call sites that this objective comes from
        here = {site[source] for source in sources}
        passes = {source[1] for source in one.coefficients if site[source] in here}
        others = [o for o in right if o.key != objective.key]
        is_beside_unequal = any(o.status != objective.status == UNEQUAL for o in found)
        yield ObjectiveInWindow(
            window,
            objective,
            length=len(passes),
            whole={source[1] for source in sources} == passes,
            taken_out=one.taken_out([objective]),
            others=others,
            beside=[o for o in found if o.key != objective.key and o.parts],
            alone=bool(others) or is_beside_unequal,
        )


def _is_coefficient(use: ObjectiveInWindow) -> bool:
    """Return whether unequal weights are a coefficient that changes: other losses of the same
    passes are right.
    """
    sources = {part.source for part in use.objective.parts}
    covered = {
        part.source for part in chain.from_iterable(o.parts for o in use.others if len(o.parts) > 1)
    }
    return not use.objective.named and (
        covered >= sources or use.objective.parts[0].term.of_parameters
    )


def _is_difference(objective: ComparedObjective) -> bool:
    """Return whether as many micro-batches have a negative weight as a positive one, and all have the
    same beside that, each item or each micro-batch.
    """
    weights = np.array([part.weight for part in objective.parts])
    if 2 * np.count_nonzero(weights < 0) != len(weights) or not weights.all():
        return False
    counts = np.array(objective.counts_of(objective.parts[0].term.own))
    sizes = np.abs(weights), np.abs(weights) * counts
    return any(np.ptp(size) <= objective.tolerance * size.max() for size in sizes)


def _has_returns(objective: ComparedObjective) -> bool:
    """Return whether micro-batches have weights of both signs and of different sizes: no count, and no
    number of passes, has a sign, and a flipped one leaves the size.
    """
    weights = np.array([part.weight for part in objective.parts])
    sizes = np.sort(np.abs(weights))
    are_different = np.diff(sizes).min() > objective.tolerance * sizes[-1]
    return objective.named is None and bool(are_different and weights.min() < 0 < weights.max())


# Violations, in words.


def violation_of(
    fault: StepFault, window: StepWindow, where: Place, parameter: str | None = None
) -> Violation:
    """Return the violation that a fault of a window is."""
    # a remedy may name the trainer's own option
    package = (window.step.trainer or "").partition(".")[0]
    loss = place_of_loss(window, where)
    line = fault.change.line if fault.change else None
    return Violation(
        kind=fault.kind,  # type: ignore[arg-type]
        diagnosis=fault.name,
        explanation=f"{fault.sentence}{FIX}{remedy_of(fault.name, fault.causes, library=package)}",
        window=window.number,
        found_after=window.number + 1,
        step=window.number,
        command="audit",
        where=line or loss,
        change=fault.change.what if fault.change and line else None,
        loss=loss if line else None,
        backward=str(window.where) if window.passes else None,
        stepped=str(window.step.place),
        parameter=parameter,
    )


def place_of_loss(window: StepWindow, where: Place) -> str:
    """Return the line of the loss that goes backward at a place, or the place where it is not
    known.
    """
    records = [
        record
        for record in chain.from_iterable(seen.records for seen in window.passes.values())
        if record.place == where
    ]
    return next(
        (
            term.line
            for term in chain.from_iterable(record.terms for record in records)
            if term.line
        ),
        str(where),
    )


def _rows(objective: ComparedObjective, count: str, expected: float) -> tuple[Weight, ...]:
    """Return the weight of each item, by micro-batch: expected and observed."""
    order = {
        index: j for j, index in enumerate(sorted({part.source[1] for part in objective.parts}))
    }
    ranks = len({part.source[0] for part in objective.parts}) > 1
    rows = [
        Weight(
            micro_batch=order[part.source[1]],
            where=objective.place.line,
            # a micro-batch's own reading may lack the count by which the others are compared
            count=part.term.counts.get(count, part.term.counts[part.term.own]),
            expected=expected,
            observed=weight,
            rank=part.source[0] if ranks else None,
        )
        for part, weight in zip(objective.parts, objective.weights, strict=True)
    ]
    return tuple(rows[:MAX_ROWS])


def _of_weights(fault: StepFault, use: ObjectiveInWindow, rows: tuple[Weight, ...]) -> Violation:
    """Return the violation that a fault of an objective's weights is: at its own line where others
    are right.
    """
    error = max(
        # a micro-batch without items has no weight that could be off
        (abs(row.observed / row.expected - 1) for row in rows if row.count and row.expected),
        default=0.0,
    )
    share = "less than 1%" if error < 0.01 else f"{100 * error:.3g}%"
    fault = replace(fault, sentence=f"{fault.sentence} (weights are off by up to {share})")
    allowed = max(part.tolerance for part in use.objective.parts)
    loss = use.objective.line if use.alone else place_of_loss(use.window, use.objective.place)
    change = _division(fault, use, loss)
    violation = violation_of(replace(fault, change=change), use.window, use.objective.place)
    found = replace(
        violation,
        error=error,
        allowed=allowed,
        weights=rows,
    )
    return replace(found, loss=loss) if change else replace(found, where=loss)


OF_OTHER_LINES = frozenset({"loss-scale", "growing", "begun-anew", "varying", "long-window"})
"""Causes of a wrong weight that are at no division of a loss."""


def _division(fault: StepFault, use: ObjectiveInWindow, loss: str) -> Change | None:
    """Return the line that multiplies or divides the loss, where there is one beside the loss's own."""
    if use.alone:
        return None  # others, which are right, may share it
    lines = set(chain.from_iterable(part.term.divisions for part in use.objective.parts))
    # of several lines it is not known which one divides by the wrong number
    if len(lines) != 1 or lines == {loss} or OF_OTHER_LINES & {fault.name, *fault.causes}:
        return None
    return None if fault.name == "tail-leak" else Change("division", [*lines])


def _of_unequal(use: ObjectiveInWindow, general: Diagnosis | None, *, is_shown: bool) -> Violation:
    """Return the violation of weights that differ within a window.

    Args:
        use: the window.
        general: their name where no count explains them.
        is_shown: whether other windows show that the loss has no coefficient.
    """
    objective = use.objective
    own = use.objective.parts[0].term.own
    named = objective.named or general
    count = objective.count or own
    assert named is not None
    empty = _empty(objective, use.window) if named.name == MEAN_OF_MEANS else set()
    w = _weights(objective, count, empty)
    whole = 1.0 if is_shown else coefficient(w)
    sentence = named.sentence
    causes = named.causes
    if named.name == MEAN_OF_MEANS:
        # with the share of those without items, and with a division that is left out
        seen = replace(w, observed=w.observed / whole)
        told = diagnose(seen, only=(MEAN_OF_MEANS,))
        sentence = means_text(seen, [seen]) if names_nothing(told) else told.sentence
        causes = told.causes
        if count == "elements" and w.counts != _weights(objective, own, empty).counts:
            sentence = (
                "the mean divides by all elements of its micro-batch, padding included, and"
                f" {sentence}"
            )
    rows = _rows(objective, count, whole / (w.window_count or 1.0))
    return _of_weights(StepFault(named.name, sentence, causes=causes), use, rows)


def _beside_empty(objective: ComparedObjective, window: StepWindow) -> ComparedObjective:
    """Return an objective as unequal where it is of means of equal counts, and a micro-batch is
    without items.

    Such a micro-batch has no term, and its share of the mean is missing all the same.
    """
    first = objective.parts[0].term
    empty = len(_empty(objective, window))
    if objective.status == UNEQUAL or objective.right() or not first.mean or not empty:
        return objective
    mass = objective.weights[0] * first.counts.get(first.own, 0.0)
    # only a mean over all micro-batches, those without items among them, lacks their share
    if not near(mass * (len(objective.parts) + empty), 1.0, objective.tolerance):
        return objective
    return replace(objective, status=UNEQUAL, named=Diagnosis(MEAN_OF_MEANS, ""))


def _empty(objective: ComparedObjective, window: StepWindow) -> set[Source]:
    """Return the passes of an objective's lines that have no items, and so nothing of it."""
    own = {part.source for part in objective.parts}
    places = {window.passes[index].records[rank].place for rank, index in own}
    empty = set[Source]()
    for index, seen in window.passes.items():
        for rank, record in enumerate(seen.records):
            if record.place in places and any(map(reading_weights.is_empty, record.terms)):
                empty.add((rank, index))
    return empty - own


@dataclass(frozen=True)
class Pattern:
    """What unequal weights of several windows have in common.

    Attributes:
        name: of the fault.
        holds: whether all windows show it.
        says: what it is.
    """

    name: str
    holds: Callable[[Sequence[Weights]], bool]
    says: str


def _are_by_count_before(found: Sequence[Weights]) -> bool:
    """Return whether an item weighs one over the count of the micro-batch before its own."""
    products = list[float]()
    counts = set[float]()
    for w in found:
        products += [float(a * n) for a, n in zip(w.observed[1:], w.counts[:-1], strict=True)]
        counts.update(map(float, w.counts[:-1]))
    is_known = (
        len(products) >= FEWEST_NUMBERS and len(counts) > 1 and not any(w.owners for w in found)
    )
    return is_known and near(min(products), max(products), max(w.tolerance for w in found))


def _are_ramps(found: Sequence[Weights]) -> bool:
    """Return whether the means of micro-batches weigh more from one to the next by one number."""
    steps = list[float]()
    for w in found:
        steps += map(float, np.diff(w.per_mean))
    largest = max(float(np.abs(w.per_mean).max()) for w in found)
    # of several ranks, neighbours in the row are not neighbours in time
    is_known = len(steps) >= FEWEST_NUMBERS and not any(w.owners for w in found)
    tolerance = max(w.tolerance for w in found)
    return is_known and min(map(abs, steps)) > tolerance and np.ptp(steps) <= tolerance * largest


FEWEST_NUMBERS = 4
"""Numbers of which a rule is read: of fewer it may be chance."""
PATTERNS = (
    Pattern(
        "wrong-count",
        _are_by_count_before,
        "each micro-batch is divided by the count of the one before",
    ),
    Pattern(
        "weighted-by-place",
        _are_ramps,
        "the weight of a micro-batch changes by the same amount from each to the next",
    ),
)
"""What no count of a micro-batch's own explains."""


def _named(objectives: Sequence[ComparedObjective]) -> Diagnosis:
    """Name weights that no count explains, as a loop that is verified would be.

    Args:
        objectives: one objective in all windows where its weights differ.
    """
    found = [_weights(one, one.parts[0].term.own) for one in objectives]
    observed = found[0].observed
    said = (
        "items of different micro-batches have different weights: the micro-batches' items weigh "
        f"{', '.join(f'{weight:.3g}' for weight in observed[:6])}"
    )
    usual = [
        np.abs(w.observed - np.median(w.observed)) <= w.tolerance * np.median(w.observed)
        for w in found
    ]
    # most micro-batches agree in every window
    if all(2 * same.sum() > len(same) for same in usual):
        # a special case for the first or the last micro-batch, a loss scale, a coefficient
        return Diagnosis("weighted-by-place", said, causes=("sign",) if observed.min() < 0 else ())
    summed = all(map(_is_summed, objectives))
    pattern = next((one for one in PATTERNS if summed and one.holds(found)), None)
    if pattern is not None:
        return Diagnosis(pattern.name, f"{pattern.says}: {said}")
    named = diagnose(
        found[0], found[1:], only=FAULTS.keys() - OF_ACCUMULATION if summed else FAULTS.keys()
    )
    return Diagnosis(named.name, said) if names_nothing(named) else named


def _is_summed(objective: ComparedObjective) -> bool:
    """Return whether each pass has one coefficient.

    Each loss went backward once then, and the running sum is not rescaled.
    """
    coefficients = [part.coefficient for part in objective.parts]
    return all(near(one, coefficients[0], objective.tolerance) for one in coefficients)


def _weights(objective: ComparedObjective, count: str, empty: Collection[Source] = ()) -> Weights:
    """Return the weights of an objective by what is counted, those of micro-batches without items
    among them.
    """
    numbers = [part.term.counts.get(count, 0.0) for part in objective.parts]
    return evidence(
        objective.parts,
        objective.weights,
        numbers,
        empty=empty,
    )


def _of_scale(scale: WrongScale) -> Violation:
    """Return the violation of a common weight that follows from how the window is cut up."""
    use = scale.use
    total = use.items or 1.0
    times = use.own / scale.expected
    share, _, why = scale.note.partition(": ")
    if why and (whole := re.fullmatch(r"(\d+)(/\d+)?", share)):
        # the factor is said once, as the fraction that shows where it comes from
        share = f"{share} of" if whole[2] else f"{share} times"
        sentence = f"every item of the window weighs {share} what it should: {why}"
    else:
        sentence = f"every item of the window weighs {times:.6g} times what it should: {scale.note}"
    if scale.name == "tail-leak":
        sentence += (
            "; the gradient of micro-batches that belong to the window before is still in it"
        )
    rows = _rows(use.objective, use.count, scale.expected / total)
    rows = tuple(
        replace(row, observed=row.observed * scale.shown_by, expected=row.expected * scale.shown_by)
        for row in rows
    )
    fault = StepFault(scale.name, sentence, causes=(scale.cause,) if scale.cause else ())
    return _of_weights(fault, use, rows)
