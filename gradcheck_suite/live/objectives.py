"""The weights of a window's items, objective by objective.

An objective is what one call site computes. Within a window every item of an objective must weigh the same: then the
window's gradient is that of one batch. The common weight must be 1/N (N, the window's count) for a mean, up to a
coefficient of the user's (`loss = main + 0.1 * auxiliary`), which does not depend on how the window is cut up. A scale
that does depend on it, such as the number of micro-batches, is a fault.

The same line may compute several objectives (a loop over layers, a helper called from two places), and several lines
may compute one (the window's last micro-batch unrolled). A window holds if its calls are right under one of these
readings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gradcheck_suite.live.calls import Received

TOLERANCE = 1e-6
"""Relative difference of weights that is nobody's fault: counts and quotients are often computed in float32."""
MAX_SEEN = 256
"""Windows of an objective that are remembered: the first and the latest."""
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

    @property
    def tolerance(self) -> float:
        """Relative difference of weights that rounding explains."""
        return max(TOLERANCE, ROUNDINGS * self.unit)


def term(received: Received, micro_batch: int, factor: float) -> Term:
    """Return what a cotangent says, with the weights multiplied by the factor with which the pass is in `.grad`."""
    call, low, high = received.call, float(received.low), float(received.high)
    counted = call.counted
    count = float(received.items)
    if counted.reduction == "none" and count == 0:
        low = high = 0.0
    largest = max(abs(low), abs(high))
    return Term(
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


@dataclass(frozen=True)
class Reading:
    """How the weights of some calls read as one objective.

    Attributes:
        status: `right`, `coefficient` (equal weights, some scale), `unequal`, `scale` or `unknown`.
        terms: the calls.
        count: N, what the window's mean divides by.
        factor: weight of an item over 1/N, where all are equal.
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
        if not all(_near(factor, first.factor, TOLERANCE) and r == first.length for _, r, factor, _ in self.seen):
            return None  # a coefficient that grows
        if not _near(first.factor, first.length / reading.length, max(t.tolerance for t in first.terms)):
            return None
        note = f"{first.length}/{reading.length}: divided by {reading.length}, where the run's first window has "
        return replace(first, status="scale", note=f"{note}{first.length} micro-batch(es)")


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _totals(terms: Sequence[Term]) -> list[float]:
    """Return what the window's mean may divide by: one number for a mean, several for what the user reduced himself."""
    counts = [sum(t.count for t in terms)]
    if terms[0].reduction != "mean":
        counts += [float(sum(t.elements for t in terms)), float(sum(t.rows for t in terms))]
    return counts


def _scale_fault(factor: float, length: int, steps: int | None, tolerance: float) -> str:
    """Return what a wrong factor is in terms of the window; empty where it is none of these."""
    names: list[tuple[float, str]] = []
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
    return next((name for value, name in names if _near(factor, value, tolerance)), "")


def read(terms: Sequence[Term], steps: int | None, history: History) -> Reading:
    """Read some calls of a window as one objective.

    Args:
        terms: the calls.
        steps: the number of micro-batches in a whole window, where it is known.
        history: of this objective; the caller adds the window to it.
    """
    length = len({t.micro_batch for t in terms})
    counted = [t for t in terms if t.count]
    given = tuple(terms)
    if not counted:
        return Reading("unknown", given, note="without valid targets")
    tolerance = max(t.tolerance for t in counted)
    if any(t.spread > tolerance for t in counted):
        return Reading("unknown", given, note="with different weights for its items, whose right weights are not known")
    weights = [t.weight for t in counted]
    largest = max(abs(w) for w in weights)
    totals = _totals(counted)
    if not largest:
        return Reading("unknown", given, note="multiplied by 0")
    if max(abs(w - weights[0]) for w in weights) > tolerance * largest:
        return Reading("unequal", given, totals[0], length=length)
    weight = sum(weights) / len(weights)
    factors = [weight * total for total in totals]
    return _scaled(given, counted, weight, totals, factors, length, steps, history, tolerance)


def _scaled(
    given: tuple[Term, ...],
    counted: Sequence[Term],
    weight: float,
    totals: Sequence[float],
    factors: Sequence[float],
    length: int,
    steps: int | None,
    history: History,
    tolerance: float,
) -> Reading:
    """Judge the common weight of a window's items."""

    def reading(status: str, note: str = "", index: int = 0) -> Reading:
        return Reading(status, given, totals[index], factors[index], length, note)

    declared = counted[0].declared
    if declared and declared != totals[0] and _near(weight, 1 / declared, tolerance):
        return reading("scale", f"{factors[0]:.6g}: the trainer counts {declared:g}, where {totals[0]:g} count")
    if any(_near(factor, 1.0, tolerance) for factor in factors):
        return reading("right", index=next(i for i, f in enumerate(factors) if _near(f, 1.0, tolerance)))
    summed = counted[0].reduction != "mean"
    if summed and _near(weight, 1.0, tolerance):
        return reading("coefficient", "a sum over items")
    steady = [(n, r) for n, r, factor, _ in history.seen if _near(factor, factors[0], tolerance)]
    if any(r != length for _, r in steady):
        return reading("coefficient", f"a coefficient of {factors[0]:.6g}")
    if summed and any(
        _near(w, weight, tolerance) and not _near(n, totals[0], tolerance) for n, _, _, w in history.seen
    ):
        return reading("coefficient", f"a sum over items times {weight:.6g}")
    for index, factor in enumerate(factors):
        if fault := _scale_fault(factor, length, steps, tolerance):
            return reading("scale", fault, index)
    for _, r, factor, _ in history.seen[:1]:
        if r != length and _near(factors[0] / factor, length / r, tolerance):
            if _near(factor, 1.0, tolerance):
                return reading("scale", f"{length}/{r}: divided by {r}, where the window has {length} micro-batches")
            return reading(
                "scale", f"{factors[0]:.6g}, where a window of {r} has {factor:.6g}: no mean is taken over it"
            )
    if divisor := _divisor_of_a_short_window(factors[0], length, history, tolerance):
        return reading(
            "scale", f"{length}/{divisor}: divided by {divisor}, where the window has {length} micro-batches"
        )
    if length > 1 and _miscounted(weight, totals, history, tolerance):
        return reading("scale", f"{factors[0]:.6g}: each weighs 1/{round(1 / weight)}, where {totals[0]:g} count")
    return reading("coefficient", f"a coefficient of {factors[0]:.6g}")


def _divisor_of_a_short_window(factor: float, length: int, history: History, tolerance: float) -> int:
    """Return the whole number that a short window is divided by and that is not its length, or 0.

    A longer window was right. Such a loop divides by what is left of the epoch, and steps before the epoch ends.
    """
    longest = max((r for _, r, earlier, _ in history.seen if _near(earlier, 1.0, tolerance)), default=0)
    divisor = round(length / factor) if factor > 0 else 0
    short = 1 < length < longest and length < divisor < longest
    return divisor if short and _near(factor, length / max(divisor, 1), tolerance) else 0


def _miscounted(weight: float, totals: Sequence[float], history: History, tolerance: float) -> bool:
    """Whether the weights are one over a whole number near the window's count, and not by a constant factor."""
    if weight <= 0 or weight >= 1:
        return False
    divisor = 1 / weight
    near = totals[0] / 2 < divisor < 2 * totals[0]
    whole = abs(divisor - round(divisor)) <= tolerance * divisor < 0.2
    if not (near and whole):
        return False
    history.integers += 1
    factors = [factor for _, _, factor, _ in history.seen] + [weight * totals[0]]
    return history.integers == len(factors) > 1 and not all(_near(f, factors[0], tolerance) for f in factors)


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
            return all(_near(mean, means[0], tolerance) for mean in means) and means[0] < 0.75
    return False


def group(terms: Iterable[Term], key: Callable[[Term], Hashable]) -> dict[Hashable, list[Term]]:
    """Return the terms by a key, in their order."""
    groups: dict[Hashable, list[Term]] = {}
    for one in terms:
        groups.setdefault(key(one), []).append(one)
    return groups


def readings(
    terms: Sequence[Term], steps: int | None, histories: dict[Hashable, History], number: int = 0
) -> list[Reading]:
    """Return how a window's calls read, one reading for each objective; faults only where no reading holds.

    Args:
        terms: all calls of the window that are in the gradient.
        steps: the number of micro-batches in a whole window, where it is known.
        histories: of each objective; the window is added to them.
        number: of the step.
    """
    found: list[tuple[Hashable, Reading]] = []
    for key, members in group(terms, lambda t: (t.name, t.line)).items():
        found += _refined(key, members, steps, histories)
    if len(found) > 1 and any(reading.status != "right" for _, reading in found):
        found = _merged(found, steps)
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


def _changing_coefficients(found: list[Reading]) -> list[Reading]:
    """Read unequal weights as a coefficient that changes between micro-batches, as annealing does.

    Another objective of the same micro-batches must be right; equal means over unequal counts stay a fault.
    """
    right = [{t.micro_batch for t in r.terms} for r in found if r.status == "right" and r.length > 1]

    def changes(reading: Reading) -> bool:
        counted = [t for t in reading.terms if t.count]
        means = [t.weight * t.count for t in counted]
        tolerance = max((t.tolerance for t in counted), default=0.0)
        equal = all(_near(mean, means[0], tolerance) for mean in means)
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
    if not all(_near(r.factor, first.factor, tolerance) and r.length == length for r in shared):
        return found
    if _near(first.factor, 1 / m, tolerance):
        return [replace(r, status="coefficient", note=f"a coefficient of {r.factor:.6g}") for r in found]
    if _near(first.factor, length / m, tolerance):
        note = f"{length}/{m}: no mean over the window's {length} micro-batches is taken of the mean of {m} losses"
        return [replace(r, status="scale", note=note) for r in found]
    return found


def _refined(
    key: Hashable, members: list[Term], steps: int | None, histories: dict[Hashable, History]
) -> list[tuple[Hashable, Reading]]:
    """Read the calls of one line as one objective, or as several where that is right and one is not."""
    whole = read(members, steps, histories.setdefault(key, History()))
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
                each.append((name, read(terms, steps, histories.setdefault(name, History()))))
            if all(reading.holds for _, reading in each):
                return each
    return [(key, whole)]


def _merged(found: list[tuple[Hashable, Reading]], steps: int | None) -> list[tuple[Hashable, Reading]]:
    """Read the lines of one loss function as one objective where that is exactly right."""
    by_name: dict[Hashable, list[tuple[Hashable, Reading]]] = {}
    for key, reading in found:
        by_name.setdefault((reading.terms[0].name, reading.terms[0].reduction), []).append((key, reading))
    result = []
    for name, parts in by_name.items():
        if len(parts) > 1 and any(reading.status != "right" for _, reading in parts):
            merged = read([t for _, reading in parts for t in reading.terms], steps, History())
            if merged.status == "right":
                result.append((name, merged))
                continue
        result += parts
    return result
