"""The weights of a window's items: equal, and 1/N, over all its micro-batches and ranks?

A term is one reduction of one backward pass (`terms.py`). Terms of one backward are never compared
with each other: what a program adds up in one loss is its own. The terms that one call site sends
backward with one expression are an objective, and its terms in the passes of a window must give
each item the same weight, C/N, where N counts the window. Whether C is the program's coefficient or
follows from how the window is cut up is asked of the whole run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import numpy as np

from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import Seen, Source, StepWindow, near
from gradcheck_suite.core.faults import remedy_of
from gradcheck_suite.core.findings import Found, finding
from gradcheck_suite.core.text import counted
from gradcheck_suite.judge.naming import diagnose, names_nothing
from gradcheck_suite.judge.weights import ADDED, MOST_ADDED, Diagnosis, Weights

EQUAL = "equal"
UNEQUAL = "unequal"
UNEVEN = "uneven"
MEAN_OF_MEANS = "mean-of-means"
WRONG_COUNT = "wrong-count"
ACROSS_SITES = "*"
"""The mode of an expression that is one objective at several places."""


@dataclass(frozen=True)
class Part:
    """One term of an objective in one pass.

    Attributes:
        source: its rank and pass.
        term: in numbers.
        coefficient: of the pass in `.grad`.
        error: of the coefficient, relative.
    """

    source: Source
    term: Term
    coefficient: float
    error: float = 0.0

    @property
    def tolerance(self) -> float:
        """Relative, of the weight."""
        return max(self.term.tolerance, self.error)

    @property
    def weight(self) -> float:
        """The weight of each item in `.grad`."""
        return (self.term.weight or 0.0) * self.coefficient


@dataclass(frozen=True)
class Objective:
    """One objective in one window, and how its terms compare.

    Attributes:
        key: site, expression, mode and ordinal.
        parts: its terms.
        status: `equal`, `unequal`, or `uneven` where they cannot be compared.
        coefficients: what may be counted -> C, the weight of an item times the window's count.
        weight: of each item, where they are equal.
        counts: what may be counted -> the counts of the parts.
        named: the fault where counts explain weights that are unequal, whatever C is.
        count: what is counted there.
    """

    key: Key
    parts: Sequence[Part]
    status: str
    coefficients: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    named: Diagnosis | None = None
    count: str = ""

    @property
    def place(self) -> Place:
        """Where it goes backward."""
        place: Place = self.key[0]
        return place

    @property
    def line(self) -> str:
        """The line of the loss, or else where it goes backward."""
        # the first passes of a line may have no stack yet
        return next((p.term.line for p in self.parts if p.term.line), None) or str(self.place)

    @property
    def term(self) -> str:
        """Its expression, such as `Mean(Abs)`."""
        *above, last = self.key[1][:-1]  # without the task
        return "(".join((*above, last)) + ")" * len(above)

    @property
    def tolerance(self) -> float:
        """Relative, of its C."""
        return max(10 * max((part.tolerance for part in self.parts), default=0.0), 1e-5)

    @property
    def weights(self) -> list[float]:
        """The weight of an item of each part; negative where its sign is not that of the most."""
        return with_common_sign([part.weight for part in self.parts])

    def counts_of(self, name: str) -> list[float]:
        """Return what each part counts by one way of counting."""
        return [part.term.counts.get(name, 0.0) for part in self.parts]

    def right(self, tolerance: float = 1e-4) -> bool:
        """Return whether some way of counting makes C equal to 1."""
        return self.status == EQUAL and any(
            near(c, 1.0, tolerance) for c in self.coefficients.values()
        )

    @property
    def cost(self) -> float:
        """How badly a reading fits: right weights, equal ones, a fault with a count, any other."""
        if self.status == EQUAL:
            return 0.0 if self.right(self.tolerance) else 1.0
        return 2.5 if self.named else 3.0

    def is_divided_by(self, number: float) -> bool:
        """Return whether every loss is seen to be divided by a number."""
        return all(
            any(near(f * number, 1.0, 1e-5) for f in part.term.factors) for part in self.parts
        )


def _levels(term: Term, *, with_factor: bool) -> list[tuple[float, Mapping[str, float]]]:
    """Return the weight and the counts of a term, from its outermost reduction inwards.

    Args:
        term: the term.
        with_factor: whether the weight with the numbers under the reduction is a level of its own.
    """
    weight = term.weight or 0.0
    found: list[tuple[float, Mapping[str, float]]] = [(weight, term.counts)]
    if with_factor:
        # the sum of the weights was counted with them
        own = (
            {"weights": term.counts["weights"] / abs(term.factor)}
            if "weights" in term.counts and term.factor
            else {}
        )
        found.append((weight * term.factor, {**term.counts, **own}))
    if term.item is not None:
        found.append((term.item[0], {"nonzero": term.item[1]}))
    return found + [(weight, {"elements": number}) for weight, number in term.deeper]


def _spread(values: Sequence[float]) -> float:
    """Return by how much values differ, relative to the largest one."""
    largest = max(map(abs, values), default=0.0)
    return (max(values) - min(values)) / largest if largest else 0.0


def with_common_sign(weights: Sequence[float]) -> list[float]:
    """Return weights, positive where they have the sign of the most, which is the objective's: it
    may be maximized.
    """
    sign = -1.0 if 2 * sum(weight < 0 for weight in weights) > len(weights) else 1.0
    return [sign * weight for weight in weights]


@np.errstate(all="ignore")
def compare(parts: Sequence[Part], key: Key = ()) -> Objective:
    """Compare the terms of one objective: the same weight at some level, else whether counts make
    them unequal.
    """
    tolerance = max(part.tolerance for part in parts)
    own = parts[0].term.own
    with_factor = any(part.term.factor != 1 for part in parts)
    levels = [_levels(part.term, with_factor=with_factor) for part in parts]
    best: Objective | None = None
    faults: list[Objective] = []
    for depth in range(min(map(len, levels))):
        weights = [
            level[depth][0] * part.coefficient for level, part in zip(levels, parts, strict=True)
        ]
        weights = with_common_sign(weights)
        names = sorted(
            set.intersection(*(set(level[depth][1]) for level in levels)),
            key=lambda n: (n != own, n),
        )
        counts = {name: [level[depth][1][name] for level in levels] for name in names}
        if _spread(weights) <= tolerance:
            best = best or Objective(key, parts, EQUAL, {}, weights[0], counts)
            at = "" if best.counts is counts else f"@{depth}"
            found = {name + at: weights[0] * sum(count) for name, count in counts.items()}
            best = replace(best, coefficients={**best.coefficients, **found})
        else:
            faults += _by_counts(key, parts, weights, counts, outermost=depth == 0)
    if best is not None:
        return best
    unnamed = Objective(key, parts, UNEQUAL)
    return min(faults, key=lambda fault: fault.named.name if fault.named else "", default=unnamed)


def _by_counts(
    key: Key,
    parts: Sequence[Part],
    weights: Sequence[float],
    counts: Mapping[str, Sequence[float]],
    *,
    outermost: bool,
) -> Iterator[Objective]:
    """Yield what counts say of unequal weights: means that weigh the same, or that are weighted by
    another count.
    """
    for name, count in counts.items():
        others = (
            counts.keys() - {name} if outermost and name in ("counted", "valid", "nonzero") else ()
        )
        beside = {
            f"the number of {WORDS[other]}, not of {WORDS[name]}": counts[other]
            for other in sorted(others)
        }
        w = evidence(parts, weights, count, beside=beside)
        # whatever C is, these weigh C together
        whole = float(w.per_mean.sum()) or 1.0
        named = diagnose(replace(w, observed=w.observed / whole), only=(MEAN_OF_MEANS, WRONG_COUNT))
        if not names_nothing(named):
            yield Objective(key, parts, UNEQUAL, named=named, count=name)


def evidence(
    parts: Sequence[Part],
    weights: Sequence[float],
    counts: Sequence[float],
    *,
    beside: Mapping[str, Sequence[float]] | None = None,
    empty: Collection[Source] = (),
) -> Weights:
    """Return the weights of a window as `judge.naming` reads those of a loop that is verified.

    Args:
        parts: of one objective.
        weights: of an item of each.
        counts: of each.
        beside: what else may be counted, in words -> the numbers.
        empty: micro-batches of the objective's lines without items.
    """
    sources = [*(part.source for part in parts), *empty]
    none = (0.0,) * len(empty)
    owners = tuple(rank for rank, _ in sources)
    ranks = len({*owners})
    return Weights(
        observed=np.array((*weights, *none)),
        counts=(*counts, *none),
        window=tuple(range(len(sources))),
        accumulation_steps=len(sources) // ranks,
        epoch=0,
        reduction="mean",
        beside=beside or {},
        tolerance=max(part.tolerance for part in parts),
        owners=owners if ranks > 1 else (),
    )


def coefficient(w: Weights) -> float:
    """Return C of unequal weights: what the window weighs, or 1 where an item or a mean is seen to
    have no other.

    A micro-batch whose sign is flipped takes nothing from C.
    """
    whole = float(np.abs(w.per_mean).mean()) * len(w.window) if w.inside else 0.0
    own = any(near(ratio, 1.0, 1e-3) for ratio in w.ratio) or near(
        whole, w.accumulation_steps, 1e-3
    )
    return 1.0 if own or not whole else whole


WORDS = {
    "counted": "its targets",
    "elements": "all its elements",
    "nonzero": "the elements with a weight",
    "rows": "its rows",
    "valid": "its valid targets",
    "weights": "the sum of its weights",
}
"""What may be counted, in words."""


# Readings of several terms that one expression has in one backward.


EACH = "each"
CHUNKS = "chunks"
BLEND = "blend"
BATCH = "batch"
MODES = (EACH, CHUNKS, BLEND, BATCH)
"""The k-th term with the k-th; chunks of one batch (counts add up); blends over the same items, as in mixup (weights
add up); chunks whose number varies (the mean weight)."""


def _merged(mode: str, terms: Sequence[Term]) -> list[Term]:
    """Return the terms of one backward in one reading, or none where it does not apply."""
    if mode == EACH or (len(terms) == 1 and mode != BATCH):
        return list(terms)
    first = terms[0]
    weights = [term.weight or 0.0 for term in terms]
    shares = [
        weight * term.counts.get(first.own, 0.0)
        for weight, term in zip(weights, terms, strict=True)
    ]
    total = sum(shares)
    with_factors = sum(share * term.factor for share, term in zip(shares, terms, strict=True))
    factor = with_factors / total if total else 1.0
    plain = replace(
        first, deeper=(), item=None, factor=factor, hides=any(term.hides for term in terms)
    )
    if mode == CHUNKS:
        counts = {name: sum(term.counts.get(name, 0.0) for term in terms) for name in first.counts}
        items = [term.item for term in terms if term.item is not None]
        if len(items) == len(terms) and _spread([weight for weight, _ in items]) <= 1e-6:
            plain = replace(plain, item=(items[0][0], sum(number for _, number in items)))
        return [replace(plain, counts=counts)] if _spread(weights) <= 1e-6 else []
    if mode == BLEND:
        same = all(term.counts == first.counts for term in terms)
        return [replace(plain, weight=sum(weights))] if same else []
    number = sum(term.counts.get(first.own, 0.0) for term in terms)
    return [replace(plain, weight=total / number, counts={first.own: number})] if number else []


Key = tuple[Any, ...]
"""Of an objective: the call site of backward and the expression; in a reading also the mode and the ordinal."""
Reading = dict[Key, dict[str, list[Objective]]]
"""Of a window: site and expression -> mode -> its objectives."""


def is_read(term: Term) -> bool:
    """Return whether a term has a weight that counts something."""
    return not (
        term.opaque
        or term.partial
        or not term.weight
        or term.weight != term.weight
        or is_empty(term)
    )


def is_empty(term: Term) -> bool:
    """Return whether a term has no items, as a micro-batch without an active triplet."""
    return term.weight == 0 or not all(
        term.counts.get(name, 1.0) for name in ("counted", "elements", "nonzero")
    )


def read(
    passes: Mapping[int, Seen],
    coefficients: Mapping[Source, float],
    tasks: Mapping[int, str],
    error: float,
) -> Reading:
    """Read the terms of a window in every mode.

    Args:
        passes: of the window.
        coefficients: that they have in `.grad`.
        tasks: index of a pass -> its task, where one line sends several tasks backward.
        error: of the coefficients, relative.
    """
    by_site: defaultdict[Key, dict[Source, list[Term]]] = defaultdict(dict)
    for source in coefficients:
        record = passes[source[1]].records[source[0]]
        for term in filter(is_read, record.terms):
            key = record.place, (*term.expression, tasks.get(source[1], ""))
            by_site[key].setdefault(source, []).append(term)
    found: Reading = {}
    for top, by_pass in by_site.items():
        numbers = {len(terms) for terms in by_pass.values()}
        # one term for each item of a micro-batch, stacked: they are chunks of one item
        single = max(numbers) > 1 and all(
            t.counts.get(t.own) == 1 for terms in by_pass.values() for t in terms
        )
        modes: dict[str, list[Objective]] = {}
        for mode in MODES:
            if (mode == BLEND and len(numbers) > 1) or (single and mode in (EACH, BLEND)):
                continue
            table = {source: _merged(mode, terms) for source, terms in by_pass.items()}
            columns = set(map(len, table.values()))
            if len(columns) != 1 or 0 in columns:
                continue
            modes[mode] = [
                compare(
                    [Part(s, terms[k], coefficients[s], error) for s, terms in table.items()],
                    (*top, mode, k),
                )
                for k in range(*columns)
            ]
            first = modes[mode][0]
            if mode == BATCH and first.status == UNEQUAL and first.named is None:
                # heads of a detector, some without items in some passes: each may be a mean of its
                # own
                every = [
                    Part(s, term, coefficients[s], error)
                    for s, terms in by_pass.items()
                    for term in terms
                ]
                of_all = compare(every, first.key)
                if of_all.named and of_all.named.name == MEAN_OF_MEANS:
                    modes[mode] = [of_all]
                elif len(numbers) > 1:
                    # they may be terms of several losses, of which some micro-batches have more
                    # than others
                    modes[mode] = [Objective(first.key, every, UNEVEN)]
        found[top] = modes
    return found


def objectives(
    reading: Reading,
    modes: Mapping[Key, Sequence[str]],
    across_sites: Collection[Key] = frozenset(),
) -> list[Objective]:
    """Return the objectives of a window, each expression in the first of its modes that applies.

    Args:
        reading: of the window.
        modes: of each expression, the best one first.
        across_sites: the keys of those that are right at several places together in some window.
    """
    found = list[Objective]()
    for top, results in reading.items():
        none = [Objective((*top, "", 0), (), UNEVEN)]
        found += next((results[mode] for mode in modes.get(top, MODES) if mode in results), none)
    # one expression at several places, as with the last micro-batch unrolled or in a closure: one
    # objective where that is exactly right, in this window or in another one
    by_expression: defaultdict[Any, list[Objective]] = defaultdict(list)
    for one in found:
        by_expression[one.key[1]].append(one)
    for expression, several in by_expression.items():
        if len({one.place for one in several}) > 1 and all(one.parts for one in several):
            parts = [part for one in several for part in one.parts]
            place = min((one.place for one in several), key=str)
            together = compare(parts, (place, expression, ACROSS_SITES, 0))
            right = together.right() or (together.key in across_sites and together.status == EQUAL)
            if right and len({part.source for part in parts}) == len(parts):
                found = [one for one in found if one.key[1] != expression] + [together]
    return found


def best_modes(readings: Sequence[Sequence[Reading]]) -> dict[Key, list[str]]:
    """Return the modes of each expression of an optimizer, the one that fits the whole run best
    first.
    """
    fits: defaultdict[Key, Counter[str]] = defaultdict(Counter)
    for alternatives in readings:
        for top in {top for reading in alternatives for top in reading}:
            for mode in MODES:
                costs = [
                    (
                        sum(one.cost for one in found) / len(found)
                        if (found := reading[top].get(mode))
                        else 5.0
                    )
                    for reading in alternatives
                    if top in reading
                ]
                fits[top][mode] += min(costs) + 0.5 * (mode == BATCH)  # type: ignore[assignment]
    return {key: sorted(MODES, key=costs.__getitem__) for key, costs in fits.items()}


# The coefficient C of each objective over the run: the program's own, or a consequence of how
# windows are cut up?
#
# `judge.naming` asks for a factor of a right weight, and here none is known: a loss may have a
# coefficient, so that a factor counts only where windows of other lengths, other losses or the
# trainer's settings show that it has not.


@dataclass
class Use:
    """One objective in one window, for the run to judge.

    Attributes:
        window: the window.
        objective: in it.
        length: the number of passes at the call sites that the objective comes from.
        whole: whether the objective is in every one of them.
        others: the objectives of the same window that have right weights.
        alone: whether the fault is this objective's own: others are right or, where its weights are
            unequal, equal.
        taken_out: by what `.grad` was multiplied after the last pass, where that is a part of the
            weights; else 1.
        own: C by the count that fits the run.
        total: C of all objectives of the window together, where they have the same passes.
        right: whether C is 1, of this objective or of all together.
    """

    window: StepWindow
    objective: Objective
    length: int
    whole: bool
    others: Sequence[Objective]
    alone: bool
    taken_out: float = 1.0
    count: str = ""
    own: float = 0.0
    total: float | None = None
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
class Scale:
    """A coefficient that is no coefficient of the program's.

    Attributes:
        use: where.
        note: what the factor is, in words.
        cause: of the fault, where the table of faults has a remedy for it; else empty.
        name: the name of the fault.
        expected: the coefficient that would be right.
        provisional: whether other windows may still show something else: that comes out when the
            run is over.
    """

    use: Use
    note: str
    cause: str
    name: str = "wrong-scale"
    expected: float = 1.0
    provisional: bool = False


def _choose_count(uses: Sequence[Use]) -> None:
    """Choose one way of counting for the whole run: the one that is right most often."""
    names = set.intersection(*(set(use.objective.coefficients) for use in uses))
    first = uses[0]
    own = uses[0].objective.parts[0].term.own
    tolerance = first.objective.tolerance

    def fits(name: str) -> tuple[int, bool, bool]:
        right = sum(
            near(use.objective.coefficients[name], 1.0, use.objective.tolerance) for use in uses
        )
        masses = [
            use.objective.weight * n for use in uses for n in use.objective.counts.get(name, ())
        ]
        ones = bool(masses) and near(masses[0], 1.0, tolerance) and _spread(masses) <= tolerance
        return right, ones and not first.is_mean, name == own

    best = max(sorted(names), key=fits)
    for use in uses:
        use.count = best
        use.own = sum(use.masses) if use.added else use.objective.coefficients[best]
        use.right = near(use.own, 1.0, use.objective.tolerance)


def _count_together(windows: Sequence[Sequence[Use]]) -> None:
    """Add up the coefficients of some objectives in each window: those of (a + b) / 2 are 1
    together.

    Where none is right alone, as the terms of label smoothing, each is counted such that they are
    right together in the most windows, else the sum of a window's means.
    """
    if not any(use.right for several in windows for use in several):
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
        for several in windows if any(fits(chosen)[:2]) else ():
            for use, name in zip(several, chosen, strict=True):
                use.count = name
                use.own = use.objective.coefficients[name]
    for several in windows:
        for use in several:
            use.total = sum(other.own for other in several)
            use.right = use.right or near(use.total, 1.0, use.objective.tolerance)


MOST_CHOICES = 256
"""Ways of counting that are tried for the objectives of a window together."""


def scales(
    history: Mapping[Key, list[Use]], ranks: int, declared_k: int | None, notes: Counter[Found]
) -> list[Scale]:
    """Return the coefficients that follow from how windows are cut up.

    Args:
        history: the uses of each objective of one optimizer.
        ranks: number of ranks.
        declared_k: the accumulation steps that the user states or the trainer is configured with.
        notes: takes what is worth knowing and no fault.
    """
    by_window: defaultdict[int, list[Use]] = defaultdict(list)
    for uses in history.values():
        _choose_count(uses)
        for use in uses:
            by_window[id(use.window)].append(use)
    together: defaultdict[tuple[Key, ...], list[list[Use]]] = defaultdict(list)
    for several in by_window.values():
        if len(several) > 1 and len({use.length for use in several}) == 1:
            together[tuple(use.objective.key for use in several)].append(several)
    for windows in together.values():
        _count_together(windows)
    return [
        scale
        for uses in history.values()
        for scale in _of_objective(uses, ranks, declared_k, notes)
    ]


def _of_objective(
    uses: Sequence[Use], ranks: int, declared_k: int | None, notes: Counter[Found]
) -> Iterator[Scale]:
    by_length: defaultdict[int, list[Use]] = defaultdict(list)
    for use in uses:
        by_length[use.length].append(use)
    typical_k = max(by_length, key=lambda length: (len(by_length[length]), length))
    some_right = any(use.right and use.length > 1 for use in uses)
    for use in uses:
        if use.right:
            _note_other_count(use, notes)
            continue
        left_in = _left_in(use, uses)
        undivided = _not_divided_beside(use)
        if (
            not left_in
            and not use.is_mean
            and near(use.objective.weight, 1.0, use.objective.tolerance)
        ):
            if undivided:
                notes[undivided] += 1
            continue  # a plain sum
        configured = _against_configured(use, declared_k)
        again = (
            configured or _still_scaled(use) or _divided_again(use, uses, declared_k or typical_k)
        )
        verdict = again or _against_other_lengths(use, uses, by_length, typical_k)
        if verdict is None:
            verdict = _begun_anew(use, uses) or _by_itself(use, uses, ranks)
        if left_in and not isinstance(verdict, Scale):
            verdict = left_in
        # the number of micro-batches may be in the tensor of weights, too; where a window is right
        # without, it is not
        if use.hides and isinstance(verdict, Scale) and not (configured or some_right):
            own = "the weights of the samples have its inverse"
            verdict = _either(verdict.note, verdict.cause, own)
        if isinstance(verdict, Scale):
            # what leaks comes beside whole windows, and whole windows follow it: until one does,
            # nothing is said
            rare = (
                len(by_length[use.length]) < len(by_length[typical_k])
                and typical_k < use.length < 2 * typical_k
            )
            after = any(u.window.number > use.window.number for u in by_length[typical_k])
            if verdict.cause == "short-window" and rare:
                # a step that is left out in the middle of a loop ends no epoch
                loops = {seen.records[0].loop for seen in use.window.passes.values()}
                name = verdict.name if len(loops) == 1 and None not in loops else "tail-leak"
                verdict = (
                    replace(verdict, name=name, cause="")
                    if after
                    else replace(verdict, provisional=True)
                )
            elif verdict.cause == "short-window":
                verdict = _of_windows(use, verdict, uses)
            yield verdict
        elif undivided and verdict in (None, USERS):
            notes[undivided] += 1
        elif verdict != USERS and (verdict or use.length > 1):
            notes[replace(verdict or COEFFICIENT, where=str(use.objective.place))] += 1


def _of_windows(use: Use, verdict: Scale, uses: Sequence[Use]) -> Scale:
    """Name a window of another length that begins or ends at the wrong micro-batch, as `verify`
    does.
    """
    usual = round(use.length * verdict.expected / use.own) if use.own else 0
    loops = [seen.records[0].loop for _, seen in sorted(use.window.passes.items())]
    if None in loops or usual < 2:
        return verdict
    of_round = sum(loop == loops[-1] for loop in loops)
    # what an epoch has left over stands before a whole window of the next one
    if of_round == usual < use.length < 2 * usual:
        return replace(verdict, name="tail-leak", cause="")
    following = min(
        (one for one in uses if one.window.number > use.window.number),
        key=lambda one: one.window.number,
        default=None,
    )
    if following is None or not use.window.first:
        return verdict
    first = min(following.window.passes.items())[1].records[0].loop
    # the first step comes too early, in the middle of a round, and whole windows follow
    is_shifted = use.length < usual == following.length and len({*loops, first}) == 1
    if is_shifted:
        return replace(verdict, name="wrong-windows", cause="")
    return verdict


def _not_divided_beside(use: Use) -> Found | None:
    """Say that no division of a loss by the window's length is seen, where another loss is a mean
    over the window.

    This is no fault, since a coefficient may be meant for each micro-batch.
    """
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
    # by the window's count it may be divided, too, or multiplied by its share of it
    divided = any(map(one.is_divided_by, (r, use.items))) or _spread(use.masses) > one.tolerance
    if r < 2 or not use.whole or beside is None or divided:
        return None
    said = (
        f"no division of this term ({one.term}) by the number of micro-batches is seen, where the"
        f" one at {beside.line} ({beside.term}) is a mean over the window"
    )
    return finding("undivided-term", said, one.line)


def _begun_anew(use: Use, uses: Sequence[Use]) -> Scale | None:
    """Recognise passes before a whole window, where other windows are right and shorter: it was
    begun anew.
    """
    right = [u for u in uses if u.right and u.length > 1]
    masses = use.masses
    if len(right) < 2 or use.length <= max(u.length for u in right):
        return None
    whole = next(
        (k for k in range(1, len(masses)) if near(sum(masses[-k:]), 1.0, use.objective.tolerance)),
        None,
    )
    if whole is None:
        return None
    why = (
        f"its last {counted(whole, 'micro-batch')} are a whole mean, and what went backward before"
        " was not reset"
    )
    return Scale(use, f"1 + {use.own - 1:.6g}: {why}", "begun-anew", "repeated-micro-batch")


def _note_other_count(use: Use, notes: Counter[Found]) -> None:
    own = use.objective.parts[0].term.own
    found = use.objective.coefficients.get(own)
    if (
        use.count != own
        and own in ("counted", "valid")
        and found
        and not near(found, 1.0, use.objective.tolerance)
    ):
        counted = WORDS.get(use.count.partition("@")[0], use.count)
        said = (
            f"the loss is divided by {counted}, more than {WORDS[own]}: the accumulation is right,"
            " since the whole window has one denominator"
        )
        remedy = f"for a mean over {WORDS[own]}, divide by their number"
        notes[finding("other-count", said, use.objective.place, remedy)] += 1


def _may_be_divided(use: Use, what: str) -> bool:
    """Return whether a division by the window's length may be there, though the weights lack it."""
    r = use.length
    window = use.window
    by_data = any(part.term.by_data for part in use.objective.parts)
    if (
        not (use.is_mean or what or by_data)
        and near(use.items, float(r * r), use.objective.tolerance)
        and use.objective.is_divided_by(r)
    ):
        return True  # of as many items as passes in each: the number may be that of either
    # what was done to `.grad` after the last pass may be a division, and clipping by hand
    unknown = window.edit == "free" or window.left < (1 + 1e-3) / r
    return unknown and window.divided is None


