"""What the elements of a wrong gradient show: a scale, lost or moved elements, number formats,
sizes.

Must not run a loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.core.comparison import Comparison, Vector, beyond, within
from gradcheck_suite.judge.naming import FORMATS, constant_meaning
from gradcheck_suite.judge.weights import (
    WHILE_RIGHT,
    Array,
    Diagnosis,
    any_of,
    factor_text,
    first_of,
)
from gradcheck_suite.reference.large_batch import WindowReference, gradients_of

# Gradients that have lost a mean or a direction, and gradients whose elements belong to other
# parameters.


def part_of(comparison: Comparison, name: str) -> tuple[Array, Array, Array, npt.NDArray[np.bool_]]:
    """Return expected, observed, allowed, and which elements are wrong, of one parameter."""
    layout = comparison.layout
    expected, observed, allowed = (
        layout.part(vector, name)
        for vector in (comparison.expected, comparison.observed, comparison.allowed)
    )
    with np.errstate(invalid="ignore"):  # of two infinities
        near = np.abs(observed - expected) <= allowed
    # equal infinities are right, and their difference is NaN, which is near to nothing
    return expected, observed, allowed, ~((observed == expected) | near)


def projected(
    comparison: Comparison, wrong: Sequence[str], parameters: Vector | None
) -> dict[str, str]:
    """Return for each wrong parameter which part of its gradient has been subtracted, where all are
    like that.
    """
    found: dict[str, str] = {}
    zero: list[str] = []
    for name in wrong:
        expected, observed, allowed, _ = part_of(comparison, name)
        values = None if parameters is None else comparison.layout.part(parameters, name)
        # a mean adds up the rounding of all elements, and the subtraction rounds once more
        if what := projection(expected, observed, 8 * float(allowed.max()), values):
            found[name] = f"{what} has been subtracted from it, and nothing else is wrong"
        elif what := _averaged(expected, observed, 8 * float(allowed.max())):
            found[name] = f"each of its elements is {what} of the right gradient"
        elif within(observed, 0, allowed):
            zero.append(name)
    # a zero gradient alone is no projection: some other parameter must show which part is missing
    if not found or len(found) + len(zero) < len(wrong):
        return {}
    # a single element is its own mean
    text = next(iter(found.values()))
    return {name: found.get(name, f"{text}, which leaves 0") for name in wrong}


def projection(
    expected: Array, observed: Array, allowed: float, parameter: Array | None = None
) -> str | None:
    """Return which part of a gradient has been subtracted from it: a mean, or what lies along the
    parameter.
    """
    # one element less its own mean is 0, which any reset gives as well
    if expected.size < 2 or np.abs(observed - expected).max() <= allowed:
        return None

    def lacks(part: Array) -> bool:
        # a part that rounding may hide is subtracted from anything
        return within(observed + part, expected, allowed) and beyond(part, 0, allowed)

    for mean, of in _means(expected):
        if lacks(mean):
            return f"the mean of each {of}" if of else "the mean of all its elements"
    size = 0.0 if parameter is None else float((parameter**2).sum())
    if (
        parameter is not None
        and size
        and lacks(parameter * (float((parameter * expected).sum()) / size))
    ):
        return "what lies along the parameter itself"
    return None


def _averaged(expected: Array, observed: Array, allowed: float) -> str | None:
    """Return the mean that every element of a gradient is: of all elements, of its row or of its
    column.
    """
    if not beyond(observed, 0, allowed):
        return None
    for mean, of in _means(expected):
        if beyond(mean, expected, allowed) and within(observed, mean, allowed):
            return f"the mean of its {of}" if of else "the mean of all elements"
    return None


def _means(expected: Array) -> Iterator[tuple[Array, str]]:
    """Yield the mean of all elements, of each row and of each column, in the elements' shape, and
    what it is of.
    """
    every = tuple(range(expected.ndim))
    groups = [(every, "")]
    if len(every) > 1:
        groups += [(every[1:], "row"), ((0,), "column")]
    for over, of in groups:
        # the mean over one element is the element
        if math.prod(expected.shape[axis] for axis in over) > 1:
            mean = expected.mean(axis=over, keepdims=True)
            yield np.broadcast_to(mean, expected.shape), of


MOST_SHIFTED = 4
"""Elements by which a flat buffer of gradients may be off."""


def shift_of(expected: Vector, observed: Vector, allowed: float) -> int | None:
    """Return by how many elements a flat gradient is shifted, to the end if positive.

    None where it is not, or where too few elements tell.
    """
    if np.abs(observed - expected).max(initial=0.0) <= allowed:
        return None
    # at least three elements must be left to compare
    for size in range(1, min(MOST_SHIFTED, len(expected) - 3) + 1):
        for shift, due, seen in (
            (size, expected[:-size], observed[size:]),
            (-size, expected[size:], observed[:-size]),
        ):
            # of equal elements, each shift looks right
            several = len(np.unique(due)) > 1
            if (
                several
                and np.count_nonzero(np.abs(due) > allowed) > 2
                and not beyond(seen, due, allowed)
            ):
                return shift
    return None


def shifted(comparison: Comparison) -> Diagnosis | None:
    """Return the diagnosis of gradients that are shifted across parameters, or None."""
    if not np.isfinite(comparison.observed).all():
        return None
    shift = shift_of(
        comparison.expected, comparison.observed, float(comparison.allowed.max(initial=0.0))
    )
    if shift is None:
        return None
    return Diagnosis(
        "misplaced-gradient",
        f"the elements of all gradients, one parameter after the other, are shifted by {abs(shift)}"
        f" to the {'end' if shift > 0 else 'start'}: a flat buffer is taken apart at other places"
        " than it is filled",
    )


def mixed(comparison: Comparison, wrong: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis of gradients whose elements have moved to other parameters, or that are
    mixed; or None.
    """
    parts = {name: tuple(part.reshape(-1) for part in part_of(comparison, name)) for name in wrong}
    if len(wrong) < 2:
        return None
    expected, observed, allowed, _ = (
        np.concatenate([parts[name][i] for name in wrong]) for i in range(4)
    )
    # the largest bound for all: an element may have come from a parameter whose bound is larger
    if within(np.sort(observed), np.sort(expected), allowed.max()):
        return Diagnosis(
            "misplaced-gradient",
            f"the gradients of {first_of(wrong)} together have the right elements, at other places:"
            " they are flattened in one order and taken apart in another",
        )
    return None


