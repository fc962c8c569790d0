"""Naming the fault of some parameters or elements, by comparing the wrong gradient with the right one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.weight_patterns.factors import constant_meaning
from gradcheck_suite.diagnosis.weight_patterns.weights import ALONE, Diagnosis, listed
from gradcheck_suite.diagnosis.wrong_elements.moved_elements import Array, mixed, part_of, projected
from gradcheck_suite.diagnosis.wrong_elements.number_formats import format_of, levels_of, relative_error
from gradcheck_suite.numerics.comparison import Comparison, Vector


def wrong_and_right(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the parameters with a wrong element, and those whose elements are all right; not those with no gradient.

    A parameter whose gradient is 0 throughout is right whatever scales or drops gradients.
    """
    wrong, right = [], []
    for name in comparison.layout.names:
        expected, *_, off = part_of(comparison, name)
        if off.any():
            wrong.append(name)
        elif expected.any():
            right.append(name)
    return wrong, right


def where_alone(comparison: Comparison) -> str:
    """Return which parameters are wrong while others are right, as the beginning of a sentence."""
    wrong, right = wrong_and_right(comparison)
    where = f"in {listed(wrong)}{ALONE}{listed(right)} {'is' if len(right) == 1 else 'are'} right"
    return f"{where}{_kind_of(comparison, wrong, right)}: "


def diagnose_elements(
    comparison: Comparison,
    by_weights: Mapping[str, Diagnosis | None],
    *,
    some_unread: bool = False,
    parameters: Vector | None = None,
) -> Diagnosis | None:
    """Name the fault that all wrong parameters have in common, or None.

    Args:
        comparison: of the wrong gradient with the right one.
        by_weights: wrong parameter -> what the weights of its micro-batches say, if they say anything.
        some_unread: whether the window has a micro-batch with a gradient of 0, which may be there or not.
        parameters: (P,): the values of the parameters, where they are known.
    """
    wrong, right = wrong_and_right(comparison)
    faults = {name: dict(_faults(comparison, name, by_weights.get(name))) for name in wrong}
    for name, lost in projected(comparison, wrong, parameters).items():
        faults[name]["projected-gradient"] = lost
    for found in faults.values() if some_unread else ():
        if "no-gradient" in found:
            found["dropped-micro-batch"] = "what the gradient holds are micro-batches whose own gradient is 0"
    common = [name for name in faults[wrong[0]] if all(name in found for found in faults.values())] if wrong else []
    where = where_alone(comparison) if right else "" if len(wrong) == 1 else "in every parameter: "
    if not common:
        return mixed(comparison, wrong) or _by_one_factor(comparison, wrong, where)
    said = {name: "; or: ".join(found[fault] for fault in common) for name, found in faults.items()}
    if len(set(said.values())) > 1:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Diagnosis(
            " or ".join(common), where + "; ".join(f"in {name}, {said[name]}" for name in wrong[:3]) + more
        )
    return Diagnosis(" or ".join(common), where + said[wrong[0]])


def _by_one_factor(comparison: Comparison, wrong: Sequence[str], where: str) -> Diagnosis | None:
    """Return the diagnosis of elements of several parameters that are all wrong by one factor, such as 0, or None."""
    expected, observed, allowed = comparison.expected, comparison.observed, comparison.allowed
    off, there = ~(np.abs(observed - expected) <= allowed), np.abs(expected) > allowed
    if len(wrong) < 2 or not (there & ~off).any() or not there[off].all():
        return None
    factor = 0.0 if (np.abs(observed[off]) <= allowed[off]).all() else float(np.median(observed[off] / expected[off]))
    if (np.abs(observed - factor * expected)[off] > (1 + abs(factor)) * allowed[off]).any():
        return None
    whole = all((off | ~there)[comparison.layout.elements(name)].all() for name in wrong)
    if whole and factor:
        return Diagnosis("wrong-scale", f"{where}every element is {_times(factor)} what it should be")
    what = "0" if not factor else f"{_times(factor)} what they should be"
    return Diagnosis(
        "partial-gradient",
        f"{np.count_nonzero(off)} of the {len(off)} elements are wrong, in {listed(wrong)}, and are {what}; the others "
        "are right: look for a mask, a slice or a dropout of gradients",
    )


