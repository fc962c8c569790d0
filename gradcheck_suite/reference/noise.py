"""Gradients of parts of a window, and their Monte Carlo rounding errors.

The rounding errors of a gradient, in float64 or a lower precision, are measured by Monte Carlo arithmetic (D. S.
Parker, UCLA CSD-970002, 1997) of its float64 computation. `random_rounding` has the errors of single operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.core.comparison import (
    DRAWS,
    FEW_DRAWS,
    MANY_DRAWS,
    RARE_DRAWS,
    Comparison,
    Layout,
    Vector,
    likely_bound,
    noise_bound,
    summation_bound,
)
from gradcheck_suite.core.contract import Batch
from gradcheck_suite.reference.rounding import RandomRounding
from gradcheck_suite.run.instance import Compute, Instance, autocast_context, map_leaves

Part = tuple[range, float]
"""Some items, and the factor of their loss's gradient in the window's gradient."""


def shared(instance: Instance, window: range, cuts: Sequence[range]) -> list[Part]:
    """Return parts of a window's items, each with the factor of its gradient in the window's gradient."""
    if instance.problem.reduction == "batch":
        return [(window, 1.0)]
    if instance.problem.reduction == "sum":
        return [(cut, 1.0) for cut in cuts]
    total = float(instance.count(instance.batch(window)))
    return [(cut, float(instance.count(instance.batch(cut))) / total) for cut in cuts]


class Computation:
    """Computes gradients of an instance's loss over parts of its items, in one precision."""

    def __init__(self, instance: Instance, model: torch.nn.Module, dtype: torch.dtype, compute: Compute = None) -> None:
        """Prepare the computation.

        Args:
            instance: the instance whose items and loss are used.
            model: a model in `dtype`; its parameters are perturbed and restored.
            dtype: dtype of parameters and floating-point data.
            compute: autocast dtype of the losses, or None.
        """
        self.instance, self._model, self._dtype, self._compute = instance, model, dtype, compute
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._batches: dict[range, Batch] = {}
        self._guarded = False

    def on_cpu(self, *parts: Part) -> Computation:
        """Return this computation on the CPU, or itself where the problem computes a part on its own device only.

        There a value that rounding moves out of a loss's range raises an exception. A CUDA kernel asserts instead, and
        every later CUDA call of the process fails.
        """
        if self._is_on_cpu:
            return self
        instance = self.instance.on_cpu()
        try:
            model = instance.model(self._dtype)
            model.load_state_dict(self._model.state_dict())
            found = Computation(instance, model, self._dtype, self._compute)
            found.gradient(*parts)
        except (RuntimeError, ValueError):
            return self
        return found

    @property
    def _is_on_cpu(self) -> bool:
        return self.instance.device.type == "cpu"

    def gradient(self, *parts: Part) -> Vector:
        """Return the sum of the parts' gradients, (P,); each loss is multiplied by its factor before backward."""
        return self._gradient([(self._batch(items), share) for items, share in parts])

    def rounded_at_random(
        self, parts: Sequence[Part], dtype: torch.dtype, draw: int, *, smallest: float = 0.0
    ) -> Vector:
        """Return the sum of the parts' gradients with every operation rounded at random as in a dtype, (P,).

        On another device than the CPU, only the parameters are moved: their values are in no loss's range.

        Args:
            parts: whose gradients are added up.
            dtype: whose rounding errors are drawn.
            draw: number of the draw.
            smallest: spacing of the smallest numbers, as for `RandomRounding`.
        """
        if not self._is_on_cpu:
            return self._at_moved_values(parts, dtype, draw, data=False)
        try:
            for guarded in (self._guarded, True):
                with RandomRounding(draw, dtype, guarded=guarded, smallest=smallest):
                    found = self.gradient(*parts)
                if guarded or np.isfinite(found).all():
                    return found
                # a mask may hold the largest number, which a rounding error makes infinite
                self._guarded = True
        except (RuntimeError, ValueError):
            # a loss may reject values outside of its range: only parameters and inputs are moved then
            return self._at_moved_values(parts, dtype, draw)
        raise AssertionError("a guarded draw returns")

    def _at_moved_values(self, parts: Sequence[Part], dtype: torch.dtype, draw: int, *, data: bool = True) -> Vector:
        generator, eps = torch.Generator().manual_seed(draw), torch.finfo(dtype).eps
        batches = [(self._batch(items), share) for items, share in parts]
        values = [p.detach().clone() for p in self._model.parameters()]
        try:
            self._put([_moved(value, eps, generator) for value in values])
            if data:
                # a loss may reject a target outside of its range: only the parameters are moved then
                with suppress(RuntimeError, ValueError):
                    moved = [(map_leaves(lambda t: _moved_data(t, eps, generator), b), share) for b, share in batches]
                    return self._gradient(moved)
            return self._gradient(batches)
        finally:
            self._put(values)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self._model.parameters(), values, strict=True):
                p.copy_(value)

    def _batch(self, items: range) -> Batch:
        if items not in self._batches:
            self._batches[items] = self.instance.batch(items, self._dtype)
        return self._batches[items]

    def _gradient(self, batches: Sequence[tuple[Batch, float]]) -> Vector:
        with autocast_context(self.instance.device, self._compute):
            losses = [self.instance.problem.loss(self._model, batch) * share for batch, share in batches]
        reaching = [loss for loss in losses if loss.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(self._trainable)
        if reaching:
            found = torch.autograd.grad(reaching, self._trainable, allow_unused=True)
        parts = [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else _flat(g)
            for p, g in zip(self._trainable, found, strict=True)
        ]
        flat: Vector = torch.cat(parts).numpy()
        return flat


class RoundingErrors:
    """The rounding errors of the sum of some parts' gradients in a dtype, drawn when they are needed and kept."""

    def __init__(
        self, computation: Computation, parts: Sequence[Part], dtype: torch.dtype, *, smallest: float = 0.0
    ) -> None:
        """Prepare the draws.

        Args:
            computation: in float64; the draws are made on the CPU where the problem allows it.
            parts: whose gradients are computed one by one and added up.
            dtype: the precision whose rounding errors are drawn.
            smallest: spacing of the smallest numbers, as for `RandomRounding`.
        """
        self._computation, self._parts, self._dtype = computation.on_cpu(*parts), parts, dtype
        self._smallest = smallest
        self._kept: dict[tuple[int, int], tuple[Vector, Vector]] = {}

    def noise(self, draws: int = DRAWS) -> Vector:
        """Return a bound on the rounding error, (P,): the largest of the bounds of every `DRAWS` draws.

        Where a rounding error takes a value past a kink, such as that of a ReLU, the gradient jumps. A few of many
        draws show it, and their root mean square alone would understate it.
        """
        ends = [(first, min(first + DRAWS, draws)) for first in range(0, draws, DRAWS)]
        return np.max([noise_bound(self._mean_square(*end), end[1] - end[0]) for end in ends], axis=0)

    def unevenness(self) -> Vector:
        """Return the largest over the smallest mean square of the groups of `MANY_DRAWS` draws, (P,)."""
        groups = [self._mean_square(first, first + DRAWS) for first in range(0, MANY_DRAWS, DRAWS)]
        return np.max(groups, axis=0) / np.maximum(np.min(groups, axis=0), np.finfo(np.float64).tiny)

    def likely(self, draws: int) -> Vector:
        """Return a smaller bound, (P,), within which an error is taken as right without further draws.

        With four draws, an error at this bound is within the bound of 32 draws, of which they are the first, in 91% of
        cases, and a smaller error more often (`docs/bounds.md`).
        """
        return likely_bound(self._mean_square(0, draws))

    def _mean_square(self, first: int, last: int) -> Vector:
        """Return the mean square of the errors of the draws `first` to `last` - 1, without those that overflow, (P,).

        The errors are those of the same framework: a difference between two frameworks is not rounding error.
        """
        drawn = max((end for start, end in self._kept if start == first and end <= last), default=first)
        nothing = np.zeros_like(self._centre)
        total, number = self._kept.get((first, drawn), (nothing, nothing))
        for draw in range(drawn, last):
            with np.errstate(invalid="ignore", over="ignore"):
                rounded = self._computation.rounded_at_random(self._parts, self._dtype, draw, smallest=self._smallest)
                square = (rounded - self._centre) ** 2
            finite = np.isfinite(square)
            total, number = total + np.where(finite, square, 0.0), number + finite
        self._kept[first, last] = total, number
        return total / np.maximum(number, 1)

    @cached_property
    def _centre(self) -> Vector:
        return self._computation.gradient(*self._parts)


def cancellation(computation: Computation, window: range, cuts: Sequence[range], layout: Layout) -> Vector:
    """Return a bound on the difference of two float64 sums of a window's items, in any order, (P,).

    Args:
        computation: a computation in float64.
        window: the items of the window.
        cuts: the items of each micro-batch.
        layout: the layout of the gradient.
    """
    instance = computation.instance
    items = [range(i, i + 1) for i in window]
    try:
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, items)]
    except (RuntimeError, ValueError):
        # a user's model may reject a single item, but not a micro-batch
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, cuts)]
    return summation_bound(np.sum(sizes, axis=0), len(window), layout)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.reshape(-1).to("cpu", torch.float64)