LEVELS = (3, 7, 15, 31, 63, 127, 255, 32767)
"""Largest whole numbers of the formats that gradients are quantised to."""
FIRST_FINE = LEVELS.index(127)
"""Place of the first of them whose error is so small that one element tells it."""


def levels_of(expected: Array, observed: Array) -> int | None:
    """Return the number of steps from 0 to the largest element that all elements lie on, where they
    are near enough.
    """
    largest = np.abs(observed).max()
    if len(np.unique(np.abs(observed[observed != 0]))) < 2:
        return None
    # of two elements, one alone lies on a level by chance, the largest always does
    tried = LEVELS[FIRST_FINE:] if np.count_nonzero(observed) < 3 else LEVELS
    for levels in tried:
        steps = observed / largest * levels
        if (np.abs(steps - np.round(steps)) < 1e-9 * levels).all():
            # quantised, and near to the right gradient: what is far off has another fault as well
            return levels if within(observed, expected, largest / levels) else None
    return None


def relative_error(expected: Array, observed: Array) -> float:
    """Return the largest error over the largest expected element."""
    size = np.abs(expected).max()
    return float(np.abs(observed - expected).max() / size) if size else float("inf")


def format_of(expected: Array, observed: Array) -> str | None:
    """Return the narrow format that all elements are numbers of, where the gradient is right to its
    precision.
    """
    for form, digits in FORMATS.items():
        mantissa, _ = np.frexp(observed)
        # a float64 holds every number of a narrower format exactly: the check is one of equality
        scaled = mantissa * 2.0**digits
        if (scaled == np.round(scaled)).all() and relative_error(
            expected, observed
        ) <= 8 * 2.0**-digits:
            return form
    return None