def _kind_of(comparison: Comparison, wrong: Sequence[str], right: Sequence[str]) -> str:
    """Return how many dimensions all wrong parameters have and no right one, as the end of a clause, or nothing."""
    dimensions = {name: part_of(comparison, name)[0].ndim for name in (*wrong, *right)}
    if len(dimensions) < 3:
        return ""
    for low in (True, False):
        if all((dimensions[name] < 2) == ((name in wrong) == low) for name in dimensions):
            return f" (all parameters with {'fewer than two' if low else 'two or more'} dimensions are wrong)"
    return ""


def as_rounded_gradient(comparison: Comparison) -> Diagnosis | None:
    """Return the diagnosis of a gradient that a narrow format represents exactly, as it does not the right one.

    The weight probe shows rounded gradients and rounded weights alike, since its gradient is the weights.
    """
    expected, observed = comparison.expected, comparison.observed
    form = format_of(expected, observed)
    if form is None or format_of(expected, expected) is not None:
        return None
    return Diagnosis(
        "rounded-gradient",
        f"the gradient has a relative error of {relative_error(expected, observed):.1g}, and all its elements are "
        f"exactly representable in {form}: accumulate in the parameter's dtype or a wider one",
    )


def place_of_the_fault(comparison: Comparison) -> str:
    """Return which parameters are wrong and which right, and of which elements, as a clause."""
    wrong, right = wrong_and_right(comparison)
    counts = []
    for name in wrong[:3]:
        *_, off = part_of(comparison, name)
        counts.append(f"{name} ({np.count_nonzero(off)} of {off.size} elements)")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    no_other = "no parameter is right" if len(wrong) == len(comparison.layout.names) else "no other has a gradient"
    ending = f"; {listed(right)} {'is' if len(right) == 1 else 'are'} right" if right else f"; {no_other}"
    return f"wrong in {', '.join(counts)}{more}{ending}"


def _faults(comparison: Comparison, name: str, weights: Diagnosis | None) -> Iterator[tuple[str, str]]:
    """Yield the faults that fit one parameter. An element that rounding may hide is no evidence."""
    expected, observed, allowed, off = part_of(comparison, name)
    seen, there = np.abs(observed) > allowed, np.abs(expected) > allowed
    if not seen.any() and weights is not None and weights.name != "no-gradient":
        yield weights.name, weights.sentence
        return
    if not seen.any():
        why = "it was reset before the step, never computed, or set to 0 because of its values"
        yield "no-gradient", f"the gradient of {name} is 0: {why}"
        return
    other = _other_parameter(comparison, name)
    if weights is not None and not (other and weights.name == "wrong-scale"):
        yield weights.name, weights.sentence
    elif not other and (scale := _factor(expected, observed, allowed)) is not None:
        yield "wrong-scale", scale
    how = _permutation(expected, observed, allowed) if np.count_nonzero(there) > 1 else None
    if how:
        yield "permuted-gradient", f"the gradient of {name} has the right elements at other places: {how}"
    if other:
        yield (
            "swapped-gradients",
            f"{name} has the gradient of {other}: match parameters by name, not by position or shape",
        )
    if weights is None and (levels := levels_of(expected, observed)):
        yield (
            "rounded-gradient",
            f"all elements of the gradient of {name} are multiples of 1/{levels} of the largest: they are quantised; "
            "hand the optimizer the gradient itself",
        )
    elif weights is None and not how and not other and (there & ~off).any():
        yield "partial-gradient", _partial_text(name, expected, observed, allowed, off)
    elif weights is None and (form := format_of(expected, observed)):
        yield (
            "rounded-gradient",
            f"the gradient of {name} has a relative error of {relative_error(expected, observed):.1g}, and all its "
            f"elements are exactly representable in {form}: accumulate in the parameter's dtype or a wider one",
        )


def _factor(expected: Array, observed: Array, allowed: Array) -> str | None:
    pivot = np.unravel_index(np.argmax(np.abs(expected) / np.maximum(allowed, 1e-300)), expected.shape)
    if not expected[pivot]:
        return None
    factor = float(observed[pivot] / expected[pivot])
    if (np.abs(observed - factor * expected) > (1 + abs(factor)) * allowed).any():
        return None
    if abs(observed[pivot] - expected[pivot]) <= 2 * (1 + abs(factor)) * allowed[pivot]:
        return None  # rounding may be all of it
    meaning, remedy = constant_meaning(round(factor) if abs(factor - round(factor)) < 1e-9 else factor)
    single = np.count_nonzero(np.abs(expected) > allowed) < 2
    if single and not meaning and abs(factor - round(factor)) > 1e-9:
        return None
    said = f"every element is {_times(factor)} what it should be"
    return f"{said}: {meaning}; {remedy}" if meaning else said


