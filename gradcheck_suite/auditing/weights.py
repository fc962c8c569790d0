"""What each item weighed: terms read off a loss, objectives over a window, and the name of a fault."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from gradcheck_suite.auditing.losses import Received
from gradcheck_suite.core.comparison import LIVE_WEIGHT_TOLERANCE
from gradcheck_suite.core.results import MAX_ROWS, LiveViolation, WeightRow
from gradcheck_suite.judge.naming import diagnose, names_nothing
from gradcheck_suite.judge.weights import Diagnosis, Weights

# A call of a loss as it is in the gradient of a step: its count, and the weight of each item.


ROUNDINGS = 16
"""Roundings between a loss and what goes backward: scaling, division by counts, a sum of losses, a cast."""


@dataclass(frozen=True)
class Term:
    """One call of a loss, as it is in the gradient of a step.

    Attributes:
        name: of the loss function.
        line: `file:line` of the call.
        path: `file:line` of the user's frames, innermost first.
        reduction: of the call.
        count: what a mean divides by; the items with a weight for `"none"`, the targets for `"sum"`.
        rows: size of the leading dimension.
        elements: of the unreduced loss.
        weight: of each item in `.grad`.
        spread: largest relative difference of the weights of two items of this call.
        micro_batch: index of the backward pass in the window.
        ordinal: index among the calls of this line in this pass.
        target: storage address, first byte and last byte of the target, or None.
        unit: unit roundoff of the cotangent.
        declared: the count by which the trainer has the window divided, or None.
        summed: the term of the elements that a reduction adds up, which the user has made of an unreduced loss, such as
            its products with weights of the samples; None where there are none, or their own weights differ.
        sample_weights: of such a term, the sum of those weights.
    """

    name: str
    line: str
    path: tuple[str, ...]
    reduction: str
    count: float
    rows: int
    elements: int
    weight: float
    spread: float
    micro_batch: int
    ordinal: int
    target: tuple[int, int, int] | None
    unit: float
    declared: float | None = None
    summed: Term | None = None
    sample_weights: float = 0.0

    @property
    def tolerance(self) -> float:
        """Relative difference of weights that rounding explains."""
        return max(LIVE_WEIGHT_TOLERANCE, ROUNDINGS * self.unit)


def term(received: Received, micro_batch: int, factor: float) -> Term:
    """Return what a cotangent says, with the weights multiplied by the factor with which the pass is in `.grad`."""
    call, low, high = received.call, float(received.low), float(received.high)
    counted = call.counted
    count = float(received.items)
    if counted.reduction == "none" and count == 0:
        low = high = 0.0
    largest = max(abs(low), abs(high))
    found = Term(
        name=call.name,
        line=call.place.line,
        path=call.place.path,
        reduction=counted.reduction,
        count=count,
        rows=counted.rows,
        elements=counted.elements,
        weight=high * factor,
        spread=abs(high - low) / largest if largest else 0.0,
        micro_batch=micro_batch,
        ordinal=received.ordinal,
        target=call.target,
        unit=received.unit,
        declared=None if call.declared is None else float(call.declared),
    )
    return replace(found, summed=_summed(found, received, factor))


def _summed(found: Term, received: Received, factor: float) -> Term | None:
    """Return the term of the elements that a reduction adds up, where these weigh the same."""
    of = received.summands
    if of is None or not of.high or not near(float(of.low), float(of.high), found.tolerance):
        return None
    weight, total = float(of.high), float(of.total)
    return replace(found, weight=weight * factor, spread=0.0, elements=of.elements, sample_weights=total / weight)


def near(a: float, b: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def group(terms: Iterable[Term], key: Callable[[Term], Hashable]) -> dict[Hashable, list[Term]]:
    """Return the terms by a key, in their order."""
    groups: dict[Hashable, list[Term]] = {}
    for one in terms:
        groups.setdefault(key(one), []).append(one)
    return groups


# How the weights of some calls read as one objective: right, a coefficient of the user's, a fault, or unknown.


TWICE = ", or is divided twice by its 2 micro-batches: nothing here tells which"
MAX_SEEN = 256
"""Windows of an objective that are remembered: the first and the latest."""


@dataclass(frozen=True)
class Reading:
    """How the weights of some calls read as one objective.

    Attributes:
        status: `right`, `coefficient` (equal weights, some scale), `unequal`, `scale` or `unknown`.
        terms: the calls.
        count: N, what the window's mean divides by.
        factor: weight of an item over 1/N, where all are equal.
        coefficient: what `factor` should be, as other windows show: 1 where the loss has no coefficient of its own.
        length: micro-batches of the window in which the objective occurs.
        note: what a finding or an explanation says about it.
        step: the number of the step, where it is an earlier one than the one that is judged.
        changes: whether the coefficient is not the same in all micro-batches of the window.
    """

    status: str
    terms: tuple[Term, ...]
    count: float = 0.0
    factor: float = 1.0
    length: int = 1
    note: str = ""
    step: int | None = None
    changes: bool = False
    coefficient: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether the reading shows no fault."""
        return self.status in ("right", "coefficient", "unknown")


