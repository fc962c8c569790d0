"""How the weights of some calls read as one objective: right, a coefficient of the user's, a fault, or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradcheck_suite.live.judging.terms import TOLERANCE, Term, near

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
        if not all(near(factor, first.factor, TOLERANCE) and r == first.length for _, r, factor, _ in self.seen):
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
