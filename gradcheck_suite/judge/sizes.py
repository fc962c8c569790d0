"""From gradients of several sizes to the name of the fault: one list of predicates, the surest
first.

A gradient grows with its loss. Where one does not, a threshold, a normalization, a narrow dtype or
a term that is added shows by what becomes of it with a smaller or a larger loss. Must not run a
loop: what further runs give is evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcheck_suite.core.case import SMALL_SCALE
from gradcheck_suite.core.comparison import Vector, other_infinity, within
from gradcheck_suite.judge.elements import format_of, relative_error
from gradcheck_suite.judge.weights import Diagnosis, not_linear

EXACT = 1e-9
"""Share of the largest element up to which two gradients are taken for equal."""
COARSE = 1e-2
"""The same on a probe, whose dtype may be coarse: the sizes of its gradients are powers of two."""
SECOND_ORDER = 1e-3
"""Share of an error 2**-20 times as large that rounding of the gradient itself may change."""
LOUDER = 4.0
"""Factor of a large gradient that shows whether the observed one stays where it is."""
NOT_OF_THE_LOSS = (
    "and does not shrink with the loss: a term that is not the loss's is added, such as decay, a"
    " pull towards other parameters, noise, or the rounding error of a larger number"
)


@dataclass(frozen=True)
class Sizes:
    """What is known of a gradient at several sizes of its loss.

    Attributes:
        expected: (P,): the right gradient, finite.
        observed: (P,): the loop's.
        small: (P,): the loop's with a loss 2**-20 times as large; None where no run showed it, as
            on the probe of many sizes. There a gradient of about 1 is right.
        louder: returns the loop's with a loss `LOUDER` times as large, from a run if one is left,
            else None.
        parameters: (P,): the parameters' values; None where they are not known.
        tolerance: relative error of the gradients that rounding explains.
        dtype: the gradient's dtype.
    """

    expected: Vector
    observed: Vector
    small: Vector | None = None
    louder: Callable[[], Vector | None] = lambda: None
    parameters: Vector | None = None
    tolerance: float = EXACT
    dtype: str = "float64"

    @property
    def exact(self) -> float:
        """The relative error of all these gradients."""
        return COARSE if self.small is None else max(self.tolerance, EXACT)

    @property
    def off(self) -> npt.NDArray[np.bool_]:
        """(P,): which elements are wrong, on a probe relative to themselves.

        All where so few are off.
        """
        # on the probe every element is a weight of its own, and is compared with itself
        least = 0.0 if self.small is None else self.exact * np.abs(self.expected).max()
        wrong = ~np.isclose(self.observed, self.expected, rtol=self.exact, atol=least)
        # where no element is off by that much, the whole gradient is what is wrong
        return wrong if wrong.any() else np.full(len(wrong), True)

    @property
    def large_alone(self) -> bool:
        """Whether large gradients alone are wrong."""
        if self.small is None:
            return bool(np.abs(self.expected).max() > 1)
        return are_close(self.small / SMALL_SCALE, self.expected, self.exact)

    @property
    def small_alone(self) -> bool:
        """Whether small gradients alone are known to be wrong."""
        return self.small is None and bool(np.abs(self.expected).max() < 1)


def are_close(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], tolerance: float = EXACT
) -> bool:
    """Return whether two gradients are equal, up to a share of the second one's largest element."""
    largest = np.abs(b).max(initial=0.0)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest))


def is_linear(observed: Vector, with_small_loss: Vector, tolerance: float = EXACT) -> bool:
    """Return whether the gradient with the small loss is the gradient, as much smaller as the loss."""
    return are_close(with_small_loss / SMALL_SCALE, observed, max(tolerance, EXACT))


def size_text(elements: Vector) -> str:
    """Return the sizes of some elements, from the smallest to the largest.

    A single element has its sign.
    """
    low, high = (f"{size:.3g}" for size in (np.abs(elements).min(), np.abs(elements).max()))
    return (
        f"{elements[0]:.3g}" if len(elements) == 1 else high if low == high else f"{low} to {high}"
    )


# The predicates: each returns what the loop did, or None.


