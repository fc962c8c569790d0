"""What rounding allows of one window's gradient: in float64, and in a lower precision.

Both bounds have a coarse part that needs no draws, `quick`, and a whole, which measures rounding errors. The formulas
and their sources are in `numerics.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.devices import torch_dtype
from gradcheck_suite.numerics.bounds import (
    SMALLEST,
    UNIT_ROUNDOFF,
    accumulation_bound,
    coarse_bound,
    quick_bound,
)
from gradcheck_suite.numerics.comparison import Vector, worst_difference
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.noise import Computation, Part, RoundingErrors, cancellation, shared
from gradcheck_suite.references.number_range import leaves_range

if TYPE_CHECKING:
    from gradcheck_suite.references.window import Window


class Float64Bound:
    """The bound in float64, where autocast changes nothing."""

    def __init__(self, window: Window, compute: Compute) -> None:
        self._window, self._terms, self._compute = window, len(window.members), compute

    @cached_property
    def computation(self) -> Computation:
        """Computes gradients in float64."""
        return Computation(self._window.reference.instance, self._window.model(), torch.float64)

    @cached_property
    def _parts(self) -> list[Part]:
        return _parts(self._window)

    @cached_property
    def quick(self) -> Vector:
        """A resolution below which nothing is looked for, and the additions of the micro-batches."""
        return quick_bound(self._window.expected, self._terms)

    @cached_property
    def summing(self) -> Vector:
        """The resolution, and the rounding errors of adding up the items in another order."""
        cuts = [items for items, _ in self._parts]
        return self.quick + cancellation(self.computation, self._window.items, cuts, self._window.reference.layout)

    @cached_property
    def errors(self) -> RoundingErrors:
        """The rounding errors of the large batch in float64."""
        return RoundingErrors(self.computation, [(self._window.items, 1.0)], torch.float64)

    @cached_property
    def errors_of_parts(self) -> RoundingErrors | None:
        """The rounding errors of the micro-batches' gradients in float64, of a problem without a gradient by JAX.

        Where there is one, a fault of torch that rounding switches on and off would allow itself.
        """
        if self._window.jax is not None or len(self._parts) == 1:
            return None
        return RoundingErrors(self.computation, self._parts, torch.float64)

    @property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch."""
        return self._window.torch

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient."""
        return [self.computation.gradient(part) for part in self._parts]

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient itself."""
        return observed

    def expect_computable(self) -> None:
        """Expect torch to compute the large batch under the loop's autocast; without one the window has its gradient.

        Raises:
            CannotJudgeError: autocast refuses an operation, as it refuses `binary_cross_entropy` on CUDA.
        """
        if self._compute is None:
            return
        instance = self._window.reference.instance
        try:
            Computation(instance, self._window.model(), torch.float64, self._compute).gradient(*self._parts)
        except RuntimeError as error:
            raise CannotJudgeError(f"the plain large batch fails under autocast {self._compute}: {error}") from error

    def is_out_of_range(self) -> bool:
        """Return False: nothing that is finite is out of float64's range."""
        return False

    def is_torchs(self, observed: Vector) -> bool:
        """Whether a gradient is that of torch's large batch within the quick part of the bound."""
        torchs = self._window.torch
        return worst_difference(observed, torchs, quick_bound(torchs, self._terms)).ratio <= 1