def _moved(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with each element moved by an ulp or two away from zero, towards zero, or not at all."""
    if not tensor.is_floating_point():
        return tensor
    steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return tensor * (1 + eps * steps)


def _moved_data(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Return perturbed data; whole numbers are not moved.

    They may be class labels: a loss that tests whether its target is 1 or -1 would take 1.0001 for neither, and the
    change of its value would not be a rounding error.
    """
    moved = _moved(tensor, eps, generator)
    return torch.where(tensor == tensor.round(), tensor, moved) if tensor.is_floating_point() else moved


# Whether a computation's numbers fit into the range of a lower precision: a gradient that is finite in float64 may
# overflow in float16 without a fault.


MARGIN = 64.0
"""Factor between the largest number of a precision and results whose intermediate terms may exceed it."""


class _Narrowed(TorchDispatchMode):
    """A mode that rounds the result of every operation to a dtype of lower precision.

    Attributes:
        left: whether a result came near the largest number of the dtype, or is 0 in the dtype alone.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.left = dtype, False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and round its results."""
        if (decomposed := _decompositions().get(func)) is not None:
            with self:
                return decomposed(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if all(alias.is_write for alias in aliases):
            for value in out if isinstance(out, list | tuple) else [out]:
                # cuDNN's recurrent operation returns its flat weights, which are the model's parameters
                if aliases or not any(value is argument for argument in args):
                    self._round(value)
        return out

    def _round(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64 or not value.numel():
            return
        limits = torch.finfo(self._dtype)
        sizes = value.abs()
        infinite = value.isinf() | (sizes == torch.finfo(torch.float64).max)
        self.left |= bool((~infinite & (sizes > limits.max / MARGIN)).any())
        rounded = value.clamp(-limits.max, limits.max).to(self._dtype).to(torch.float64)
        value.copy_(torch.where(infinite, value, rounded))


@cache
def _decompositions() -> dict[Any, Any]:
    """Return the operations with an intermediate result that overflows, as functions of simpler operations.

    torch's soft margin loss is log(1 + exp(-y x)), which is infinite in bfloat16 from an x of 89. The gradient of its
    binary cross entropy is the incoming one times (p - y) / (p (1 - p)), and divided by the number of elements only
    then.
    """
    aten = torch.ops.aten
    names = ("soft_margin_loss", "soft_margin_loss_backward", "binary_cross_entropy_backward")
    return dict(get_decompositions([getattr(aten, name) for name in names]))


def leaves_range(computation: Computation, parts: Sequence[Part], dtype: torch.dtype) -> bool:
    """Return whether parts of a gradient may be infinite or NaN in a dtype where they are finite, or vice versa.

    Args:
        computation: in float64.
        parts: whose gradients are computed, each by itself.
        dtype: of the lower precision.
    """
    computation = computation.on_cpu(parts[0])
    for part in parts:
        # before the mode, which would round the batch that the computation keeps
        exact = computation.gradient(part)
        mode = _Narrowed(dtype)
        with mode:
            rounded = computation.gradient(part)
        if mode.left or (np.isfinite(rounded) != np.isfinite(exact)).any():
            return True
    return False


# Compare gradients within a bound whose rounding errors are drawn: as often as it takes to decide.


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