def _not_finite(s: Sizes) -> str | None:
    if np.isfinite(s.observed).all():
        return None
    return f"a gradient of {size_text(s.expected)} becomes infinite or NaN in this loop"


def _narrower(s: Sizes) -> str | None:
    # float16 loses what is below 2**-24, so that a smaller loss does not give a smaller gradient
    if s.small is not None and (form := format_of(s.expected, s.observed)):
        error = f"the gradient has a relative error of {relative_error(s.expected, s.observed):.1g}"
        return f"{error}, and all its elements are exactly representable in {form}"
    sentence = _not_finite(s)
    # a coarser dtype overflows by itself
    if sentence is None or s.dtype != "float64":
        return None
    # the probe's gradients, squared and cubed, stay within float64: what overflows is a narrower
    # dtype
    why = "it passes through a narrower dtype, such as float32 or float16"
    return f"{sentence}, and float64 holds its square and its cube: {why}"


def _of_second_order(s: Sizes) -> str | None:
    extra = s.observed - s.expected
    if s.small is None or not extra.any():
        return None
    # a term in the square of the loss shrinks by one more factor of 2**-20 than the gradient
    if not are_close(s.small / SMALL_SCALE - s.expected, SMALL_SCALE * extra, SECOND_ORDER):
        return None
    return (
        "a term that grows with the square of the loss is added to the gradient (up to"
        f" {np.abs(extra).max():.3g}): a penalty on gradients that is no part of the objective, or"
        " a loss times itself"
    )


def _too_large(s: Sizes) -> str | None:
    if (
        s.small is None
        or not s.large_alone
        or np.linalg.norm(s.observed) <= np.linalg.norm(s.expected)
    ):
        return None
    return (
        "large gradients alone are wrong, and too large: with a loss 2**-20 times as large the"
        " gradient is right, so something depends on the gradient's size"
    )


def _lost(s: Sizes) -> str | None:
    lost = (s.observed == 0) & (s.expected != 0)
    if not lost.any():
        return None
    which = (
        f"{np.count_nonzero(lost)} of {len(lost)} elements are 0, where"
        f" {size_text(s.expected[lost])} is right"
    )
    if (s.large_alone or s.small_alone) and not s.observed[s.off].any():
        known = (
            "gradients of about 1" if s.small is None else "with a loss 2**-20 times as large they"
        )
        why = (
            "a loss or a gradient above some size is left out, or large gradients are set to 0, or"
            " some by chance"
        )
        if s.small_alone:
            why = "small values are set to zero, or they are lost in a coarser dtype"
        return f"{which}, and {known} are right: {why}"
    rest = ~lost
    if (
        s.small is not None
        and are_close(s.observed[rest], s.expected[rest], s.exact)
        and not s.small[lost].any()
    ):
        return (
            f"small elements are 0: {which}, and with a loss 2**-20 times as large more of them are"
        )
    return None


def _cut(s: Sizes) -> str | None:
    if not s.large_alone or not (s.small is not None or _stays(s)):
        return None
    why = (
        "" if s.small is None else ", since with a loss 2**-20 times as large the gradient is right"
    )
    return f"large gradients alone are wrong{why}: {_threshold(s)}"


def _stays(s: Sizes) -> bool:
    """Whether what is wrong of a gradient, and too small, is the same with a larger loss."""
    # clipping makes nothing larger; 1% is for a limit that is computed with an epsilon, as torch's
    # `clip_grad_norm_` does
    is_small = within(s.observed, 0, 1.01 * np.abs(s.expected))
    if not is_small or not s.observed.any():
        return False
    cut = ~np.isclose(s.observed, s.expected, rtol=s.exact)
    # asked for last: it may cost a run of the loop
    louder = s.louder()
    close = max(1e-5, s.tolerance)
    return (
        louder is not None
        and bool(cut.any())
        and np.allclose(louder[cut], s.observed[cut], rtol=close, atol=0)
    )