class LowPrecisionBound:
    """The bound in float32, bfloat16 or float16, and under the autocast of the loop's losses.

    It is made of float64 computations. What torch computes in the lower precision is only asked whether it is finite.
    """

    def __init__(self, window: Window, compute: Compute) -> None:
        self._window, self._compute = window, compute
        names = [name for name in (window.reference.instance.case.dtype, compute) if name is not None]
        self._unit = max(names, key=UNIT_ROUNDOFF.__getitem__)
        self._smallest = max(map(SMALLEST.__getitem__, names))

    @cached_property
    def _computation(self) -> Computation:
        instance = self._window.reference.instance
        return Computation(instance, self._window.model(instance.dtype), instance.dtype, self._compute)

    @cached_property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype."""
        return self._computation.gradient((self._window.items, 1.0))

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, in the case's dtype."""
        return [self._computation.gradient(part) for part in _parts(self._window)]

    @cached_property
    def _sizes(self) -> Vector:
        return np.sum(np.abs(self._window.float64_bound.contributions), axis=0)

    @cached_property
    def quick(self) -> Vector:
        """What scaling and adding up may do to the largest element of each parameter."""
        layout, terms = self._window.reference.layout, len(self._window.members)
        return coarse_bound(self._sizes, terms, self._unit, layout, smallest=self._smallest) + self._unsure

    @cached_property
    def summing(self) -> Vector:
        """What scaling and adding up may do to each element."""
        summed = accumulation_bound(self._sizes, len(self._window.members), self._unit, smallest=self._smallest)
        return summed + self._unsure

    @cached_property
    def _unsure(self) -> Vector:
        """How far the two float64 gradients are apart, within what is not looked for in float64.

        The derivative of expm1(x) is computed as its value + 1, which is 0 in place of 4e-18 at x = -40.
        """
        if self._window.jax is None:
            return np.zeros_like(self._window.torch)
        with np.errstate(invalid="ignore"):
            apart = np.abs(self._window.torch - self._window.jax)
        return np.where(np.isfinite(apart), np.fmin(apart, self._window.float64_bound.quick), 0.0)

    @cached_property
    def errors(self) -> RoundingErrors:
        """The rounding errors of the large batch in the coarsest precision that takes part."""
        return self._errors([(self._window.items, 1.0)])

    @cached_property
    def errors_of_parts(self) -> RoundingErrors | None:
        """The rounding errors of the micro-batches' gradients in the coarsest precision that takes part."""
        parts = _parts(self._window)
        return self._errors(parts) if len(parts) > 1 else None

    def _errors(self, parts: Sequence[Part]) -> RoundingErrors:
        computation, dtype = self._window.float64_bound.computation, torch_dtype(self._unit)
        return RoundingErrors(computation, parts, dtype, smallest=self._smallest)

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient with the expected value where both are infinite or NaN.

        What overflows first decides which of them comes out.

        Raises:
            CannotJudgeError: one of them alone is finite, and the same holds of the plain large batch, or of the
                window's summed loss: a loop may divide at its end. Or the plain gradient's numbers nearly leave the
                range of the precision: a loop may scale its loss.
        """
        expected = self._window.expected
        if (np.isfinite(observed) != np.isfinite(expected)).any():
            self.expect_computable()
            self._expect_finite_sums()
            if self.is_out_of_range():
                name = self._window.reference.instance.case.dtype
                raise CannotJudgeError(
                    f"a gradient of nearly the largest numbers of {name} overflows where it is scaled"
                )
        return np.where(np.isfinite(observed) | np.isfinite(expected), observed, expected)

    def expect_computable(self) -> None:
        """Expect torch to compute the large batch in this precision, and all at once and in parts alike.

        A gradient that is finite in float64 alone excuses a case only if the numbers of the float64 computation leave
        the range of the lower precision. Otherwise it is a fault.

        Raises:
            CannotJudgeError: the plain large batch fails in this precision, or overflows in it.
        """
        name = self._window.reference.instance.case.dtype
        where = name if self._compute is None else f"{name} under autocast {self._compute}"
        try:
            large, low = self.large_batch, self.contributions
        except RuntimeError as error:
            raise CannotJudgeError(f"the plain large batch fails in {where}: {error}") from error
        with np.errstate(invalid="ignore"):
            accumulated = np.sum(low, axis=0)
        finite = np.isfinite(self._window.expected)
        if not any((np.isfinite(gradient) != finite).any() for gradient in (large, accumulated)):
            return
        if self.is_out_of_range():
            raise CannotJudgeError(
                f"the plain gradient of a batch is finite in float64 and not in {where}, or vice versa"
            )

    def _expect_finite_sums(self) -> None:
        instance = self._window.reference.instance
        batch = instance.batch(self._window.items)
        total = float(instance.count(batch)) if instance.problem.reduction == "mean" else 1.0
        parts = [(cut, share * total) for cut, share in _parts(self._window)]
        sums = self._computation.gradient(*parts)
        if (np.isfinite(sums) != np.isfinite(self._window.expected)).any() and self._leave_range(parts):
            raise CannotJudgeError(f"the gradient of the window's summed loss overflows {instance.case.dtype}")

    def is_out_of_range(self) -> bool:
        """Return whether the numbers of the float64 computation leave, or nearly leave, the range of a dtype in use."""
        return self._leave_range([(self._window.items, 1.0), *_parts(self._window)])

    def _leave_range(self, parts: Sequence[Part]) -> bool:
        in_use = [torch_dtype(name) for name in (self._window.reference.instance.case.dtype, self._compute) if name]
        narrowest = min(in_use, key=lambda dtype: torch.finfo(dtype).max)
        return leaves_range(self._window.float64_bound.computation, parts, narrowest)

    def is_torchs(self, observed: Vector) -> bool:
        """Return False: in a lower precision no gradient is told to be torch's float64 one."""
        return False


def _parts(window: Window) -> list[Part]:
    instance = window.reference.instance
    return shared(instance, window.items, [instance.case.plan.items(j) for j in window.members])
