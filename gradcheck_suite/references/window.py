"""One window of a case: its expected gradient by torch and by JAX, and the comparison of an observed one with it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.numerics.bounds import DRAWS
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.references.drawn_comparison import WindowBound, compare_within, whole_bound
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.references.window_bounds import Float64Bound, LowPrecisionBound

if TYPE_CHECKING:
    from gradcheck_suite.references.reference import Reference

Parameters = dict[str, torch.Tensor]


class Window:
    """One window's references. Vectors are (P,) float64, parameters flattened in the layout's order.

    Attributes:
        reference: of the case.
        index: of the window in an epoch.
        parameters: those that it is at, by name; None for the initial ones.
        members: indices of its micro-batches.
        items: indices of its items.
        reached: names of the parameters that the window's items reach.
        torch: the large-batch gradient by torch.
        bound: what rounding in the case's dtype allows.
        float64_bound: what rounding allows between torch and JAX, both in float64 whatever the case's dtype.
    """

    def __init__(self, reference: Reference, index: int, parameters: Parameters | None, compute: Compute) -> None:
        self.reference, self.parameters = reference, parameters
        instance = reference.instance
        self.index, self.members = index, instance.case.plan.windows[index]
        self.items = instance.case.plan.window_items(index)
        try:
            gradients = gradients_of(instance, self.model(), self.items, dtype=torch.float64)
        except RuntimeError as error:
            raise CannotJudgeError(f"the plain large batch fails in float64: {error}") from error
        self.reached = frozenset(name for name, g in gradients.items() if g is not None)
        self.torch = reference.flat(gradients)
        self.float64_bound = Float64Bound(self, compute)
        exact = instance.case.dtype == "float64"
        self.bound: WindowBound = self.float64_bound if exact else LowPrecisionBound(self, compute)

    @property
    def moved(self) -> bool:
        """Whether this is at parameters that a real optimizer has moved."""
        return self.parameters is not None

    @cached_property
    def _model64(self) -> torch.nn.Module:
        return self.reference.model(torch.float64, self.parameters)

    def model(self, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """Return a model in `dtype` at the window's parameters."""
        return self._model64 if dtype is torch.float64 else self.reference.model(dtype, self.parameters)

    @property
    def arrays(self) -> Arrays:
        """The window's items as numpy arrays, of a generated problem."""
        arrays = self.reference.instance.arrays
        assert arrays is not None
        return {name: array[self.items.start : self.items.stop] for name, array in arrays.items()}

    @property
    def values(self) -> Arrays:
        """Parameters and floating buffers by name, in float64."""
        return self.reference.values64 if self.parameters is None else float_values(self.model())

    @cached_property
    def jax(self) -> Vector | None:
        """The large-batch gradient by JAX, of a generated problem that is a sum over items."""
        if self.reference.instance.accumulable_spec is None:
            return None
        if not self.moved:
            return self.reference.jax[self.index]
        return self.reference.by_jax(self.values, [self.items])[0]

    @property
    def expected(self) -> Vector:
        """The float64 gradient that loops are held to: JAX's where there is one."""
        return self.torch if self.jax is None else self.jax

    def allowed(self, draws: int = DRAWS) -> Vector:
        """Return what rounding allows of each element, measured on so many draws: the fewer, the more it allows."""
        return whole_bound(self.bound, draws)

    def compare(self, observed: Vector, *, roughly: bool = False) -> Comparison:
        """Compare a gradient with the expected one, within what rounding in the case's dtype allows.

        Args:
            observed: (P,): the gradient.
            roughly: whether a violation may be found with a wider bound, from fewer draws of rounding errors.

        Raises:
            CannotJudgeError: the gradient is not finite, nor is that of the plain large batch, which is out of range.
        """
        return compare_within(self.bound, self.compare_quickly(observed), roughly=roughly)

    def compare_quickly(self, observed: Vector) -> Comparison:
        """Compare a gradient with the expected one, within the part of the bound that rests on no draws."""
        compared = self.bound.comparable(observed)
        return Comparison(self.reference.layout, self.expected, compared, self.bound.quick)

    def contributions(self) -> list[Vector]:
        """Return the float64 gradient of each micro-batch's own loss, as `Problem.loss` gives it."""
        instance, model = self.reference.instance, self.model()
        items = (instance.case.plan.items(j) for j in self.members)
        return [self.reference.flat(gradients_of(instance, model, cut, dtype=torch.float64)) for cut in items]

    def sums(self) -> list[Vector]:
        """Return the float64 gradient of each micro-batch's summed loss."""
        instance, model = self.reference.instance, self.model()
        cuts = (instance.case.plan.items(j) for j in self.members)
        return [self.reference.flat(gradients_of(instance, model, c, summed=True, dtype=torch.float64)) for c in cuts]

    @property
    def divisor(self) -> float:
        """What the sums of the micro-batches' losses are divided by."""
        instance = self.reference.instance
        return float(instance.count(instance.batch(self.items))) if instance.problem.reduction == "mean" else 1.0

    def accumulated(self) -> Vector:
        """Return the gradient as torch accumulates it in float64, each micro-batch's sum by itself."""
        total: Vector = sum(self.sums(), start=np.zeros_like(self.torch)) / self.divisor
        return total


def float_values(model: torch.nn.Module) -> Arrays:
    """Return parameters and floating buffers by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().cpu().numpy() for n, t in tensors if t.is_floating_point()}