def _threshold(s: Sizes) -> str:
    pivot = int(np.argmax(np.abs(s.expected)))
    factor = s.observed[pivot] / s.expected[pivot]
    if are_close(s.observed, factor * s.expected, s.exact):
        how = "by norm or by value" if _is_one_size(s.observed[s.observed != 0]) else "by norm"
        return (
            f"the whole gradient, of norm {np.linalg.norm(s.expected):.4g}, is {factor:.3g} times"
            f" the right one, and {_norm(s.observed)}, as after clipping {how}"
        )
    sizes = np.abs(s.observed[s.off])
    is_cut = (np.abs(s.expected[s.off]) > sizes).all()
    if is_cut and _is_one_size(sizes):
        number = np.count_nonzero(s.off)
        return (
            f"{number} of {len(s.off)} elements are cut at {sizes[0]:.3g}, as after clipping by"
            " value"
        )
    return (
        "each contribution or parameter is clipped separately, or the sum is clipped before it is"
        " complete"
    )


def _is_one_size(values: Vector) -> bool:
    return are_close(np.abs(values), np.full_like(values, abs(values[0])))


def _norm(gradient: Vector) -> str:
    return f"its norm is {np.linalg.norm(gradient):.4g}"


def _is_of_any_size(s: Sizes) -> bool:
    return s.small is not None and are_close(s.small, s.observed, s.exact)


def _reaches_further(s: Sizes) -> bool:
    """Whether elements that the window does not reach are as large as others."""
    # no item of the window has a gradient there
    further = np.abs(s.observed[s.expected == 0])
    largest = np.abs(s.observed).max()
    return bool(further.size) and bool(further.max() > s.exact * largest)


def _keeps_signs(s: Sizes) -> bool:
    """Whether a gradient has the signs of the right one; a single element is -1 or 1 as well."""
    there = (s.observed != 0) & (s.expected != 0)
    same = np.sign(s.observed[there]) == np.sign(s.expected[there])
    if not same.all():
        return False
    # divided by its own size, a single element is 1 or -1, and so tells nothing but that
    alone = np.count_nonzero(s.expected) == 1
    return not alone or bool(np.isclose(np.abs(s.observed).max(), 1.0, rtol=s.exact))


def _not_of_the_batch(s: Sizes) -> str | None:
    if not _is_of_any_size(s) or not _reaches_further(s):
        return None
    number = np.count_nonzero(s.observed[s.expected == 0])
    return (
        "a loss 2**-20 times as large gives the same gradient, and"
        f" {number} of its elements are not 0 though no item of the window reaches them: it is not"
        " computed from the window's batch"
    )


def _normalised(s: Sizes) -> str | None:
    if not _is_of_any_size(s) or _reaches_further(s) or not _keeps_signs(s):
        return None
    there = s.observed != 0
    what = _norm(s.observed)
    if np.count_nonzero(there) > 1 and _is_one_size(s.observed[there]):
        # where all right elements have one size, a division by it leaves signs, too
        only_signs = "" if _is_one_size(s.expected[there]) else ": only signs are left"
        size = np.abs(s.observed).max()
        what = f"every element is {size:.3g}, 0 or -{size:.3g}{only_signs}"
    return (
        "a loss 2**-20 times as large gives the same gradient, so it is divided by its own size or"
        f" reduced to its signs ({what})"
    )


def _added(s: Sizes) -> str | None:
    extra = s.observed - s.expected
    if (
        s.small is None
        or not extra.any()
        or not are_close(extra, s.small - SMALL_SCALE * s.expected, s.exact)
    ):
        return None
    if s.parameters is not None and s.parameters.any():
        noise = EXACT * np.abs(extra).max()
        there = (np.abs(extra) > noise) & (s.parameters != 0)
        # the median, since an element of the parameter near 0 has a quotient of rounding alone
        factor = float(np.median(extra[there] / s.parameters[there])) if there.any() else 0.0
        # one element is a multiple of any other: it shows decay by a round factor alone
        telling = np.count_nonzero(there) > 1 or np.isclose(
            factor, float(f"{factor:.2g}"), rtol=1e-6, atol=0
        )
        is_multiple = are_close(extra[there], factor * s.parameters[there])
        decays = is_multiple and within(extra[~there], 0, noise)
        if there.any() and telling and decays:
            return (
                f"{factor:.3g} times the parameter is added to the gradient, whatever the loss:"
                " weight decay or the gradient of a penalty"
            )
    return (
        "a term that does not depend on the loss is added to the gradient (up to"
        f" {np.abs(extra).max():.3g}): noise, a penalty that is no part of the objective, or what"
        " was in the sum before"
    )