# Naming the fault of some parameters or elements, by comparing the wrong gradient with the right
# one.


def wrong_and_right(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the parameters with a wrong element, and those whose elements are all right.

    Not those with no gradient. A parameter whose gradient is 0 throughout is right whatever scales
    or drops gradients.
    """
    wrong = []
    right = []
    for name in comparison.layout.names:
        expected, *_, off = part_of(comparison, name)
        if off.any():
            wrong.append(name)
        elif expected.any():
            right.append(name)
    return wrong, right


def where_wrong(comparison: Comparison) -> str:
    """Return which parameters are wrong while others are right, as the beginning of a sentence."""
    wrong, right = wrong_and_right(comparison)
    return (
        f"in {first_of(wrong)}{WHILE_RIGHT}{first_of(right)} {'is' if len(right) == 1 else 'are'}"
        " right: "
    )


def diagnose_elements(
    comparison: Comparison,
    by_weights: Mapping[str, Diagnosis | None],
    *,
    some_unread: bool = False,
    parameters: Vector | None = None,
) -> Diagnosis | None:
    """Name the fault that all wrong parameters have in common, or None.

    Args:
        comparison: the wrong gradient compared with the right one.
        by_weights: wrong parameter -> what the weights of its micro-batches say, if they say
            anything.
        some_unread: whether the window has a micro-batch with a gradient of 0, which may be there
            or not.
        parameters: (P,): the values of the parameters, where they are known.
    """
    wrong, _ = wrong_and_right(comparison)
    if not wrong:
        return mixed(comparison, wrong)
    # before single parameters: after a shift, each of them has a fault of its own
    if one := shifted(comparison):
        return one
    faults: dict[str, dict[str, Diagnosis]] = {}
    # of several parameters with one wrong element each, that all the others are right is no chance
    is_alone = sum(np.count_nonzero(part_of(comparison, name)[-1]) for name in wrong) == 1
    lost = projected(comparison, wrong, parameters)
    for name in wrong:
        each_fault = _faults(comparison, name, by_weights.get(name), is_alone=is_alone)
        found = {one.name: one for one in each_fault}
        if name in lost:
            found["projected-gradient"] = Diagnosis("projected-gradient", lost[name])
        if some_unread and "no-gradient" in found:
            text = "what the gradient holds are micro-batches whose own gradient is 0"
            found["dropped-micro-batch"] = Diagnosis("dropped-micro-batch", text)
        faults[name] = found
    # one loop has one fault: what does not fit every wrong parameter is a coincidence
    common = [fault for fault in faults[wrong[0]] if all(fault in of for of in faults.values())]
    if not common:
        return mixed(comparison, wrong)
    each = {name: any_of([found[fault] for fault in common]) for name, found in faults.items()}
    return replace(any_of([*each.values()]), sentence=_of_each(comparison, each))


def _of_each(comparison: Comparison, each: Mapping[str, Diagnosis]) -> str:
    """Return what is wrong of each parameter, in one sentence where it is the same of all."""
    wrong, right = wrong_and_right(comparison)
    where = "" if len(wrong) == 1 else "in every parameter: "
    if right:
        where = where_wrong(comparison)
    sentence = each[wrong[0]].sentence
    if all(one.sentence == sentence for one in each.values()):
        return where + sentence
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return where + "; ".join(f"in {name}, {each[name].sentence}" for name in wrong[:3]) + more


def place_of_the_fault(comparison: Comparison) -> str:
    """Return which parameters are wrong and which right, and of which elements, as a clause."""
    wrong, right = wrong_and_right(comparison)
    counts = []
    for name in wrong[:3]:
        *_, off = part_of(comparison, name)
        counts.append(f"{name} ({np.count_nonzero(off)} of {off.size} elements)")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    no_other = (
        "no parameter is right"
        if len(wrong) == len(comparison.layout.names)
        else "no other has a gradient"
    )
    ending = (
        f"; {first_of(right)} {'is' if len(right) == 1 else 'are'} right"
        if right
        else f"; {no_other}"
    )
    return f"wrong in {', '.join(counts)}{more}{ending}"


def _faults(
    comparison: Comparison, name: str, weights: Diagnosis | None, *, is_alone: bool
) -> Iterator[Diagnosis]:
    """Yield the faults that fit one parameter. An element that rounding may hide is no evidence.

    Args:
        comparison: the wrong gradient compared with the right one.
        name: of the parameter.
        weights: what the weights of its micro-batches say, if they say anything.
        is_alone: whether one element is wrong of all parameters.
    """
    expected, observed, allowed, off = part_of(comparison, name)
    seen = np.abs(observed) > allowed
    there = np.abs(expected) > allowed
    # a zero gradient is a projection, a permutation and a multiple of anything: it is asked about
    # first
    if not seen.any():
        why = "it was reset before the step, never computed, or set to 0 because of its values"
        nothing = Diagnosis("no-gradient", f"the gradient of {name} is 0: {why}")
        yield nothing if weights is None or weights.name == "no-gradient" else weights
        return
    # two parameters of one input have proportional gradients: the other one's is the closer reading
    # of a factor
    other = _other_parameter(comparison, name)
    if weights is not None and not (other and weights.name == "wrong-scale"):
        yield weights
    elif not other and (scale := _common_factor(expected, observed, allowed)) is not None:
        yield scale
    # one element has one order
    how = _permutation(expected, observed, allowed) if np.count_nonzero(there) > 1 else None
    if how is not None:
        yield Diagnosis(
            "misplaced-gradient",
            f"the gradient of {name} has the right elements at other places{how}",
        )
    if other:
        yield Diagnosis("misplaced-gradient", f"{name} has the gradient of {other}")
    if weights is not None:
        return
    # a partial fault leaves some element of the parameter right
    is_placed = how is None and not other and bool((there & ~off).any())
    if levels := levels_of(expected, observed):
        text = (
            f"all elements of the gradient of {name} are multiples of 1/{levels} of the largest:"
            " they are quantised"
        )
        yield Diagnosis("low-precision", text)
    elif is_placed and (not is_alone or _is_cut_or_scaled(expected, observed, allowed, off)):
        yield Diagnosis("partial-gradient", _partial_text(name, expected, observed, allowed, off))
    elif form := format_of(expected, observed):
        yield Diagnosis(
            "low-precision",
            f"the gradient of {name} has a relative error of"
            f" {relative_error(expected, observed):.1g}, and all its elements are exactly"
            f" representable in {form}",
        )


def _is_cut_or_scaled(
    expected: Array, observed: Array, allowed: Array, off: npt.NDArray[np.bool_]
) -> bool:
    """Whether a single wrong element is 0, or has a factor that is no coincidence."""
    seen = observed[off]
    due = expected[off]
    if within(seen, 0, allowed[off]):
        return True
    ratio = float(seen[0] / due[0]) if due[0] else math.inf
    return any(abs(ratio - factor) <= 1e-9 for factor in PLAIN_FACTORS)


PLAIN_FACTORS = (-1.0, 2.0, 3.0, 4.0, 1 / 2, 1 / 3, 1 / 4)
"""Factors of a single element that are no coincidence."""


def _common_factor(expected: Array, observed: Array, allowed: Array) -> Diagnosis | None:
    # the factor is read where rounding blurs it least: at the largest element for its bound
    pivot = np.unravel_index(
        np.argmax(np.abs(expected) / np.maximum(allowed, 1e-300)), expected.shape
    )
    if not expected[pivot]:
        return None
    factor = float(observed[pivot] / expected[pivot])
    if beyond(observed, factor * expected, (1 + abs(factor)) * allowed):
        return None
    if abs(observed[pivot] - expected[pivot]) <= 2 * (1 + abs(factor)) * allowed[pivot]:
        return None  # rounding may be all of it
    meaning, cause = constant_meaning(
        round(factor) if abs(factor - round(factor)) < 1e-9 else factor
    )
    # one number has a factor to any other: only a whole one, or one with a meaning, is no
    # coincidence
    single = np.count_nonzero(np.abs(expected) > allowed) < 2
    if single and not meaning and abs(factor - round(factor)) > 1e-9:
        return None
    text = f"every element is {factor_text(factor)} times what it should be"
    if meaning:
        return Diagnosis("wrong-scale", f"{text}: {meaning}", causes=(cause,))
    return Diagnosis("wrong-scale", text)


def _permutation(expected: Array, observed: Array, allowed: Array) -> str | None:
    tolerance = allowed.max()
    # equal elements may stand in any order
    if np.ptp(expected) <= 2 * tolerance:
        return None
    if beyond(np.sort(observed, axis=None), np.sort(expected, axis=None), tolerance):
        return None
    # as where a matrix is written row by row and read column by column
    turned = expected.T
    if (
        expected.ndim == 2
        and observed.shape == turned.shape
        and within(observed, turned, tolerance)
    ):
        return ": it is transposed"
    return ""


def _other_parameter(comparison: Comparison, name: str) -> str | None:
    _, observed, allowed, _ = (part.reshape(-1) for part in part_of(comparison, name))
    for other in comparison.layout.names:
        expected, _, others, _ = (part.reshape(-1) for part in part_of(comparison, other))
        if other == name or expected.shape != observed.shape:
            continue
        # both gradients have rounding of their own
        bound = allowed + others
        if within(observed, expected, bound) and beyond(expected, 0, bound):
            return other
    return None


def _partial_text(
    name: str, expected: Array, observed: Array, allowed: Array, off: npt.NDArray[np.bool_]
) -> str:
    where = f"at {[tuple(map(int, index)) for index in np.argwhere(off)[:3]]}"
    # the first axis that explains all wrong elements is named: axes are tried from the last one on,
    # and `where` keeps what was found last
    for axis in reversed(range(off.ndim if off.ndim > 1 else 0)):
        wrong, there = (
            np.moveaxis(mask, axis, 0).reshape(off.shape[axis], -1) for mask in (off, expected != 0)
        )
        rows = np.asarray(wrong.any(axis=1))
        # an element whose right gradient is 0 is never wrong, and does not break up a row
        if bool((wrong | ~there)[rows].all()):
            what = ("rows", "columns", f"places along dimension {axis}")[min(axis, 2)]
            where = f"in {what} {first_of(np.flatnonzero(rows).tolist())}"
    ratio = observed[off] / np.where(expected[off] == 0, np.nan, expected[off])
    what = "other values than they should be"
    if not np.any(np.abs(observed[off]) > allowed[off]):
        what = "0"
    else:
        factor = float(ratio.flat[0])
        # a factor near 1 is told from none by a thousandth of what it differs by
        if np.allclose(ratio, factor, rtol=min(1e-6, 1e-3 * abs(factor - 1))):
            what = f"{factor_text(factor)} times what they should be"
    more = ", ..." if np.count_nonzero(off) > 3 and where.startswith("at") else ""
    return (
        f"{np.count_nonzero(off)} of the {off.size} elements of {name} are wrong, {where}{more},"
        f" and are {what}; the others are right"
    )


def _scaled_by_agreement(parts: Array) -> Vector:
    """Return the sum times its square over the sum of squares, and 0 where all parts are 0."""
    squares = (parts**2).sum(axis=0)
    found: Vector = parts.sum(axis=0) ** 3 / np.where(squares, squares, 1.0)
    return found


def _chosen_parts(parts: Array, chosen: npt.NDArray[np.intp]) -> Vector:
    found: Vector = np.take_along_axis(parts, chosen[None], axis=0)[0]
    return found


COMBINATIONS: dict[str, Callable[[Array], Vector]] = {
    "the largest of those of the micro-batches": lambda parts: parts.max(axis=0),
    "the smallest of those of the micro-batches": lambda parts: parts.min(axis=0),
    "that of the micro-batch in which it is largest in absolute value": lambda parts: _chosen_parts(
        parts, np.abs(parts).argmax(axis=0)
    ),
    "that of the micro-batch in which it is smallest in absolute value": lambda parts: (
        _chosen_parts(parts, np.abs(parts).argmin(axis=0))
    ),
    "the median of those of the micro-batches": lambda parts: np.median(parts, axis=0),
    "the lower median of those of the micro-batches": lambda parts: np.sort(parts, axis=0)[
        (len(parts) - 1) // 2
    ],
    "the root of the sum of the squares of those of the micro-batches": lambda parts: np.sqrt(
        (parts**2).sum(axis=0)
    ),
    "the micro-batches' sum where their signs agree, and 0 elsewhere": lambda parts: np.where(
        np.abs(np.sign(parts).sum(axis=0)) == len(parts), parts.sum(axis=0), 0.0
    ),
    "the micro-batches' sum over the number of those in which it is not 0": lambda parts: (
        parts.sum(axis=0) / np.maximum(1, np.count_nonzero(parts, axis=0))
    ),
    "the micro-batches' sum times its square over the sum of their squares": _scaled_by_agreement,
}
"""What an element may be in place of the micro-batches' sum, from (micro-batches, P) their parts of the gradient."""


def combined_elements(window: WindowReference, comparison: Comparison) -> Diagnosis | None:
    """Return the diagnosis of elements that are another function of the micro-batches' than their
    sum, or None.

    On the weight probe every element is in one micro-batch alone, so a maximum over micro-batches
    looks right there, and a median or an agreement of signs looks like a missing gradient.

    Args:
        window: the window whose gradient is wrong.
        comparison: that gradient compared with the right one.
    """
    instance = window.reference.instance
    count = len(window.members)
    if (
        # one micro-batch is its own maximum, median and sum
        count < 2
        or window.moved
        or instance.case.dtype != "float64"
        or instance.problem.reduction == "batch"
    ):
        return None
    parts = np.stack(window.float64_bound.contributions)
    if not np.isfinite(parts).all() or not np.isfinite(comparison.observed).all():
        return None
    # parts of which rounding decides the sign are no evidence
    noise = 64 * np.finfo(np.float64).eps * np.abs(parts).max(axis=0)
    parts = np.where(np.abs(parts) <= noise, 0.0, parts)
    allowed = 8 * (comparison.allowed + count * noise)
    total = parts.sum(axis=0)
    for text, combine in COMBINATIONS.items():
        found = combine(parts)
        # the median of two is their mean, as is a sum over the number of parts that are not 0 where
        # none is: of these, the weights tell
        if within(found, total, allowed) or within(found * count, total, allowed):
            continue
        # a loop may scale the combination as it would have scaled the sum
        for factor, times in (
            (1.0, ""),
            (count, f", times their number, {count}"),
            (1 / count, ", over their number"),
        ):
            if found.any() and within(factor * found, comparison.observed, allowed):
                return Diagnosis("not-summed", f"each element of the gradient is {text}{times}")
    return None


OPERATIONS = (
    ("MAX", "the largest", lambda rows: rows.max(axis=0)),
    ("MIN", "the smallest", lambda rows: rows.min(axis=0)),
    ("PRODUCT", "the product", lambda rows: rows.prod(axis=0)),
)


def wrong_reduction(
    window: WindowReference, comparison: Comparison, rank: int, *, alike: bool
) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is another combination of the ranks' own, or None.

    The gradient of a single rank does not qualify: it must contain elements of another rank.

    Args:
        window: the window whose gradient is wrong.
        comparison: that gradient compared with the right one.
        rank: the rank that has this gradient.
        alike: whether all ranks have it.
    """
    owners = window.reference.instance.case.plan.owners
    gradients = np.stack(window.contributions(summed=True)) / window.divisor
    if not np.isfinite(gradients).all() or not np.isfinite(comparison.observed).all():
        return None
    ranks = np.array([owners[j] for j in window.members])
    # a rank without a micro-batch in this window has a gradient of zeros
    of_ranks = [gradients[ranks == each].sum(axis=0) for each in range(max(owners) + 1)]
    own = np.stack(of_ranks)
    allowed = 4 * comparison.allowed

    def is_seen(candidate: Vector) -> bool:
        return within(candidate, comparison.observed, allowed)

    if any(map(is_seen, own)):
        return None
    # an all-reduce leaves the same on every rank, whatever its operation
    operations = OPERATIONS if alike else ()
    for name, what, combined in operations:
        if is_seen(combined(own)):
            return Diagnosis(
                "not-summed",
                f"each element is {what} of those of the ranks' own gradients, not their sum: the"
                f" all-reduce is called with ReduceOp.{name}",
            )
    others = own.sum(axis=0) - own[rank]
    # its own elements stay where they are: only what arrived may be elsewhere
    received = comparison.observed - own[rank]
    moved = within(np.sort(received), np.sort(others), allowed.max())
    if not alike and moved and beyond(others, 0, allowed):
        return Diagnosis(
            "misplaced-gradient",
            "the other ranks' elements are added to other elements of this one: ranks lay out their"
            " gradients, or call their all-reduces, in different orders, or leave out parameters"
            " without a gradient",
        )
    return None


def with_second_names(
    found: Diagnosis | None, window: WindowReference, comparison: Comparison, wrong: Sequence[str]
) -> Diagnosis | None:
    """Return a diagnosis that says so where parameters under several names are wrong, and they
    alone.

    Args:
        found: the diagnosis, if there is one.
        window: the window whose gradient is wrong.
        comparison: that gradient compared with the right one.
        wrong: names of the wrong parameters.
    """
    names: dict[int, list[str]] = {}
    for name, p in window.model().named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    several = [own for own in names.values() if len(own) > 1]
    if not wrong or any(not any(name in own for own in several) for name in wrong):
        return found
    own = next(own for own in several if wrong[0] in own)
    if lost := _lost_use(window, comparison, [own for own in several if own[0] in wrong]):
        text = (
            f"{' and '.join(own)} are one parameter, and its use as {lost} is not in the gradient"
        )
        untying = Diagnosis("partial-gradient", text)
        # where the other use has a gradient of 0, all is missing
        return (
            any_of([found, untying])
            if found is not None and found.name == "no-gradient"
            else untying
        )
    if found is None:
        return None
    text = (
        f"; {' and '.join(own)} are one parameter: what is done once per name is done {len(own)}"
        " times to it, as where a loop goes over named_parameters(remove_duplicate=False) or a"
        " list of names"
    )
    return replace(found, sentence=found.sentence + text)


def untied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in which every name has a parameter of its own."""
    # the deep copy keeps ties, since it copies each object once: they are undone below
    model = copy.deepcopy(model)
    seen: set[int] = set()
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        # a whole module under two names, then single parameters of different modules
        if id(module) in seen:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, copy.deepcopy(module))
        seen.add(id(module))
    for name, p in [*model.named_parameters(remove_duplicate=False)]:
        if id(p) in seen:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, torch.nn.Parameter(p.detach().clone()))
        seen.add(id(p))
    return model