USERS = finding("coefficient", "the program's own")
COEFFICIENT = finding("coefficient", "the loss has a coefficient")


def _either(why: str, cause: str, own: str) -> Found:
    """Return that a coefficient is the program's own, or else a fault."""
    said = f"{COEFFICIENT}: if {own}, nothing is to be done; else it is {why}"
    return finding("coefficient", said, remedy=remedy_of("wrong-scale", [cause]))


def _miscounted(use: Use) -> Found:
    """Return that the one denominator of a window is none of what its loss may count."""
    said = (
        f"the loss is divided by {round(1 / use.objective.weight)}, but it adds up"
        f" {counted(round(use.items), 'item') if use.items == round(use.items) else f'{use.items:g}'}"
        " (padding or shifted labels counted?)"
    )
    return finding("miscounted", said)


CLIPPED = finding(
    "scaled-clipping",
    "the loss is multiplied by the scale of a GradScaler, and `.grad` by less than one over it"
    " before the step, as by clipping",
    remedy="where nothing else divides by the scale, call `scaler.unscale_(optimizer)` before",
)


def _planned(count: float, own: float) -> Found:
    """Return that a loss is divided by the count of other windows, where its own is another one."""
    said = (
        f"the loss is divided by {count:g}, the count of other windows, where this one has {own:g}:"
        " the accumulation is right, since the whole window has one denominator"
    )
    return finding("planned-count", said)


