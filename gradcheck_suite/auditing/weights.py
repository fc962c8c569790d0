"""The weights of a window's items: equal, and 1/N, over all its micro-batches and ranks?

A term is one reduction of one backward pass (`terms.py`). Terms of one backward are never compared
with each other: what a program adds up in one loss is its own. The terms that one call site sends
backward with one expression are an objective, and its terms in the passes of a window must give
each item the same weight, C/N, where N counts the window. Whether C is the program's coefficient or
follows from how the window is cut up is asked of the whole run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import BackwardPass, Source, near
from gradcheck_suite.judge.naming import diagnose, names_nothing
from gradcheck_suite.judge.weights import Diagnosis, Weights

EQUAL = "equal"
UNEQUAL = "unequal"
UNEVEN = "uneven"
MEAN_OF_MEANS = "mean-of-means"
WRONG_COUNT = "wrong-count"
ACROSS_SITES = "*"
"""The mode of an expression that is one objective at several places."""


@dataclass(frozen=True)
class LossInWindow:
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
class ComparedObjective:
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
    parts: Sequence[LossInWindow]
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


def spread(values: Sequence[float]) -> float:
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
def compare_terms(parts: Sequence[LossInWindow], key: Key = ()) -> ComparedObjective:
    """Compare the terms of one objective: the same weight at some level, else whether counts make
    them unequal.
    """
    tolerance = max(part.tolerance for part in parts)
    own = parts[0].term.own
    with_factor = any(part.term.factor != 1 for part in parts)
    levels = [_levels(part.term, with_factor=with_factor) for part in parts]
    best: ComparedObjective | None = None
    faults: list[ComparedObjective] = []
    # means of unequal counts are unequal outside, and may be equal below: each level is compared
    for depth in range(min(map(len, levels))):
        weights = [
            level[depth][0] * part.coefficient for level, part in zip(levels, parts, strict=True)
        ]
        weights = with_common_sign(weights)
        # the term's own way of counting comes first, then by name, so that the choice is the same
        # each time
        names = sorted(
            set.intersection(*(set(level[depth][1]) for level in levels)),
            key=lambda n: (n != own, n),
        )
        counts = {name: [level[depth][1][name] for level in levels] for name in names}
        if spread(weights) <= tolerance:
            best = best or ComparedObjective(
                key,
                parts,
                EQUAL,
                {},
                weights[0],
                counts,
            )
            # a count of an inner level is another number than that of the same name outside
            at = "" if best.counts is counts else f"@{depth}"
            found = {name + at: weights[0] * sum(count) for name, count in counts.items()}
            best = replace(best, coefficients={**best.coefficients, **found})
        else:
            faults += _by_counts(key, parts, weights, counts, outermost=depth == 0)
    if best is not None:
        return best
    unnamed = ComparedObjective(key, parts, UNEQUAL)
    return min(faults, key=lambda fault: fault.named.name if fault.named else "", default=unnamed)


def _by_counts(
    key: Key,
    parts: Sequence[LossInWindow],
    weights: Sequence[float],
    counts: Mapping[str, Sequence[float]],
    *,
    outermost: bool,
) -> Iterator[ComparedObjective]:
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
        w = evidence(
            parts,
            weights,
            count,
            beside=beside,
        )
        # whatever C is, these weigh C together
        whole = float(w.per_mean.sum()) or 1.0
        named = diagnose(replace(w, observed=w.observed / whole), only=(MEAN_OF_MEANS, WRONG_COUNT))
        if not names_nothing(named):
            yield ComparedObjective(key, parts, UNEQUAL, named=named, count=name)


def evidence(
    parts: Sequence[LossInWindow],
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
    # an item that weighs one over the count shows that the loss has no other coefficient
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
    merge = {CHUNKS: _as_chunks, BLEND: _as_blend, BATCH: _as_batch}[mode]
    merged = merge(_plain(terms), terms)
    return [] if merged is None else [merged]


def _weights_of(terms: Sequence[Term]) -> list[float]:
    return [term.weight or 0.0 for term in terms]


def _mass(terms: Sequence[Term]) -> float:
    """Return the weight of all items together."""
    own = terms[0].own
    return sum((term.weight or 0.0) * term.counts.get(own, 0.0) for term in terms)


def _plain(terms: Sequence[Term]) -> Term:
    """Return the first of several terms, without what only it has, with the mean of their factors."""
    first = terms[0]
    total = _mass(terms)
    scaled = [replace(term, weight=(term.weight or 0.0) * term.factor) for term in terms]
    factor = _mass(scaled) / total if total else 1.0
    hides = any(term.hides for term in terms)
    return replace(
        first,
        deeper=(),
        item=None,
        factor=factor,
        hides=hides,
    )


def _as_chunks(plain: Term, terms: Sequence[Term]) -> Term | None:
    """Return chunks of one batch as one term."""
    # chunks share one reduction: their weights differ by rounding alone
    if spread(_weights_of(terms)) > 1e-6:
        return None
    items = [term.item for term in terms if term.item is not None]
    if len(items) == len(terms) and spread([weight for weight, _ in items]) <= 1e-6:
        plain = replace(plain, item=(items[0][0], sum(number for _, number in items)))
    names = terms[0].counts
    counts = {name: sum(term.counts.get(name, 0.0) for term in terms) for name in names}
    return replace(plain, counts=counts)


def _as_blend(plain: Term, terms: Sequence[Term]) -> Term | None:
    """Return terms over the same items as one."""
    # the terms of mixup are each over all items: other counts are of other items
    if any(term.counts != terms[0].counts for term in terms):
        return None
    return replace(plain, weight=sum(_weights_of(terms)))


def _as_batch(plain: Term, terms: Sequence[Term]) -> Term | None:
    """Return chunks whose number varies as one term of their mean weight."""
    own = terms[0].own
    number = sum(term.counts.get(own, 0.0) for term in terms)
    return replace(plain, weight=_mass(terms) / number, counts={own: number}) if number else None


Key = tuple[Any, ...]
"""Of an objective: the call site of backward and the expression; in a reading also the mode and the ordinal."""
Reading = dict[Key, dict[str, list[ComparedObjective]]]
"""Of a window: site and expression -> mode -> its objectives."""


def is_read(term: Term) -> bool:
    """Return whether a term has a weight that counts something."""
    return not (
        term.opaque
        or term.partial
        or not term.weight
        # NaN, as of a mean over no items
        or term.weight != term.weight
        or is_empty(term)
    )


def is_empty(term: Term) -> bool:
    """Return whether a term has no items, as a micro-batch without an active triplet."""
    return term.weight == 0 or not all(
        term.counts.get(name, 1.0) for name in ("counted", "elements", "nonzero")
    )


def read_terms(
    passes: Mapping[int, BackwardPass],
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
    return {top: _in_modes(top, by_pass, coefficients, error) for top, by_pass in by_site.items()}


def _in_modes(
    top: Key,
    by_pass: Mapping[Source, Sequence[Term]],
    coefficients: Mapping[Source, float],
    error: float,
) -> dict[str, list[ComparedObjective]]:
    """Return the objectives of one expression in every mode that applies."""
    numbers = {len(terms) for terms in by_pass.values()}
    found: dict[str, list[ComparedObjective]] = {}
    for mode in _modes_of(by_pass, numbers):
        table = {source: _merged(mode, terms) for source, terms in by_pass.items()}
        columns = set(map(len, table.values()))
        # where passes have different numbers of terms, the k-th of one is not the k-th of another
        if len(columns) != 1 or 0 in columns:
            continue
        found[mode] = [
            compare_terms(
                [
                    LossInWindow(
                        s,
                        terms[k],
                        coefficients[s],
                        error,
                    )
                    for s, terms in table.items()
                ],
                (*top, mode, k),
            )
            for k in range(*columns)
        ]
        first = found[mode][0]
        if mode == BATCH and first.status == UNEQUAL and first.named is None:
            every = list[LossInWindow]()
            for source, terms in by_pass.items():
                every += [
                    LossInWindow(
                        source,
                        term,
                        coefficients[source],
                        error,
                    )
                    for term in terms
                ]
            found[mode] = _of_heads(every, first, is_uneven=len(numbers) > 1)
    return found


def _modes_of(by_pass: Mapping[Source, Sequence[Term]], numbers: Collection[int]) -> list[str]:
    """Return the modes that terms may have, of these numbers in a pass."""
    if max(numbers) > 1 and all(_are_of_one_item(terms) for terms in by_pass.values()):
        return [CHUNKS, BATCH]
    return [mode for mode in MODES if mode != BLEND or len(numbers) == 1]


def _are_of_one_item(terms: Sequence[Term]) -> bool:
    """Return whether each term has one item of a micro-batch, stacked: they are chunks of one."""
    return all(term.counts.get(term.own) == 1 for term in terms)


def _of_heads(
    every: Sequence[LossInWindow], first: ComparedObjective, *, is_uneven: bool
) -> list[ComparedObjective]:
    """Return the terms of a batch as heads of a detector, some without items in some passes: each
    may be a mean of its own.
    """
    of_all = compare_terms(every, first.key)
    if of_all.named and of_all.named.name == MEAN_OF_MEANS:
        return [of_all]
    # they may be terms of several losses, of which some micro-batches have more than others
    return [ComparedObjective(first.key, every, UNEVEN)] if is_uneven else [first]


def objectives(
    reading: Reading,
    modes: Mapping[Key, Sequence[str]],
    across_sites: Collection[Key] = frozenset(),
) -> list[ComparedObjective]:
    """Return the objectives of a window, each expression in the first of its modes that applies.

    Args:
        reading: of the window.
        modes: of each expression, the best one first.
        across_sites: the keys of those that are right at several places together in some window.
    """
    found = list[ComparedObjective]()
    for top, results in reading.items():
        none = [ComparedObjective((*top, "", 0), (), UNEVEN)]
        found += next((results[mode] for mode in modes.get(top, MODES) if mode in results), none)
    # one expression at several places, as with the last micro-batch unrolled or in a closure: one
    # objective where that is exactly right, in this window or in another one
    by_expression: defaultdict[Any, list[ComparedObjective]] = defaultdict(list)
    for one in found:
        by_expression[one.key[1]].append(one)
    for expression, several in by_expression.items():
        together = _together(several)
        if together is None:
            continue
        is_known = together.key in across_sites and together.status == EQUAL
        if together.right() or is_known:
            found = [one for one in found if one.key[1] != expression] + [together]
    return found


def _together(several: Sequence[ComparedObjective]) -> ComparedObjective | None:
    """Return one expression at several places as one objective; None where it is no such one."""
    if len({one.place for one in several}) < 2 or not all(one.parts for one in several):
        return None
    parts = list[LossInWindow]()
    for one in several:
        parts += one.parts
    # both in one pass: they are two losses, and not one that was written twice
    if len({part.source for part in parts}) != len(parts):
        return None
    # any of them, but the same one each time
    place = min((one.place for one in several), key=str)
    return compare_terms(parts, (place, several[0].key[1], ACROSS_SITES, 0))


def best_modes(readings: Sequence[Sequence[Reading]]) -> dict[Key, list[str]]:
    """Return the modes of each expression of an optimizer, the one that fits the whole run best
    first.
    """
    fits: defaultdict[Key, Counter[str]] = defaultdict(Counter)
    for alternatives in readings:
        for top in set(chain.from_iterable(alternatives)):
            for mode in MODES:
                found = [reading[top].get(mode, ()) for reading in alternatives if top in reading]
                costs = [
                    # a reading that does not apply is worse than any fault
                    sum(one.cost for one in several) / len(several) if several else 5.0
                    for several in found
                ]
                # a mean weight fits nearly anything: another mode that fits as well goes before it
                further = 0.5 if mode == BATCH else 0.0
                fits[top][mode] += min(costs) + further  # type: ignore[assignment]
    return {key: sorted(MODES, key=costs.__getitem__) for key, costs in fits.items()}