@dataclass
class History:
    """What earlier windows showed of one objective.

    Attributes:
        seen: (N, length of the window, factor, weight) of windows with equal weights.
        integers: windows in which one over the weight is a whole number that is no count of ours.
        first: the first window, where a factor that is not 1 reads as a coefficient until a longer window is right.
    """

    seen: list[tuple[float, int, float, float]] = field(default_factory=list)
    integers: int = 0
    first: Reading | None = None

    def add(self, reading: Reading, number: int) -> None:
        """Add a window with equal weights, that of step `number`."""
        if not self.seen and reading.status == "coefficient":
            self.first = replace(reading, step=number)
        weight = next((t.weight for t in reading.terms if t.count), 0.0)
        count = sum(t.count for t in reading.terms)
        self.seen.append((count, reading.length, weight * count, weight))
        if len(self.seen) > MAX_SEEN:
            del self.seen[1]

    def short_first(self, reading: Reading) -> Reading | None:
        """Return the first window as a fault where this longer one shows that it was divided by too much."""
        first, self.first = self.first, self.first if reading.status == "coefficient" else None
        if first is None or reading.status != "right" or reading.length <= first.length:
            return None
        if not all(
            near(factor, first.factor, LIVE_WEIGHT_TOLERANCE) and r == first.length for _, r, factor, _ in self.seen
        ):
            return None  # a coefficient that grows
        if not near(first.factor, first.length / reading.length, max(t.tolerance for t in first.terms)):
            return None
        note = f"{first.length}/{reading.length}: divided by {reading.length}, where the run's first window has "
        return replace(first, status="scale", note=f"{note}{first.length} micro-batch(es)")


def _totals(terms: Sequence[Term]) -> list[float]:
    """Return what the window's mean may divide by: one number for a mean, several for what the user reduced himself."""
    counts = [sum(t.count for t in terms)]
    if terms[0].reduction != "mean":
        counts += [float(sum(t.elements for t in terms)), float(sum(t.rows for t in terms))]
    return counts


def _scale_fault(factor: float, length: int, steps: int | None, tolerance: float, ranks: int = 1) -> str:
    """Return what a wrong factor is in terms of the window; empty where it is none of these."""
    names: list[tuple[float, str]] = []
    if ranks > 1:
        names += [
            (ranks, f"{ranks}, the number of ranks: the ranks' means are added up and not averaged"),
            (
                1 / ranks,
                f"1/{ranks}: each loss is divided by the count of all ranks, and gradients are averaged over {ranks} "
                "ranks besides",
            ),
        ]
    if length > 1:
        names.append((length, f"{length}, the number of the window's micro-batches: no mean over them is taken"))
    if length > 2:
        # with two micro-batches it may as well be the coefficient of `0.5 * loss`
        names.append((1 / length, f"1/{length}: the mean over the window's micro-batches is taken twice"))
    if steps is not None and steps != length:
        names += [
            (length / steps, f"{length}/{steps}: divided by {steps}, where the window has {length} micro-batch(es)"),
            (length / steps**2, f"{length}/{steps}**2: divided twice by {steps}, in a window of {length}"),
        ]
    if steps is not None and steps > 1 and steps != length:
        names.append((1 / steps, f"1/{steps}"))
    return next((name for value, name in names if near(factor, value, tolerance)), "")