def _beside_small(s: Sizes) -> str | None:
    if not s.small_alone:
        return None
    if np.isclose(s.observed, s.expected, rtol=COARSE, atol=0).all():
        off = np.abs(s.observed - s.expected).max()
        return f"an error of {off:.2g} is small beside weights of about 1, {NOT_OF_THE_LOSS}"
    larger = np.abs(s.observed[s.off] / s.expected[s.off])
    # a common factor is a fault of the weights, and no term that is added
    if (larger > 1).all() and np.ptp(larger) > COARSE * larger.max():
        right = size_text(s.expected[s.off])
        seen = size_text(s.observed[s.off])
        return f"a gradient of {right} comes out as one of {seen}, {NOT_OF_THE_LOSS}"
    return None


PREDICATES: tuple[tuple[str, Callable[[Sizes], str | None]], ...] = (
    # a narrow format also overflows, loses small elements and cuts large ones: it comes first
    ("low-precision", _narrower),
    ("overflow", _not_finite),
    ("added-term", _of_second_order),
    ("not-linear", _too_large),
    ("skipped-by-size", _lost),
    ("clipped", _cut),
    # a gradient that is clipped has a limit of its own, below which it is right; one that is
    # normalised has none
    ("normalised", _normalised),
    ("not-linear", _not_of_the_batch),
    ("added-term", _added),
    ("added-term", _beside_small),
)
"""Name and predicate: the first that holds is the fault. A row tells it from those that follow."""


def diagnose_sizes(sizes: Sizes) -> Diagnosis | None:
    """Name a fault that depends on the gradient's size, or None."""
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, holds in PREDICATES:
            sentence = holds(sizes)
            if sentence:
                return Diagnosis(name, sentence)
        return None


# A window whose right gradient is infinite or NaN in some elements.


NOT_IN_GRADIENT = Diagnosis(
    "skipped-non-finite",
    "a micro-batch whose gradient is infinite or NaN in an element is not in the window's gradient,"
    " or the whole gradient was set to zero or None: losses or gradients that are not finite are"
    " skipped, and the step hides it",
)


def diagnose_non_finite(right: Vector, seen: Vector, beside: list[int]) -> Diagnosis:
    """Name the fault of a window whose right gradient is infinite or NaN in some elements.

    Args:
        right: (P,): the right gradient.
        seen: (P,): the loop's.
        beside: finite elements of micro-batches that have others which are not.
    """
    poisoned = ~np.isfinite(right)
    what = "NaN" if np.isnan(right[poisoned]).any() else "infinite"
    # finite elements of the same micro-batch tell whether it was left out as a whole
    if not seen[poisoned].any() and not (beside and seen[beside].any()):
        return NOT_IN_GRADIENT
    # limit / infinity is 0, and 0 times infinity is NaN
    if np.isnan(seen[poisoned]).all() and not np.nan_to_num(seen[~poisoned]).any():
        return Diagnosis(
            "clipped",
            f"beside an element of the gradient that is {what}, other elements come out wrong, as"
            " where the gradient is multiplied by a limit over its norm: clipping by norm with a"
            " finite limit sets them to 0",
        )
    values = ", ".join(f"{value:.6g}" for value in seen[poisoned & np.isfinite(seen)])
    if not values and (other := other_infinity(seen, right)).any():
        return not_linear(
            f"an element of the gradient that is {right[other][0]} comes out as {seen[other][0]}"
        )
    if not values:
        return not_linear(
            f"an element of the gradient that is {what} stays so, and others of the same window,"
            " which are finite, come out wrong: something depends on the loss's value or on the"
            " largest element (a comparison, a threshold, a norm)"
        )
    return Diagnosis(
        "skipped-non-finite",
        f"an element of the gradient that is {what} comes out as {values}: something replaces"
        " values that are not finite, such as nan_to_num or a clamp, and hides that the run"
        " diverged",
    )