def _against_configured(use: Use, declared_k: int | None) -> Scale | None:
    """Compare C with r/K: nothing in the run shows K where every window is shorter."""
    r = use.length
    k = declared_k
    if k is None or r >= k or not use.whole or not near(use.own, r / k, use.objective.tolerance):
        return None
    return Scale(
        use,
        f"{r}/{k}: divided by {k}, where the window has {counted(r, 'micro-batch')}",
        "short-window",
    )


def _still_scaled(use: Use) -> Scale | Found | None:
    """Recognise the scale of a GradScaler, where nothing was done to `.grad` that has divided by
    it.
    """
    window = use.window
    tolerance = use.objective.tolerance
    scale = next(
        (scale for scale in window.step.passed_by if near(use.own, scale, tolerance)), None
    )
    if window.edit is not None or window.factor is None or scale is None:
        return None
    # no clipping makes a gradient larger: where more is left than there should be, nothing has
    # divided by the scale
    if window.factor * scale > 1 + 1e-3:
        return Scale(
            use, "the scale of a GradScaler: nothing divides by it before this step", "loss-scale"
        )
    return CLIPPED if window.factor * scale < 1 - 1e-3 else USERS


def _left_in(use: Use, uses: Sequence[Use]) -> Scale | None:
    """Recognise a number by which other steps divide `.grad` after the last pass, and this one does
    not, or only it.

    No clipping makes the weights of two windows right.
    """
    tolerance = use.objective.tolerance
    window = use.window
    others = [u.taken_out for u in uses if u.right and not near(u.taken_out, 1.0, 1e-3)]
    if len(others) < 2:
        return None
    if any(near(use.taken_out, other, 1e-5) for other in others) and near(
        use.own, use.taken_out, tolerance
    ):
        why = (
            "`.grad` is multiplied by it after the last pass, and no loss is divided by it, as"
            " those of other steps are"
        )
    elif near(use.taken_out, 1.0, 1e-3) and window.edit is None and near(window.left, 1.0, 1e-3):
        why = (
            f"other steps multiply `.grad` by {others[0]:.6g} after the last pass, and this one"
            " does not"
        )
    else:
        return None
    return Scale(use, f"{use.own:.6g}: {why}", "loss-scale")


