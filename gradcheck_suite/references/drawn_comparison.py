"""Compare gradients within a bound whose rounding errors are drawn: as often as it takes to decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from gradcheck_suite.numerics.bounds import DRAWS, FEW_DRAWS, MANY_DRAWS, RARE_DRAWS
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.references.noise import RoundingErrors

UNEVEN = 8.0
"""Quotient of the mean squares of two groups of `DRAWS` rounding errors from which rare errors are far larger than the
others. Normally distributed errors in four groups reach it in three of ten million cases."""

SMALL = 100_000
"""Number of elements up to which `MANY_DRAWS` are made: with more, draws take minutes."""


class WindowBound(Protocol):
    """What rounding in the case's dtype does to one window's gradient; vectors are (P,) float64."""

    @property
    def quick(self) -> Vector:
        """The part of the bound that needs no draws."""

    @property
    def summing(self) -> Vector:
        """The rounding errors of adding up, which are no part of the draws."""

    @property
    def errors(self) -> RoundingErrors:
        """The rounding errors of the large batch."""

    @property
    def errors_of_parts(self) -> RoundingErrors | None:
        """The rounding errors of the micro-batches' gradients, added up; None where they are not to be measured."""

    @property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype and under the loop's autocast."""

    @property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, computed like `large_batch`."""

    def comparable(self, observed: Vector) -> Vector:
        """Return an observed gradient as it is compared with the expected one."""

    def expect_computable(self) -> None:
        """Raise `CannotJudgeError` if torch cannot compute the large batch in the case's dtype."""

    def is_out_of_range(self) -> bool:
        """Return whether the computation of the gradient leaves, or nearly leaves, the range of the precision."""

    def is_torchs(self, observed: Vector) -> bool:
        """Return whether a gradient is that of torch's large batch, without JAX; only float64 can tell."""


def whole_bound(bound: WindowBound, draws: int = DRAWS) -> Vector:
    """Return what rounding allows of each element of the large batch, measured on so many draws, (P,)."""
    return np.maximum(bound.quick, bound.summing + bound.errors.noise(draws))


def compare_within(
    bound: WindowBound, evidence: Comparison, *, roughly: bool = False, accumulated: bool = True
) -> Comparison:
    """Compare two gradients with as many draws of the rounding errors as it takes to decide.

    Where the gradients of micro-batches cancel, their rounding errors are larger than the large batch's: the backward
    of a normalization takes out what lies along its input, and its error is of the size of what it takes out. So before
    an accumulated gradient is found wrong, the errors of the micro-batches' gradients are drawn, too.

    Args:
        bound: what rounding allows.
        evidence: the gradients, and `bound.quick`.
        roughly: whether a violation may be found with `FEW_DRAWS`, whose bound is 30 times as wide.
        accumulated: whether one of the gradients is a sum of micro-batches' gradients.
    """
    if evidence.ratio <= 1:
        return evidence
    found = _compare_drawn(bound, evidence, [bound.errors], roughly)
    if found.ratio > 1 and accumulated and bound.errors_of_parts is not None:
        found = _compare_drawn(bound, evidence, [bound.errors, bound.errors_of_parts], roughly)
    return found


def is_rarely_rounding(bound: WindowBound, evidence: Comparison, *, has_norm: bool = False) -> bool:
    """Return whether rounding errors as large as a difference come now and then, in some of `RARE_DRAWS` draws.

    So many are made only where the draws before differ in size from one group to the next, or through a normalization:
    that over two features has nearly no gradient but where rounding makes them equal, which 128 draws may all miss.

    Args:
        bound: what rounding allows.
        evidence: the gradients that differ.
        has_norm: whether the model has a normalization.
    """
    measured = [errors for errors in (bound.errors, bound.errors_of_parts) if errors is not None]
    index = evidence.worst.index
    if len(evidence.observed) > SMALL:
        return False
    if not any(errors.unevenness()[index] > UNEVEN for errors in measured):
        measured = measured[:has_norm]
    draws = MANY_DRAWS
    while measured and draws < RARE_DRAWS:
        draws *= 2
        if _within(bound, evidence, [errors.noise(draws) for errors in measured]).ratio <= 1:
            return True
    return False


def _compare_drawn(
    bound: WindowBound, evidence: Comparison, measured: Sequence[RoundingErrors], roughly: bool
) -> Comparison:
    """Compare two gradients, whose rounding errors may be as large as the largest of those that are measured."""
    if roughly and (found := _within(bound, evidence, (errors.noise(FEW_DRAWS) for errors in measured))).ratio > 1:
        return found
    found = _within(bound, evidence, (errors.likely(FEW_DRAWS) for errors in measured))
    for draws in (DRAWS, MANY_DRAWS) if len(evidence.observed) <= SMALL else (DRAWS,):
        if found.ratio <= 1:
            return found
        found = _within(bound, evidence, (errors.noise(draws) for errors in measured))
    return found


def _within(bound: WindowBound, evidence: Comparison, noises: Iterable[Vector]) -> Comparison:
    allowed = np.maximum(bound.quick, bound.summing + np.max([*noises], axis=0))
    return Comparison(evidence.layout, evidence.expected, evidence.observed, allowed)
