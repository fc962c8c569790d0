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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

from gradcheck_suite.live.judging.reading import History, Reading, read
from gradcheck_suite.live.judging.terms import Term, group, near


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
