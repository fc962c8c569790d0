"""What rounding allows of one window's gradient: in float64, and in a lower precision.

Both bounds are a part that needs no chance, `steady`, and `noise`, which is measured on draws of the rounding errors.
The formulas and their sources are in `numerics.bounds`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from gradcheck_suite.execution.autocast import Compute, coarsest
from gradcheck_suite.numerics.bounds import accumulation_bound, farthest, noise_bound, quick_bound
from gradcheck_suite.numerics.comparison import Vector, worst_difference
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.noise import Computation, Part, float64_noise, shared

if TYPE_CHECKING:
    from gradcheck_suite.references.window import Window


class WindowBound(Protocol):
    """What rounding in the case's dtype does to one window's gradient; vectors are (P,) float64."""

    @property
    def steady(self) -> Vector:
        """The deterministic part of the bound."""

    @property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype and under the loop's autocast."""

    @property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, computed like `large_batch`."""

    def noise(self, draws: int) -> Vector:
        """Return the Monte Carlo part of the bound, measured on `draws` draws."""

    def comparable(self, observed: Vector) -> Vector:
        """Return an observed gradient as it is compared with the expected one."""

    def is_torchs(self, observed: Vector) -> bool:
        """Return whether a gradient is that of torch's large batch, without JAX; only float64 can tell."""


class Float64Bound:
    """The bound in float64, where autocast changes nothing."""

    def __init__(self, window: Window) -> None:
        self._window, self._terms = window, len(window.members)

    @cached_property
    def _computation(self) -> Computation:
        return Computation(self._window.reference.instance, self._window.model(), torch.float64)

    @cached_property
    def _parts(self) -> list[Part]:
        return _parts(self._window)

    @cached_property
    def steady(self) -> Vector:
        """A resolution below which nothing is looked for, and the additions of the micro-batches."""
        return quick_bound(self._window.expected, self._terms)

    @property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch."""
        return self._window.torch

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient."""
        return [self._computation.gradient(part) for part in self._parts]

    def noise(self, draws: int) -> Vector:
        """Return how far two sound float64 computations may lie apart, measured on so many draws."""
        cuts = [items for items, _ in self._parts]
        return float64_noise(self._computation, self._window.items, cuts, self._window.reference.layout, draws)

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient itself."""
        return observed

    def is_torchs(self, observed: Vector) -> bool:
        """Whether a gradient is that of torch's large batch within the steady part of the bound."""
        torchs = self._window.torch
        return worst_difference(observed, torchs, quick_bound(torchs, self._terms)).ratio <= 1


class LowPrecisionBound:
    """The bound in float32, bfloat16 or float16, and under the autocast of the loop's losses."""

    def __init__(self, window: Window, compute: Compute) -> None:
        self._window, self._compute = window, compute

    @cached_property
    def _computation(self) -> Computation:
        instance = self._window.reference.instance
        return Computation(instance, self._window.model(instance.dtype), instance.dtype, self._compute)

    @cached_property
    def _parts(self) -> list[Part]:
        return _parts(self._window)

    @cached_property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype."""
        return self._computation.gradient((self._window.items, 1.0))

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, in the case's dtype."""
        return [self._computation.gradient(part) for part in self._parts]

    @cached_property
    def steady(self) -> Vector:
        """What the precision does to this gradient at these values, and what scaling and adding up may do.

        Raises:
            CannotJudgeError: the plain large batch fails in this precision, or overflows in it.
        """
        name = self._window.reference.instance.case.dtype
        where = name if self._compute is None else f"{name} under autocast {self._compute}"
        try:
            large, low = self.large_batch, self.contributions
        except (RuntimeError, NotImplementedError) as error:
            raise CannotJudgeError(f"the plain large batch fails in {where}: {error}") from error
        with np.errstate(invalid="ignore"):
            accumulated = np.sum(low, axis=0)
        expected = self._window.expected
        finite = np.isfinite(expected)
        if any((np.isfinite(gradient) != finite).any() for gradient in (large, accumulated)):
            raise CannotJudgeError(
                f"the plain gradient of a batch is finite in float64 and not in {where}, or vice versa"
            )
        high = self._window.float64_bound.contributions
        sizes = np.sum([np.maximum(np.abs(a), np.abs(b)) for a, b in zip(low, high, strict=True)], axis=0)
        unit = coarsest(name, self._compute)
        assert unit is not None
        return farthest(expected, [large, accumulated]) + accumulation_bound(sizes, len(low), unit)

    def noise(self, draws: int) -> Vector:
        """Return how far the roundings of another order of computation may take the gradient."""
        return noise_bound(self._computation.mean_square(self._parts, self._window.expected, draws), draws)

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient with the expected value where both are infinite or NaN.

        What overflows first decides which of them comes out.
        """
        expected = self._window.expected
        return np.where(np.isfinite(observed) | np.isfinite(expected), observed, expected)

    def is_torchs(self, observed: Vector) -> bool:
        """Return False: in a lower precision no gradient is told to be torch's float64 one."""
        return False


def _parts(window: Window) -> list[Part]:
    instance = window.reference.instance
    return shared(instance, window.items, [instance.case.plan.items(j) for j in window.members])