def _divided_again(use: Use, uses: Sequence[Use], k: int) -> Scale | None:
    """Recognise a sum over the window's count that is divided once more by K, or by the window's
    length.
    """
    tolerance = use.objective.tolerance
    if use.is_mean or use.others or use.length < 2 or not use.whole:
        return None
    for number, lengths in ((k, [k] * len(uses)), (use.length, [u.length for u in uses])):
        if number > 2 and all(
            near(u.own, 1 / r, tolerance) for u, r in zip(uses, lengths, strict=True)
        ):
            note = (
                f"1/{number}: divided twice, by the window's count and by {number}, its"
                " micro-batches"
            )
            return Scale(use, note, "divided-twice", provisional=len(uses) == 1)
    return None


def _against_other_lengths(
    use: Use, uses: Sequence[Use], by_length: Mapping[int, list[Use]], typical_k: int
) -> Scale | Found | None:
    """Compare C with that of windows of other lengths: r/q where the loss is divided by q in a
    window of r.
    """
    tolerance = max(u.objective.tolerance for u in uses)
    steady = {
        r: all(near(u.own, several[0].own, tolerance) for u in several)
        for r, several in by_length.items()
    }
    others = [several[0].own for r, several in by_length.items() if r != use.length and steady[r]]
    if not steady[use.length] or not others or not all(u.whole for u in uses):
        return None
    if any(near(other, use.own, tolerance) for other in others):
        return USERS
    right = next((u for u in uses if u.right and u.length > 1), None)
    base = right.own if right else by_length[typical_k][0].own if steady[typical_k] else 0.0
    # a sum times a constant weighs the same whatever the window
    constant = not use.is_mean and near(use.objective.weight, uses[0].objective.weight, tolerance)
    divisor = use.length * base / use.own if use.own else 0.0
    whole = round(divisor)
    fits = abs(divisor - whole) < 1e-3 and 1 <= whole <= max(by_length) and whole != use.length
    if base and fits and (right or (not constant and use.length != typical_k)):
        what = f"divided by {whole}"
        own = near(base, 1.0, tolerance)
        if not own and whole != typical_k:
            what += f" (beside the loss's coefficient of {base:.6g})"
        elif not own:
            # a coefficient and a division by the usual number, or a smaller coefficient and no
            # division: only the product of both is seen
            weight = use.own / use.length
            what = (
                f"each micro-batch of the term {use.objective.term} weighs {weight:.6g} as in"
                f" windows of {typical_k}"
            )
        note = (
            f"{use.length}/{whole}: {what}, where the window has"
            f" {counted(use.length, 'micro-batch')}"
        )
        return Scale(use, note, "short-window", expected=base)
    return None