def _weighted_samples(terms: Sequence[Term], length: int, steps: int | None) -> Reading | None:
    """Read the products of an unreduced loss and weights of the samples, of which only the loop knows the scale.

    Returns None where that shows neither that all weigh the same, nor that each micro-batch is a mean of its own.
    """
    products = tuple(t.summed for t in terms if t.summed is not None)
    if len(products) < len(terms):
        return None
    tolerance = max(t.tolerance for t in products)
    if all(near(t.weight, products[0].weight, tolerance) for t in products):
        count = _totals(products)[0]
        note = "a coefficient of the samples' weights"
        return Reading("coefficient", products, count, products[0].weight * count, length, note)
    shares = [1 / length] if steps is None else [1 / length, 1 / steps]
    for counts in (
        [t.count for t in products],
        [float(t.elements) for t in products],
        [t.sample_weights for t in products],
    ):
        if any(all(near(t.weight * n, s, tolerance) for t, n in zip(products, counts, strict=True)) for s in shares):
            counted = tuple(replace(t, count=n) for t, n in zip(products, counts, strict=True))
            return Reading("unequal", counted, sum(counts), length=length)
    return None


def read(terms: Sequence[Term], steps: int | None, history: History, ranks: int = 1) -> Reading:
    """Read some calls of a window as one objective.

    Args:
        terms: the calls.
        steps: the number of micro-batches in a whole window, where it is known.
        history: of this objective; the caller adds the window to it.
        ranks: over how many ranks the calls are spread, where their counts differ between ranks.
    """
    length = len({t.micro_batch for t in terms})
    counted = [t for t in terms if t.count]
    given = tuple(terms)
    if not counted:
        return Reading("unknown", given, note="without valid targets")
    tolerance = max(t.tolerance for t in counted)
    weights = [t.weight for t in counted]
    largest = max(abs(w) for w in weights)
    spread = any(t.spread > tolerance for t in counted)
    unequal = max(abs(w - weights[0]) for w in weights) > tolerance * largest
    if spread or (unequal and all(t.count == 1 for t in counted)):
        # the weight of a single sample looks like a weight of its micro-batch
        weighted = _weighted_samples(counted, length, steps)
        if weighted is not None and (spread or weighted.holds):
            return weighted
    if spread:
        return Reading("unknown", given, note="with different weights for its items, whose right weights are not known")
    totals = _totals(counted)
    if not largest:
        return Reading("unknown", given, note="multiplied by 0")
    if unequal:
        return Reading("unequal", given, totals[0], length=length)
    weight = sum(weights) / len(weights)
    factors = [weight * total for total in totals]
    return _scaled(given, counted, weight, totals, factors, length, steps, history, tolerance, ranks)


def _scaled(  # noqa: PLR0913 - all that is known of one window
    given: tuple[Term, ...],
    counted: Sequence[Term],
    weight: float,
    totals: Sequence[float],
    factors: Sequence[float],
    length: int,
    steps: int | None,
    history: History,
    tolerance: float,
    ranks: int,
) -> Reading:
    """Judge the common weight of a window's items."""

    def reading(status: str, note: str = "", index: int = 0) -> Reading:
        return Reading(status, given, totals[index], factors[index], length, note)

    declared = counted[0].declared
    if declared and declared != totals[0] and near(weight, 1 / declared, tolerance):
        return reading("scale", f"{factors[0]:.6g}: the trainer counts {declared:g}, where {totals[0]:g} count")
    if any(near(factor, 1.0, tolerance) for factor in factors):
        return reading("right", index=next(i for i, f in enumerate(factors) if near(f, 1.0, tolerance)))
    summed = counted[0].reduction != "mean"
    if summed and near(weight, 1.0, tolerance):
        return reading("coefficient", "a sum over items")
    steady = [(n, r) for n, r, factor, _ in history.seen if near(factor, factors[0], tolerance)]
    if any(r != length for _, r in steady):
        return reading("coefficient", f"a coefficient of {factors[0]:.6g}")
    if summed and any(near(w, weight, tolerance) and not near(n, totals[0], tolerance) for n, _, _, w in history.seen):
        return reading("coefficient", f"a sum over items times {weight:.6g}")
    for index, factor in enumerate(factors):
        if fault := _scale_fault(factor, length, steps, tolerance, ranks):
            return reading("scale", fault, index)
    for _, r, factor, _ in history.seen[:1]:
        if r != length and near(factors[0] / factor, length / r, tolerance):
            own = 1.0 if near(factor, 1.0, tolerance) else factor
            note = f"{length}/{r}: divided by {r}, where the window has {length} micro-batches"
            if own != 1.0:
                note += f" (beside the loss's coefficient of {own:.6g})"
            return replace(reading("scale", note), coefficient=own)
    if divisor := _divisor_of_a_short_window(factors[0], length, history, tolerance):
        return reading(
            "scale", f"{length}/{divisor}: divided by {divisor}, where the window has {length} micro-batches"
        )
    if length > 1 and _miscounted(weight, totals, history, tolerance):
        return reading("scale", f"{factors[0]:.6g}: each weighs 1/{round(1 / weight)}, where {totals[0]:g} count")
    twice = length == 2 and near(factors[0], 1 / 2, tolerance)
    return reading("coefficient", f"a coefficient of {factors[0]:.6g}" + (TWICE if twice else ""))


