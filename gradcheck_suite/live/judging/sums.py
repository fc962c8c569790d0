"""Which backward passes are in `.grad` at a step, and how often: read off the sketches.

The gradient of a step must be the sum of what arrived in the window's backward passes, up to one common factor. Where
it is not, the coefficients of the passes name the fault, as in `diagnosis.weight_patterns.weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradcheck_suite.live.recording.sketches import PROJECTIONS

Array = npt.NDArray[np.float64]
BY_CHANCE = 1e-6
"""Probability at most that coefficients fit which mean nothing: each equation beyond their number fits by chance."""


@dataclass(frozen=True)
class Sums:
    """The sketches of one step, for P parameters and r backward passes.

    Attributes:
        arrivals: (P, r, M), projections of what arrived, 0 where nothing did.
        gradient: (P, M), projections of `.grad`.
        previous: (P, M), projections of `.grad` at the step before.
        allowed: (P,), what the rounding of the additions explains of a projection's difference.
        resolution: (P,), what the rounding of `.grad` itself explains, whatever the factor.
        optional: (r,), whether another optimizer has stepped on the pass, so that it need not be in the sum.
    """

    arrivals: Array
    gradient: Array
    previous: Array
    allowed: Array
    resolution: Array
    optional: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Explanation:
    """What a gradient is made of.

    Attributes:
        name: `""` where it is the sum up to a factor; a diagnosis, or `not-linear` where no coefficients fit.
        coefficients: (r,), how often each pass is in the sum, before the factor.
        factor: the common factor.
        stale: the coefficient of the previous step's gradient.
        wrong: indices of the parameters that are not the sum; empty where all are wrong or none is.
        excess: the largest difference from the sum, relative to the gradient.
        ratio: the largest difference of a projection over what rounding explains.
    """

    name: str
    coefficients: tuple[float, ...]
    factor: float = 1.0
    stale: float = 0.0
    wrong: tuple[int, ...] = ()
    excess: float = 0.0
    ratio: float = 0.0
    details: tuple[str, ...] = field(default=())


def _misfit(sums: Sums, sum_: Array, factor: float) -> Array:
    """Return (P,): the largest difference of a projection from a factor times a sum, over what rounding explains."""
    difference = np.abs(sums.gradient - factor * sum_).max(axis=1, initial=0.0)
    allowed = abs(factor) * sums.allowed + sums.resolution
    return np.where(difference == 0, 0.0, difference / np.maximum(allowed, np.finfo(float).tiny))


def _factor(sums: Sums, sum_: Array, among: Array | None = None) -> float:
    g, s = (sums.gradient, sum_) if among is None else (sums.gradient[among], sum_[among])
    square = float((s * s).sum())
    return float((g * s).sum()) / square if square else 1.0


def _fits(sums: Sums, columns: Sequence[Array]) -> tuple[Array, Array] | None:
    """Return the coefficients of some columns, each (P, M), by least squares, and the misfit (P,)."""
    allowed = sums.allowed + sums.resolution
    weight = np.where(allowed > 0, 1 / np.where(allowed > 0, allowed, 1), 0.0)[:, None]
    matrix = np.stack([(column * weight).ravel() for column in columns], axis=1)
    if matrix.shape[0] < matrix.shape[1]:
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix, (sums.gradient * weight).ravel(), rcond=1e-9)
    if rank < matrix.shape[1]:
        return None
    fitted = np.tensordot(solution, np.stack(columns), axes=1)
    return np.asarray(solution, dtype=np.float64), _misfit(sums, fitted, 1.0)


def _coarseness(sums: Sums) -> float:
    """Return the share of its size by which a projection may be off: the chance that a wrong equation fits."""
    size = np.abs(sums.gradient).max(initial=0.0)
    allowed = (sums.allowed + sums.resolution).max(initial=0.0)
    return float(np.clip(allowed / size if size else 1.0, 1e-300, 1.0))


def _candidates(r: int) -> list[tuple[str, Array]]:
    """Return the named patterns of coefficients of r passes, the most common fault first."""
    found: list[tuple[str, Array]] = []
    ones, unit = np.ones(r), np.eye(r)
    if r > 1:
        found.append(("reset-inside-window", unit[-1]))
        found += [("reset-inside-window", np.where(np.arange(r) >= first, 1.0, 0.0)) for first in range(1, r - 1)]
        found.append(("first-only", unit[0]))
        found += [("dropped-micro-batch", ones - unit[j]) for j in range(r)]
        found += [("repeated-micro-batch", ones + unit[j]) for j in range(r)]
    if r > 2:
        found.append(("running-loss", np.arange(r, 0, -1.0)))
    return found


def _named(coefficients: Array) -> str:
    """Return the diagnosis of fitted coefficients, relative to the largest."""
    relative = coefficients / np.abs(coefficients).max()
    zero, r = np.abs(relative) < 1e-3, len(relative)
    if zero.any():
        kept = np.flatnonzero(~zero)
        if kept[-1] == r - 1 and not zero[kept[0] :].any():
            return "reset-inside-window"
        return "first-only" if list(kept) == [0] else "dropped-micro-batch"
    steps = relative[1:] / relative[:-1]
    if r > 2 and np.allclose(steps, steps.mean(), rtol=1e-3):
        return "rescaled-accumulator"
    return "unrecognised-weights"


def explain(sums: Sums) -> Explanation:
    """Say what a gradient is made of."""
    r = sums.arrivals.shape[1]
    required = (~sums.optional).astype(float)
    for coefficients in (required, np.ones(r)) if sums.optional.any() else (required,):
        found = _as_sum(sums, coefficients)
        if not found.name:
            return found
    found = _as_sum(sums, required if required.any() else np.ones(r))
    if found.wrong:
        part = np.array(found.wrong)
        named = _faulty(
            Sums(
                arrivals=sums.arrivals[part],
                gradient=sums.gradient[part],
                previous=sums.previous[part],
                allowed=sums.allowed[part],
                resolution=sums.resolution[part],
                optional=sums.optional,
            ),
            found,
        )
        return Explanation(
            named.name, named.coefficients, found.factor, named.stale, found.wrong, found.excess, found.ratio
        )
    return _faulty(sums, found)


def parallel(sums: Sums) -> bool:
    """Whether all that arrived, and the previous gradient, are multiples of one gradient."""
    columns = np.concatenate([sums.arrivals, sums.previous[:, None]], axis=1)
    matrix = np.moveaxis(columns, 1, 0).reshape(columns.shape[1], -1)
    values = np.linalg.svd(matrix, compute_uv=False)
    return len(values) < 2 or bool(values[1] <= 1e-4 * values[0])


def exactly(sums: Sums) -> Explanation | None:
    """Return what a gradient is made of by a named pattern and without any factor, or None."""
    r = sums.arrivals.shape[1]
    total = sums.arrivals.sum(axis=1)
    patterns = [("stale-window", np.ones(r), 1.0)] if np.abs(sums.previous).max(initial=0.0) else []
    for name, pattern, stale in [*patterns, *((name, pattern, 0.0) for name, pattern in _candidates(r))]:
        part = np.tensordot(sums.arrivals, pattern, axes=([1], [0])) + stale * sums.previous
        if _misfit(sums, part, 1.0).max() <= 1:
            excess = float(np.abs(sums.gradient - total).max() / np.abs(sums.gradient).max(initial=1e-300))
            return Explanation(name, tuple(float(c) for c in pattern), 1.0, stale, excess=excess, ratio=1.0)
    return None


def _as_sum(sums: Sums, coefficients: Array) -> Explanation:
    """Compare a gradient with a sum of passes up to one common factor; name it `not-linear` where it is not that."""
    total = np.tensordot(sums.arrivals, coefficients, axes=([1], [0]))
    size = np.abs(sums.gradient).max(initial=0.0)
    given = tuple(float(c) for c in coefficients)
    if not np.abs(total).max(initial=0.0) and not size:
        return Explanation("", given)
    misfit = _misfit(sums, total, 1.0)
    factor = 1.0
    if misfit.max() > 1 and size:
        seen = np.abs(total).max(axis=1) > 0
        # the median over parameters: a few wrong ones do not move it
        each = [_factor(sums, total, np.array([p])) for p in np.flatnonzero(seen)]
        guesses = [_factor(sums, total)] + ([float(np.median(each))] if each else []) + [1.0]
        factor = min(guesses, key=lambda f: (int((_misfit(sums, total, f) > 1).sum()), abs(f - 1)))
        misfit = _misfit(sums, total, factor)
    wrong = np.flatnonzero(misfit > 1)
    if not len(wrong):
        return Explanation("", given, factor, ratio=float(misfit.max()))
    excess = float(np.abs(sums.gradient - factor * total).max() / max(size, np.abs(total).max(), 1e-300))
    partial = tuple(int(p) for p in wrong) if len(wrong) < len(misfit) else ()
    return Explanation("not-linear", given, factor, wrong=partial, excess=excess, ratio=float(misfit.max()))


def _faulty(sums: Sums, found: Explanation) -> Explanation:
    """Name what a gradient that is not the sum is made of."""
    r = sums.arrivals.shape[1]
    passes = [sums.arrivals[:, j] for j in range(r)]
    total = np.tensordot(sums.arrivals, np.ones(r), axes=([1], [0]))

    def result(name: str, coefficients: Array, factor: float, stale: float = 0.0) -> Explanation:
        given = tuple(float(c) for c in coefficients)
        return Explanation(name, given, factor, stale, found.wrong, found.excess, found.ratio)

    if not np.abs(sums.gradient).max(initial=0.0):
        return result("no-gradient", np.zeros(r), 1.0)
    if np.abs(sums.previous).max(initial=0.0):
        if _misfit(sums, sums.previous, found.factor).max() <= 1 or _misfit(sums, sums.previous, 1.0).max() <= 1:
            return result("stale-window", np.zeros(r), 1.0, 1.0)
        if np.abs(total).max(initial=0.0):
            fit = _fits(sums, [total, sums.previous])
            if fit is not None and fit[1].max() <= 1 and abs(fit[0][0]) > 1e-12:
                return result("stale-window", np.ones(r), float(fit[0][0]), float(fit[0][1] / fit[0][0]))
    for name, pattern in _candidates(r):
        part = np.tensordot(sums.arrivals, pattern, axes=([1], [0]))
        if np.abs(part).max(initial=0.0):
            for factor in (1.0, found.factor, _factor(sums, part)):
                if factor and _misfit(sums, part, factor).max() <= 1:
                    return result(name, pattern, factor)
    stale = np.abs(sums.previous).max(initial=0.0) > 0
    columns = [column for column in passes if np.abs(column).max(initial=0.0)]
    unknowns = r + stale
    spare = sums.gradient.size - unknowns
    if len(columns) == r and spare > 0 and spare * np.log(_coarseness(sums)) < np.log(BY_CHANCE):
        fit = _fits(sums, [*passes, sums.previous] if stale else passes)
        if fit is not None and fit[1].max() <= 1 and np.abs(fit[0][:r]).max() > 0:
            old = float(fit[0][r]) if stale else 0.0
            scale = float(np.abs(fit[0][:r]).max())
            if abs(old) > 1e-3 * scale:
                return result("stale-window", fit[0][:r], 1.0, old)
            return result(_named(fit[0][:r]), fit[0][:r], 1.0)
    return result("not-linear", np.ones(r), found.factor)


def empty(parameters: int, r: int) -> Array:
    """Return (P, r, M) zeros."""
    return np.zeros((parameters, r, PROJECTIONS))