def _times(factor: float) -> str:
    off = factor - 1
    return f"1 {'+' if off > 0 else '-'} {abs(off):.3g} times" if abs(off) < 1e-5 else f"{factor:.6g} times"


def _permutation(expected: Array, observed: Array, allowed: Array) -> str | None:
    tolerance = allowed.max()
    if np.ptp(expected) <= 2 * tolerance:
        return None
    if (np.abs(np.sort(observed, axis=None) - np.sort(expected, axis=None)) > tolerance).any():
        return None

    def same(values: Array) -> bool:
        return values.shape == observed.shape and bool((np.abs(values - observed) <= tolerance).all())

    if expected.ndim == 2 and same(expected.T):
        return "it is transposed"
    for axis in range(expected.ndim):
        if same(np.flip(expected, axis)):
            return f"it is flipped along dimension {axis}"
        for by in range(1, min(expected.shape[axis], 64)):
            if same(np.roll(expected, by, axis)):
                return f"it is rotated by {by} along dimension {axis}"
    if expected.ndim > 1 and same(expected.reshape(-1, order="F").reshape(expected.shape)):
        return "its elements are in another memory order"
    return "look for an index, a gather or a reshape"


def _other_parameter(comparison: Comparison, name: str) -> str | None:
    _, observed, allowed, _ = (part.reshape(-1) for part in part_of(comparison, name))
    for other in comparison.layout.names:
        expected, _, others, _ = (part.reshape(-1) for part in part_of(comparison, other))
        bound = allowed + others if other != name and expected.shape == observed.shape else None
        if bound is not None and (np.abs(observed - expected) <= bound).all() and (np.abs(expected) > bound).any():
            return other
    return None


def _partial_text(name: str, expected: Array, observed: Array, allowed: Array, off: npt.NDArray[np.bool_]) -> str:
    where = f"at {[tuple(map(int, index)) for index in np.argwhere(off)[:3]]}"
    for axis in reversed(range(off.ndim if off.ndim > 1 else 0)):
        wrong, there = (np.moveaxis(mask, axis, 0).reshape(off.shape[axis], -1) for mask in (off, expected != 0))
        rows = np.asarray(wrong.any(axis=1))
        if bool((wrong | ~there)[rows].all()):
            what = ("rows", "columns", f"places along dimension {axis}")[min(axis, 2)]
            where = f"in {what} {listed(np.flatnonzero(rows).tolist())}"
    ratio = observed[off] / np.where(expected[off] == 0, np.nan, expected[off])
    what = "other values than they should be"
    if not np.any(np.abs(observed[off]) > allowed[off]):
        what = "0"
    elif np.allclose(ratio, ratio.flat[0], rtol=min(1e-6, 1e-3 * abs(ratio.flat[0] - 1))):
        what = f"{_times(float(ratio.flat[0]))} what they should be"
    more = ", ..." if np.count_nonzero(off) > 3 and where.startswith("at") else ""
    return (
        f"{np.count_nonzero(off)} of the {off.size} elements of {name} are wrong, {where}{more}, and are {what}; the "
        f"others are right: look for {_cause(expected, allowed, off, are_zero=what == '0')}"
    )


def _cause(expected: Array, allowed: Array, off: npt.NDArray[np.bool_], *, are_zero: bool) -> str:
    """Return what to look for where some elements are wrong: signs or sizes alone only where it is no coincidence."""
    evident, sizes = np.abs(expected) > allowed, np.abs(expected)
    wrong, right = sizes[off], sizes[evident & ~off]
    found = []
    for sign, which in ((1, "positive"), (-1, "negative")):
        alike = evident & (np.sign(expected) == sign)
        if (off == alike).all() and (evident & ~alike).any():
            cause = f"looks at the sign, since all {which} elements are wrong and no others (abs, clamp, relu)"
            found.append((cause, bool(np.count_nonzero(evident) > 4)))
    choices = math.comb(np.count_nonzero(evident), np.count_nonzero(off & evident))
    if are_zero and wrong.max() < right.min():
        found.append(("drops small elements, since all others are larger (a threshold, sparsification)", choices > 64))
    elif not are_zero and wrong.min() > right.max():
        found.append(("changes large elements, since all others are smaller (clipping by value)", choices > 64))
    causes = [] if any(sure for _, sure in found) else ["a slice, a mask or a shard"]
    return ", or ".join(causes + [f"what {cause}" for cause, _ in found])