def _divisor_of_a_short_window(factor: float, length: int, history: History, tolerance: float) -> int:
    """Return the whole number that a short window is divided by and that is not its length, or 0.

    A longer window was right. Such a loop divides by what is left of the epoch, and steps before the epoch ends.
    """
    longest = max((r for _, r, earlier, _ in history.seen if near(earlier, 1.0, tolerance)), default=0)
    divisor = round(length / factor) if factor > 0 else 0
    short = 1 < length < longest and length < divisor < longest
    return divisor if short and near(factor, length / max(divisor, 1), tolerance) else 0


def _miscounted(weight: float, totals: Sequence[float], history: History, tolerance: float) -> bool:
    """Whether the weights are one over a whole number near the window's count, and not by a constant factor."""
    if weight <= 0 or weight >= 1:
        return False
    divisor = 1 / weight
    close = totals[0] / 2 < divisor < 2 * totals[0]
    whole = abs(divisor - round(divisor)) <= tolerance * divisor < 0.2
    if not (close and whole):
        return False
    history.integers += 1
    factors = [factor for _, _, factor, _ in history.seen] + [weight * totals[0]]
    return history.integers == len(factors) > 1 and not all(near(f, factors[0], tolerance) for f in factors)


# The weights of a window's items, objective by objective.
#
# An objective is what one call site computes. Within a window every item of an objective must weigh the same: then
# the window's gradient is that of one batch. The common weight must be 1/N (N, the window's count) for a mean, up to
# a coefficient of the user's (`loss = main + 0.1 * auxiliary`), which does not depend on how the window is cut up. A
# scale that does depend on it, such as the number of micro-batches, is a fault.
#
# The same line may compute several objectives (a loop over layers, a helper called from two places), and several
# lines may compute one (the window's last micro-batch unrolled). A window holds if its calls are right under one of
# these readings.


def _chunks(terms: Sequence[Term]) -> bool:
    """Whether the calls of some pass are about disjoint parts of one tensor, as chunks of a batch are."""
    for micro_batch in {t.micro_batch for t in terms}:
        places = sorted(t.target for t in terms if t.micro_batch == micro_batch and t.target is not None)
        if len(places) > 1 and len({storage for storage, _, _ in places}) == 1:
            return all(last < first for (_, _, last), (_, first, _) in pairwise(places))
    return False


def _averaged(terms: Sequence[Term]) -> bool:
    """Whether a pass averages the means over batches of different sizes, as a window in one graph does.

    Losses of several layers or heads have batches of one size.
    """
    for micro_batch in {t.micro_batch for t in terms}:
        part = [t for t in terms if t.micro_batch == micro_batch and t.count]
        means = [t.weight * t.count for t in part]
        tolerance = max((t.tolerance for t in part), default=0.0)
        if len({t.rows for t in part}) > 1 and part[0].reduction == "mean":
            return all(near(mean, means[0], tolerance) for mean in means) and means[0] < 0.75
    return False


