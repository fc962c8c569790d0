"""The comparison of gradients element by element, and how much rounding allows.

Imports numpy and scipy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
WEIGHT_TOLERANCE = 1e-9
"""Relative tolerance of an item's weight, where it is not known better: read in float64, which rounds at 1e-16."""
LIVE_WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance of an item's weight in a live run: counts and quotients are often computed in float32."""
LOSS_TOLERANCE = 1e-5
"""Relative tolerance of sums of losses, and of weights that losses tell: a model that runs in float64 may have float32
parts, which round at 1e-7."""


@dataclass(frozen=True)
class Layout:
    """The place of each parameter's elements in a flat vector of all parameters.

    Attributes:
        names: the parameters' names, in the order of the vector.
        shapes: the parameters' shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [int(np.prod(shape, dtype=int)) for shape in self.shapes]

    @property
    def offsets(self) -> list[int]:
        """Index of each parameter's first element."""
        return [0, *np.cumsum(self.sizes)[:-1].tolist()]

    def place(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Return the parameter and the index within it of a flat index."""
        which = int(np.searchsorted(self.offsets, index, side="right")) - 1
        where = np.unravel_index(index - self.offsets[which], self.shapes[which])
        return self.names[which], tuple(int(i) for i in where)

    def elements(self, name: str) -> slice:
        """Return the slice of one parameter's elements."""
        which = self.names.index(name)
        return slice(self.offsets[which], self.offsets[which] + self.sizes[which])

    def part(self, vector: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        """Return one parameter's elements, in its shape."""
        return vector[self.elements(name)].reshape(self.shapes[self.names.index(name)])

    def spread(self, vector: Vector) -> Vector:
        """Return, at every element, the largest value among the elements of the same parameter."""
        if not len(vector):
            return vector
        offsets = [o for o, size in zip(self.offsets, self.sizes, strict=True) if size]
        return np.repeat(np.maximum.reduceat(vector, offsets), [s for s in self.sizes if s])


@dataclass(frozen=True)
class Difference:
    """The worst difference between two vectors.

    Attributes:
        index: flat index of the element with the largest error over allowed.
        error: |observed - expected| there; infinite where exactly one of them is NaN.
        allowed: the bound there.
        count: number of elements whose error exceeds the bound.
    """

    index: int
    error: float
    allowed: float
    count: int

    @property
    def ratio(self) -> float:
        """Error over allowed; above 1 is a difference that rounding does not explain."""
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else float("inf")


def elementwise_error(observed: Any, expected: Any) -> Any:
    """Return |observed - expected|: 0 for equal infinities and for two NaN, infinite where one
    alone is NaN.

    Args:
        observed: an array of numpy or a tensor of torch, floating.
        expected: an array or tensor of the same kind and shape.
    """
    error = abs(observed - expected)
    error[error != error] = float("inf")  # only NaN differs from itself
    error[observed == expected] = 0.0
    error[(observed != observed) & (expected != expected)] = 0.0
    return error


def worst_difference(observed: Vector, expected: Vector, allowed: Vector) -> Difference:
    """Compare two vectors. Equal infinities, and two NaN at the same place, have an error of 0.

    Args:
        observed: (P,).
        expected: (P,).
        allowed: (P,), at least 0: the bound of each element.
    """
    if not len(observed):
        return Difference(
            0,
            0.0,
            0.0,
            0,
        )
    with np.errstate(invalid="ignore"):
        error = elementwise_error(observed, expected)
    with np.errstate(divide="ignore"):
        ratio = np.divide(
            error,
            allowed,
            out=np.zeros_like(error),
            where=error > 0,
        )
    index = int(np.argmax(ratio))
    return Difference(
        index, float(error[index]), float(allowed[index]), int(np.count_nonzero(error > allowed))
    )


@dataclass(frozen=True, eq=False)
class Comparison:
    """An observed gradient, the expected one and the bound: the evidence for a verdict.

    Attributes:
        layout: the layout of the three vectors.
        expected: (P,) float64: the reference gradient, parameters flattened in layout order.
        observed: (P,) float64: the loop's gradient, zeros where it is None.
        allowed: (P,) float64: the bound on |observed - expected| that was applied.
        missing: names of the parameters whose observed gradient is None.
    """

    layout: Layout
    expected: Vector
    observed: Vector
    allowed: Vector
    missing: frozenset[str] = frozenset()

    @cached_property
    def worst(self) -> Difference:
        """The difference at the element with the largest error over allowed."""
        return worst_difference(self.observed, self.expected, self.allowed)

    @property
    def ratio(self) -> float:
        """The largest error over allowed.

        Above 1 is a difference that rounding does not explain.
        """
        return self.worst.ratio

    def seen(self, name: str) -> npt.NDArray[np.float64] | None:
        """Return a parameter's observed gradient in its shape, or None where it is None."""
        return None if name in self.missing else self.layout.part(self.observed, name)


# Bounds on the rounding error of a gradient, element by element.
#
# A window's gradient is a sum of K contributions c_j, one per micro-batch, computed and added up in
# some precision with unit roundoff u. The result of a correct loop differs from the float64
# gradient by at most
#
#     |acc - g64| <= growth(K + 4, u) * sum_j |c_j| + student_factor(D) * noise + underflow
#
# Adding contributions in any order multiplies each by K - 1 factors (1 + d), |d| <= u, and a few
# more (`FURTHER_ROUNDINGS`); `growth` bounds their product. `noise` is the size of the rounding
# errors of the forward and the backward pass, measured by D Monte Carlo draws. `underflow` is the
# spacing of the smallest numbers, whose rounding relative errors do not bound. All of it comes from
# float64 computations: a gradient that torch computes in a lower precision says nothing about what
# is allowed.
#
# In float64 the bound is the same, with `summation_bound` in place of `growth`, which also covers
# the items of a micro-batch. In every precision there is a resolution below which differences are
# not measured: `quick_bound` and `coarse_bound`.
#
# Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and
# 4.2; N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J.
# Sci. Comput. 41 (2019), theorem 2.4; D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997),
# for Monte Carlo rounding errors.


UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Name of a dtype -> the largest relative error of rounding to it."""
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
"""Name of a dtype -> its smallest positive number."""


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch, such as `bfloat16`: that of numpy's and JAX's."""
    return str(dtype).removeprefix("torch.")


FALSE_ALARM = 1e-9
"""The probability that one element of a correct gradient exceeds a probabilistic bound. A campaign of 100,000 checks
compares about 1e7 elements: 0.01 false alarms are expected, and none where the deterministic part suffices."""

DRAWS = 32
"""Number of Monte Carlo draws. `student_factor` is 12.6 for 16 draws, 8.5 for 32, 7.2 for 64 and 6.1 for infinitely
many: from 16 to 32 the bound falls by a third and the time doubles."""

FEW_DRAWS = 4
"""Draws that are made first. What exceeds their bound, with a factor of 278, is wrong, and an error within
`likely_bound` needs no more of them."""

MANY_DRAWS = 4 * DRAWS
"""Draws that are made before a loop is blamed, where the model is small. A jump of the gradient at a kink is seen in
all of them if rounding causes it once in 15 times."""

RARE_DRAWS = 8 * MANY_DRAWS
"""Draws that are made before torch's computation in a lower precision is blamed. The backward of a normalization over
two features is a spike where rounding makes them equal: one draw in 150 showed it, by a gradient 1e5 times as large."""

FURTHER_ROUNDINGS = 5
"""Roundings of a contribution apart from the K - 1 additions: the quotient of counts, the product with the loss, the
cast to the dtype of the backward pass, the stored contribution, and a division or a cast of the sum at the end."""

QUICK = 256.0
"""Resolution in float64, in unit roundoffs of the window's largest entry: smaller differences are ignored. It causes no
false alarm, since the rounding error of larger differences is measured. It is 2**-45 or 3e-14 of the largest entry.
Faults start at 1e-6 (one item in a million), and the rounding errors of a sum of a hundred items stay below, so that
few windows need the measurement."""


def growth(factors: int, dtype: str) -> float:
    """Return g such that a product of `factors` terms (1 + d), |d| <= u, lies within 1 +- g.

    The deterministic bound is (1 + u)**n - 1. For float64 and float32 the probabilistic bound of
    Higham and Mary holds as well, exp(l * sqrt(n) * u + n * u**2 / (1 - u)) - 1. Its probability of
    failure is 2 * exp(-(l * (1 - u))**2 / 2), so l = 6.54 for `FALSE_ALARM`, and it is the smaller
    one from 43 factors on. It assumes independent errors of mean zero. A bfloat16 or float16 sum
    stagnates (256 + 1 = 256, repeatedly): its errors have one sign, and only the deterministic
    bound holds.
    """
    unit = UNIT_ROUNDOFF[dtype]
    sure = math.expm1(factors * math.log1p(unit))
    if dtype not in ("float64", "float32"):
        return sure
    spread = math.sqrt(2 * math.log(2 / FALSE_ALARM)) / (1 - unit)
    return min(
        sure, math.expm1(spread * math.sqrt(factors) * unit + factors * unit**2 / (1 - unit))
    )


def student_factor(draws: int = DRAWS) -> float:
    """Return f such that a further draw exceeds f times the root mean square of `draws` others with
    `FALSE_ALARM`.

    An element's error is a sum of many small independent roundings, so approximately normal with
    unknown variance. The ratio of a normal variable to the root mean square of D others has
    Student's distribution with D degrees of freedom.
    """
    # its import takes a third of a second, and most gradients need no such bound
    from scipy.special import stdtrit

    return -float(stdtrit(draws, FALSE_ALARM / 2))


def within(one: Any, other: Any, allowed: Any) -> bool:
    """Return whether every element is as near to its counterpart as is allowed; NaN never is."""
    return bool((np.abs(one - other) <= allowed).all())


def beyond(one: Any, other: Any, allowed: Any) -> bool:
    """Return whether an element is further from its counterpart than is allowed; NaN never is."""
    return bool((np.abs(one - other) > allowed).any())


def finite_or_right(observed: Vector, expected: Vector) -> Vector:
    """Return an observed gradient in which what may be NaN is as expected, (P,).

    Where one element is rightly infinite or NaN, all may be NaN: `clip_grad_norm_(parameters,
    inf)`, which trainers call to log the norm, multiplies by infinity over infinity, and the
    optimizer's step diverges anyway. An infinity is held to the right value: in whatever order,
    infinity plus what else there is stays that infinity or becomes NaN.
    """
    return (
        observed
        if np.isfinite(expected).all()
        else np.where(np.isnan(observed), expected, observed)
    )


def other_infinity(observed: Vector, expected: Vector) -> npt.NDArray[np.bool_]:
    """Return where a gradient is infinite in place of NaN or of the other infinity, (P,)."""
    found: npt.NDArray[np.bool_] = (
        np.isinf(observed) & ~np.isfinite(expected) & (observed != expected)
    )
    return found


def quick_bound(expected: Vector, terms: int) -> Vector:
    """Return the float64 bound that needs no measurement: the resolution and the additions of the
    micro-batches, (P,).

    Args:
        expected: (P,), the window's gradient.
        terms: number of micro-batches.
    """
    finite = np.abs(expected[np.isfinite(expected)])
    largest = float(finite.max(initial=0.0))
    return np.full(expected.shape, (QUICK + terms) * UNIT_ROUNDOFF["float64"] * largest)


def summation_bound(sizes: Vector, items: int, layout: Layout) -> Vector:
    """Return a bound on the difference of two float64 sums of the same items' parts, in any order
    and grouping, (P,).

    Each sum is within `growth` of the exact one. If the parts cancel, the error does not depend on
    the size of the gradient, which may be exactly 0, but on the sizes of the parts.

    Args:
        sizes: (P,), the sum over items of the absolute values of their parts.
        items: number of items.
        layout: layout of the vector; all elements of a parameter get the bound of its largest one.
    """
    return 2 * growth(items - 1 + FURTHER_ROUNDINGS, "float64") * layout.spread(_finite(sizes))


def likely_bound(mean_square: Vector) -> Vector:
    """Return the bound on a further draw where the mean square is the variance, not an estimate of
    it, (P,).

    Args:
        mean_square: (P,), the mean over any number of draws of the squared deviations.
    """
    from scipy.special import ndtri  # an import that takes a third of a second

    return -float(ndtri(FALSE_ALARM / 2)) * np.sqrt(_finite(mean_square))


def noise_bound(mean_square: Vector, draws: int = DRAWS) -> Vector:
    """Return a bound on the deviation of a further draw, (P,).

    Args:
        mean_square: (P,), the mean over draws of the squared deviations.
        draws: number of draws.
    """
    return student_factor(draws) * np.sqrt(_finite(mean_square))


def accumulation_bound(
    sizes: Vector, terms: int, dtype: str, *, smallest: float | None = None
) -> Vector:
    """Return a bound on the rounding error of scaling contributions and adding them in `dtype`, in
    any order, (P,).

    Args:
        sizes: (P,), the sum over micro-batches of the absolute values of their contributions.
        terms: number of micro-batches.
        dtype: the coarsest dtype in which contributions are computed or added up.
        smallest: the largest spacing of smallest numbers where several dtypes take part; None for
            that of `dtype`.
    """
    roundings = terms - 1 + FURTHER_ROUNDINGS
    underflow = roundings * (SMALLEST[dtype] if smallest is None else smallest)
    return growth(roundings, dtype) * _finite(sizes) + underflow


def coarse_bound(
    sizes: Vector, terms: int, dtype: str, layout: Layout, *, smallest: float | None = None
) -> Vector:
    """Return the bound in a lower precision that needs no draws, (P,): smaller differences are not
    looked at.

    It is `accumulation_bound` of the largest element of each parameter.

    Args:
        sizes: (P,), the sum over micro-batches of the absolute values of their contributions.
        terms: number of micro-batches.
        dtype: the coarsest dtype in which contributions are computed or added up.
        layout: layout of the vector.
        smallest: as for `accumulation_bound`.
    """
    return accumulation_bound(
        layout.spread(_finite(sizes)),
        terms,
        dtype,
        smallest=smallest,
    )


def _finite(vector: Vector) -> Vector:
    return np.where(np.isfinite(vector), vector, 0.0)