def _found_in(rows: Sequence[Mapping[str, torch.Tensor | None]], name: str) -> list[Array]:
    """Return the gradients of a parameter in the rows that have one."""
    found = [row.get(name) for row in rows]
    return [gradient.numpy() for gradient in found if gradient is not None]


def _lost_use(
    window: WindowReference, comparison: Comparison, tied: Sequence[Sequence[str]]
) -> str | None:
    """Return the name as which parameters are used without a share in their gradients, or None."""
    instance = window.reference.instance
    model = untied(window.model())
    items = [instance.case.plan.items(j) for j in window.members]
    rows = [gradients_of(instance, model, part, summed=True, dtype=torch.float64) for part in items]
    lost: set[int] = set()
    for own in tied:
        _, observed, allowed, _ = part_of(comparison, own[0])
        found = [_found_in(rows, name) for name in own]
        uses = [np.sum(parts, axis=0) / window.divisor for parts in found if parts]
        # of three uses, any one or two may be missing: the sum does not tell which without trying
        # all
        if len(uses) != 2:
            continue
        kept = [i for i, use in enumerate(uses) if within(use, observed, 8 * allowed)]
        if len(kept) != 1:
            return None
        lost.add(1 - kept[0])
    return tied[0][lost.pop()] if len(lost) == 1 else None