def _changing_coefficients(found: list[Reading]) -> list[Reading]:
    """Read unequal weights as a coefficient that changes between micro-batches, as annealing does.

    Another objective of the same micro-batches must be right; equal means over unequal counts stay a fault.
    """
    right = [{t.micro_batch for t in r.terms} for r in found if r.status == "right" and r.length > 1]

    def changes(reading: Reading) -> bool:
        counted = [t for t in reading.terms if t.count]
        means = [t.weight * t.count for t in counted]
        tolerance = max((t.tolerance for t in counted), default=0.0)
        equal = all(near(mean, means[0], tolerance) for mean in means)
        return not equal and any(covered >= {t.micro_batch for t in reading.terms} for covered in right)

    return [
        replace(r, status="coefficient", changes=True, note="a coefficient that changes between its micro-batches")
        if r.status == "unequal" and changes(r)
        else r
        for r in found
    ]


def _averaged_objectives(found: list[Reading]) -> list[Reading]:
    """Judge the common factor of m objectives together: `(a + b) / 2` gives each a factor of 1/2, which is no fault."""
    shared = [reading for reading in found if reading.status in ("scale", "coefficient") and reading.length > 1]
    m = len(shared)
    if m < 2 or m < len(found):
        return found
    first, length = shared[0], shared[0].length
    tolerance = max(t.tolerance for reading in shared for t in reading.terms)
    if not all(near(r.factor, first.factor, tolerance) and r.length == length for r in shared):
        return found
    if near(first.factor, 1 / m, tolerance):
        return [replace(r, status="coefficient", note=f"a coefficient of {r.factor:.6g}") for r in found]
    if near(first.factor, length / m, tolerance):
        note = f"{length}/{m}: no mean over the window's {length} micro-batches is taken of the mean of {m} losses"
        return [replace(r, status="scale", note=note) for r in found]
    return found


def _blended(terms: Sequence[Term]) -> list[Term]:
    """Return one term for each pass, with the sum of its calls' weights, as in `a * loss(y) + (1 - a) * loss(z)`.

    Mixup draws another `a` for each batch. Empty where the calls of a pass are not of one size.
    """
    passes = group((t for t in terms if t.count), lambda t: t.micro_batch).values()
    same_size = all(len({(t.count, t.rows) for t in part}) == 1 for part in passes)
    if not same_size or {len(part) for part in passes} <= {1} or any(t.weight <= 0 for t in terms):
        return []
    return [replace(part[0], weight=sum(t.weight for t in part)) for part in passes]


def _blend(parts: Sequence[Reading], steps: int | None, history: History, ranks: int) -> Reading | None:
    """Read several calls of each pass as one, where each by itself has a weight that changes and their sum has none."""
    blended = _blended([t for reading in parts for t in reading.terms])
    if len(parts) < 2 or len(blended) < 2 or any(reading.status != "unequal" for reading in parts):
        return None
    reading = read(blended, steps, history, ranks)
    means = [t.weight * t.count for t in blended]
    tolerance = max(t.tolerance for t in blended)
    return reading if reading.status != "unequal" or all(near(mean, means[0], tolerance) for mean in means) else None


def _refined(
    key: Hashable, members: list[Term], steps: int | None, histories: dict[Hashable, History], ranks: int
) -> list[tuple[Hashable, Reading]]:
    """Read the calls of one line as one objective, or as several where that is right and one is not."""
    whole = read(members, steps, histories.setdefault(key, History()), ranks)
    if whole.holds:
        return [(key, whole)]
    splits: list[Callable[[Term], Hashable]] = [lambda t: t.path]
    if not (_chunks(members) or _averaged(members)):
        splits += [lambda t: t.ordinal, lambda t: (t.path, t.ordinal)]
    for split in splits:
        parts = group(members, split)
        if len(parts) > 1:
            each: list[tuple[Hashable, Reading]] = []
            for part, terms in parts.items():
                name = (key, part)
                each.append((name, read(terms, steps, histories.setdefault(name, History()), ranks)))
            if all(reading.holds for _, reading in each):
                return each
            name = (key, "blend")
            if blend := _blend([r for _, r in each], steps, histories.setdefault(name, History()), ranks):
                return [(name, blend)]
    return [(key, whole)]