FEWEST_COUNTS = 3
"""Counts of windows that may show a rule of their denominators: of two, the same rest may be chance."""


def _is_off_by_a_count(uses: Sequence[Use]) -> bool:
    """Return whether each window's denominator is its count and a rest, which is the same in all or
    goes with something else that is counted, such as one target for each row.

    A denominator that follows no count, as the number of boxes of a detector, is the program's.
    """
    if len({use.items for use in uses}) < FEWEST_COUNTS or any(
        u.objective.weight <= 0 for u in uses
    ):
        return False
    rests = [round(1 / use.objective.weight) - use.items for use in uses]
    names = set.intersection(*(set(use.objective.counts) for use in uses)) - {uses[0].count}
    others = [[sum(use.objective.counts[name]) for use in uses] for name in sorted(names)]
    for counts in ([1.0] * len(uses), [float(use.length) for use in uses], *others):
        shares = [rest / count if count else 0.0 for rest, count in zip(rests, counts, strict=True)]
        if shares[0] and all(near(share, shares[0], 1e-6) for share in shares):
            return True
    return False


def _by_itself(use: Use, uses: Sequence[Use], ranks: int) -> Scale | Found | None:
    """Recognise a C that is r, 1/r, the number of ranks or one over it, or a wrong count.

    Returns:
        a fault; what is worth knowing, where two readings fit; None where none does.
    """
    whose = USERS if use.others else None
    if not use.whole:
        return whose
    tolerance = use.objective.tolerance
    r = use.length
    others = {u.items for u in uses if u.items != use.items}
    if (
        not use.is_mean
        and others
        and all(near(u.objective.weight, use.objective.weight, tolerance) for u in uses)
    ):
        # a sum times a constant: that it fits the count of one window may be chance
        planned = Counter(u.items for u in uses if u.right and u.length > 1).most_common(1)
        return (
            _planned(planned[0][0], use.items) if r > 1 and planned and planned[0][1] > 1 else whose
        )
    masses = use.masses
    by_hand = all(near(mass, 1.0, tolerance) for mass in masses) and use.items > len(masses)
    of_means = r > 1 and (use.is_mean or by_hand)
    # of a mean that is made by hand, the number may be its own count
    is_divided = use.is_mean and use.objective.is_divided_by(r)
    twice = r > 2 and (use.is_mean or all(near(mass, 1 / r**2, tolerance) for mass in masses))
    again = f"divided twice by its {r} micro-batches"
    never = f"the sum of {r} means{{}}, never divided by their number"
    # a small coefficient is a common one, of one loss beside a larger one above all
    is_small = r == 2 or (use.total or 0.0) > 2 * use.own
    of_ranks = never.format(f", times the {ranks} ranks")
    by_all = "each loss is divided by the count of all ranks"
    # by which powers of the window's length and of the number of ranks the weights are too large
    readings = [
        (of_means, 1, 0, never.format(""), "not-divided"),
        (of_means and ranks > 1, 1, 1, of_ranks, "not-divided"),
        (twice, -1, 0, again, "divided-twice"),
        (ranks > 1, 0, 1, "the sum of the ranks' means", "ranks"),
        (ranks > 1, 0, -1, by_all, "ranks"),
        (r == 2, -1, 0, again, "divided-twice"),
    ]
    alone_or_together: list[tuple[str, Callable[[Use], float | None]]] = [("", lambda u: u.own)]
    if use.total is not None and not use.others:
        alone_or_together.append((" (all losses together)", lambda u: u.total))
    for what, of in alone_or_together:
        for applies, power, power_of_ranks, why, cause in readings:
            times = float(ranks) ** power_of_ranks
            fitting = [
                u
                for u in uses
                if (c := of(u)) is not None and near(c, times * u.length**power, tolerance)
            ]
            if not applies or use not in fitting:
                continue
            # of a coefficient that changes from step to step, one value may be any number
            changes = any(u.length == r and not u.right and u not in fitting for u in uses)
            unclear = is_small if why == again else is_divided and cause == "not-divided"
            unclear |= cause == "not-divided" and _may_be_divided(use, what)
            if use.others or changes or unclear:
                return _either(why, cause, "the objective has it")
            times *= r**power
            note = f"{times:g}{what}: {why}" if times > 1 else f"1/{1 / times:g}{what}: {why}"
            return Scale(use, note, cause, provisional=len(fitting) == 1)
    if use.others:
        return USERS
    weight = use.objective.weight
    if use.is_mean or r < 2 or not use.items or weight <= 0:
        return None
    divisor = 1 / weight
    integer = (
        abs(divisor - round(divisor)) < 1e-4 * divisor and 0.5 * use.items < divisor < 2 * use.items
    )
    # one denominator for the window is no fault of accumulation, whatever it counts, unless another
    # window or rank shows the right one
    varies = any(not near(u.own, use.own, tolerance) for u in uses)
    shown = len({u.items for u in uses if u.right and u.length > 1}) > 1
    if not integer or divisor <= 2 or not varies:
        return None
    shown = shown or _is_off_by_a_count(uses)
    note = f"each weighs 1/{round(divisor)}, where {use.items:g} count"
    # one sentence for the run, with the numbers of its first window
    return Scale(use, note, "", WRONG_COUNT) if shown else _miscounted(uses[0])