def _merged(
    found: list[tuple[Hashable, Reading]], steps: int | None, histories: dict[Hashable, History], ranks: int
) -> list[tuple[Hashable, Reading]]:
    """Read the lines of one loss function as one objective where that is exactly right, or where they are a blend."""
    by_name: dict[Hashable, list[tuple[Hashable, Reading]]] = {}
    for key, reading in found:
        by_name.setdefault((reading.terms[0].name, reading.terms[0].reduction), []).append((key, reading))
    result = []
    for name, parts in by_name.items():
        if len(parts) > 1 and any(reading.status != "right" for _, reading in parts):
            merged = read([t for _, reading in parts for t in reading.terms], steps, History(), ranks)
            if merged.status == "right":
                result.append((name, merged))
                continue
            blend = _blend([reading for _, reading in parts], steps, histories.setdefault(name, History()), ranks)
            if blend is not None:
                result.append((name, blend))
                continue
        result += parts
    return result


def readings(
    terms: Sequence[Term], steps: int | None, histories: dict[Hashable, History], number: int = 0, ranks: int = 1
) -> list[Reading]:
    """Return how a window's calls read, one reading for each objective; faults only where no reading holds.

    Args:
        terms: all calls of the window that are in the gradient.
        steps: the number of micro-batches in a whole window, where it is known.
        histories: of each objective; the window is added to them.
        number: of the step.
        ranks: over how many ranks the calls are spread, where their counts differ between ranks.
    """
    found: list[tuple[Hashable, Reading]] = []
    for key, members in group(terms, lambda t: (t.name, t.line)).items():
        found += _refined(key, members, steps, histories, ranks)
    if len(found) > 1 and any(reading.status != "right" for _, reading in found):
        found = _merged(found, steps, histories, ranks)
    result = [reading for _, reading in found]
    if any(r.status == "right" and r.length > 1 for r in result):
        # another objective of the same window shows that the loop scales as it should
        result = [
            replace(r, status="coefficient", note=f"a coefficient of {r.factor:.6g}") if r.status == "scale" else r
            for r in result
        ]
    result = _changing_coefficients(_averaged_objectives(result))
    earlier = []
    for (key, _), reading in zip(found, result, strict=True):
        if reading.status in ("right", "coefficient") and reading.terms and not reading.changes:
            history = histories.setdefault(key, History())
            if (fault := history.short_first(reading)) is not None:
                earlier.append(fault)
            history.add(reading, number)
    return [*earlier, *result]


# The name and the words of a fault in the weights of a window's items.


def _snapped(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Return values that are equal up to rounding made exactly equal, so that exact rules see what is meant."""
    mean = values.mean()
    return np.full_like(values, mean) if np.abs(values - mean).max() <= tolerance * abs(mean) else values


def _observed(terms: list[Term], tolerance: float, simple: list[float]) -> np.ndarray:
    """Return the weights without their rounding errors, where they are the same for each item or for each mean."""
    weights, counts = np.array([t.weight for t in terms]), np.array([t.count for t in terms])
    means = _snapped(weights * counts, tolerance)
    if (means == means[0]).all():
        share = next((s for s in simple if abs(means[0] - s) <= tolerance * s), float(means[0]))
        return share / counts
    return _snapped(weights, tolerance)


def _preferred(found: Diagnosis) -> tuple[str, str]:
    """Return one name and its sentence where several fit: what scripts do most often."""
    names, sentences = found.name.split(" or "), found.sentence.split("; or: ")
    index = names.index("mean-of-means") if "mean-of-means" in names else 0
    return names[index], sentences[index] if len(sentences) == len(names) else found.sentence


def _by_elements(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a mean that divides by all elements of an unreduced loss, those without a weight (padding) included."""
    if any(t.reduction != "none" for t in terms):
        return None
    found = diagnose(replace(weights, counts=tuple(float(t.elements) for t in terms)))
    padded = "the mean divides by all elements of its micro-batch, padding included, and "
    return replace(found, sentence=padded + found.sentence) if found.name == "mean-of-means" else None


def _by_micro_batches(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a fault between micro-batches whose loss goes through several calls of equal weights, as in chunks."""
    parts = [[t for t in terms if t.micro_batch == m] for m in sorted({t.micro_batch for t in terms})]
    if len(parts) == len(terms) or not all(weights.close(t.weight, part[0].weight) for part in parts for t in part):
        return None
    whole = [replace(part[0], count=sum(t.count for t in part)) for part in parts]
    number = len(whole)
    merged = replace(
        weights,
        observed=_observed(whole, weights.tolerance, [1 / number, 1.0]),
        counts=tuple(t.count for t in whole),
        window=tuple(range(number)),
        accumulation_steps=number,
        items=(),
    )
    found = diagnose(merged)
    return None if names_nothing(found) else found


def _one_factor(terms: list[Term], weights: Weights) -> Diagnosis | None:
    """Name a factor that some micro-batches of a window have and most have not."""
    for values, what in ((weights.observed, "item"), (weights.observed * np.array(weights.counts), "mean")):
        usual = float(np.median(values))
        same = [bool(weights.close(v, usual)) for v in values]
        others = [j for j, is_usual in enumerate(same) if not is_usual]
        if usual and 2 * sum(same) > len(same) and len({round(float(values[j] / usual), 9) for j in others}) == 1:
            numbers = ", ".join(str(terms[j].micro_batch) for j in others)
            return Diagnosis(
                "unequal-factors",
                f"each {what} of micro-batch(es) {numbers} weighs {float(values[others[0]] / usual):.6g} times what it "
                "weighs in the others: the loss has a factor there that changes inside the window (a loss scale, a "
                "coefficient, a special case for the first or last micro-batch)",
            )
    return None


def table(reading: Reading) -> tuple[WeightRow, ...]:
    """Return what each call of an objective gave its items."""
    expected = reading.coefficient / reading.count if reading.count else 0.0
    rows = [WeightRow(t.micro_batch, t.line, t.count, expected, t.weight) for t in reading.terms]
    return tuple(rows[:MAX_ROWS])


def largest_error(reading: Reading) -> float:
    """Return the largest relative error of a weight."""
    return max((abs(t.weight * reading.count / reading.coefficient - 1) for t in reading.terms if t.count), default=0.0)


def weight_violation(reading: Reading, steps: int | None) -> LiveViolation:
    """Return the violation that a faulty reading is, without its place in the run."""
    counted = [t for t in reading.terms if t.count]
    tolerance = max(t.tolerance for t in counted)
    error = largest_error(reading)
    where = counted[0].line
    if reading.status == "scale":
        name = "wrong-scale"
        times = reading.factor / reading.coefficient
        sentence = f"every item of the window weighs {times:.6g} times what it should, which is {reading.note}"
        if len({t.micro_batch for t in reading.terms}) > len({t.micro_batch for t in counted}):
            name = "mean-of-means"
        # what leaks is shorter than a whole window
        if steps is not None and steps < reading.length < 2 * steps and abs(times * steps / reading.length - 1) < 1e-3:
            name = "tail-leak"
            sentence += (
                "; the gradient of micro-batches that belong to the window before is still in it: "
                "step after an epoch's last micro-batch too, and reset after it"
            )
    else:
        # the calls of a window in one graph are its micro-batches
        length = max(reading.length, len(counted))
        k = steps if steps is not None and len(counted) == reading.length else length
        weights = Weights(
            observed=_observed(counted, tolerance, [1 / length, 1 / k, 1.0]),
            counts=tuple(t.count for t in counted),
            window=tuple(range(len(counted))),
            accumulation_steps=k,
            epoch=0,
            reduction="mean",
            items=() if len({t.rows for t in counted}) == 1 else tuple(t.rows for t in counted),
            tolerance=tolerance,
        )
        found = diagnose(weights)
        if names_nothing(found):
            found = (
                _by_elements(counted, weights)
                or _by_micro_batches(counted, weights)
                or _one_factor(counted, weights)
                or found
            )
        name, sentence = _preferred(found)
        sentence = sentence.replace("run.count(batch)", "the batch's count")
    share = "less than 1%" if error < 0.01 else f"{100 * error:.3g}%"
    return LiveViolation(
        kind="gradient",
        diagnosis=name,
        explanation=f"{sentence} (weights are off by up to {share})",
        where=where,
        error=error,
        allowed=tolerance,
        weights=table(reading),
    )
