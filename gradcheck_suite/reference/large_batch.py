"""The large batch of each window: torch's gradient, its bound, how far JAX's is from it, and the
comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.catalogue.tables import is_accumulable
from gradcheck_suite.core.case import Case
from gradcheck_suite.core.comparison import (
    DRAWS,
    FEW_DRAWS,
    MANY_DRAWS,
    RARE_DRAWS,
    SMALLEST,
    UNIT_ROUNDOFF,
    Comparison,
    Layout,
    Vector,
    accumulation_bound,
    coarse_bound,
    finite_or_right,
    other_infinity,
    quick_bound,
    worst_difference,
)
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.core.options import XLA
from gradcheck_suite.core.text import error_text
from gradcheck_suite.reference import programs
from gradcheck_suite.reference.evaluation import evaluated_by, evaluator
from gradcheck_suite.reference.jax_gradients import (
    StartedGradients,
    large_batch_gradients,
    whole_gradient,
)
from gradcheck_suite.reference.rounding import (
    Computation,
    Part,
    RoundingErrors,
    cancellation,
    leaves_range,
    shared,
)
from gradcheck_suite.run.instance import Compute, Instance, instance_of, torch_dtype


class CannotJudgeError(Exception):
    """The case itself cannot run here: the plain large batch fails before any loop is involved."""


# The large-batch gradient in torch: one forward, one backward, nothing accumulated.


Gradients = dict[str, torch.Tensor | None]


def gradients_of(
    instance: Instance,
    model: torch.nn.Module,
    items: range,
    *,
    summed: bool = False,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Return the gradient of the objective over some items in one batch, without a change of the
    model's `.grad`.

    Args:
        instance: the instance whose items and loss are used.
        model: the model whose parameters are used.
        items: indices of the items in the epoch.
        summed: whether to return the gradient of the summed loss if the problem's reduction is a
            mean.
        dtype: dtype of the batch's floating-point tensors; the instance's if None.

    Returns:
        Name of each trainable parameter -> its dense gradient, or None if the loss does not reach
        it.
    """
    batch = instance.batch(items, dtype)
    loss = instance.problem.loss(model, batch)
    if summed and instance.problem.reduction == "mean":
        loss = loss * instance.count(batch)
    return parameter_gradients(loss, model)


def parameter_gradients(loss: torch.Tensor, model: torch.nn.Module) -> Gradients:
    """Return the dense gradient of a loss for each trainable parameter by name, or None if it does
    not reach one.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: tuple[Any, ...] = (None,) * len(named)
    # autograd.grad raises on a loss that needs no gradient, as one of a batch that reaches no
    # parameter does
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: g.to_dense() if g is not None and g.is_sparse else g
        for name, g in zip(named, found, strict=True)
    }


# What rounding allows of one window's gradient: in float64, and in a lower precision.
#
# The formulas and their sources are in `core.comparison`.


class Float64Bound:
    """The bound in float64, where autocast changes nothing."""

    def __init__(self, window: WindowReference, compute: Compute) -> None:
        self._window = window
        self._terms = len(window.members)
        self._compute = compute

    @cached_property
    def computation(self) -> Computation:
        """Computes gradients in float64."""
        return Computation(self._window.reference.instance, self._window.model(), torch.float64)

    @cached_property
    def quick(self) -> Vector:
        """A resolution below which nothing is looked for, and the additions of the micro-batches."""
        return quick_bound(self._window.expected, self._terms)

    @cached_property
    def summing(self) -> Vector:
        """The resolution, and the rounding errors of adding up the items in another order."""
        cuts = [items for items, _ in self._window.parts]
        return self.quick + cancellation(
            self.computation, self._window.items, cuts, self._window.reference.layout
        )

    @cached_property
    def errors(self) -> RoundingErrors:
        """The rounding errors of the large batch in float64."""
        return RoundingErrors(self.computation, [(self._window.items, 1.0)], torch.float64)

    @cached_property
    def errors_of_parts(self) -> RoundingErrors | None:
        """The rounding errors of the micro-batches' gradients in float64, of a problem without a
        gradient by JAX.
        """
        # a fault of torch that rounding switches on and off would widen the bound that JAX's
        # gradient shows it by
        if self._window.jax is not None or len(self._window.parts) == 1:
            return None
        return RoundingErrors(self.computation, self._window.parts, torch.float64)

    @property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch."""
        return self._window.torch

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient."""
        return [self.computation.gradient(part) for part in self._window.parts]

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient, with the expected value where it may be NaN or another infinity."""
        return _comparable(self, observed, self._window.expected)

    def expect_computable(self) -> None:
        """Expect torch to compute the large batch under the loop's autocast.

        Without one the window has its gradient.

        Raises:
            CannotJudgeError: autocast refuses an operation, as it refuses `binary_cross_entropy` on
                CUDA.
        """
        if self._compute is None:
            return
        instance = self._window.reference.instance
        try:
            Computation(
                instance,
                self._window.model(),
                torch.float64,
                self._compute,
            ).gradient(*self._window.parts)
        except RuntimeError as error:
            raise CannotJudgeError(
                f"the plain large batch fails under autocast {self._compute}: {error}"
            ) from error

    def is_out_of_range(self) -> bool:
        """Return False: nothing that is finite is out of float64's range."""
        return False

    def is_torchs(self, observed: Vector) -> bool:
        """Whether a gradient is that of torch's large batch within the quick part of the bound."""
        torchs = self._window.torch
        return worst_difference(observed, torchs, quick_bound(torchs, self._terms)).ratio <= 1


class LowPrecisionBound:
    """The bound in float32, bfloat16 or float16, and under the autocast of the loop's losses.

    It is made of float64 computations. What torch computes in the lower precision is only asked
    whether it is finite.
    """

    def __init__(self, window: WindowReference, compute: Compute) -> None:
        self._window = window
        self._compute = compute
        names = [
            name for name in (window.reference.instance.case.dtype, compute) if name is not None
        ]
        self._unit = max(names, key=UNIT_ROUNDOFF.__getitem__)
        self._smallest = max(map(SMALLEST.__getitem__, names))

    @cached_property
    def _computation(self) -> Computation:
        instance = self._window.reference.instance
        return Computation(
            instance, self._window.model(instance.dtype), instance.dtype, self._compute
        )

    @cached_property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype."""
        return self._computation.gradient((self._window.items, 1.0))

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, in the case's dtype."""
        return [self._computation.gradient(part) for part in self._window.parts]

    @cached_property
    def _sizes(self) -> Vector:
        return np.sum(np.abs(self._window.float64_bound.contributions), axis=0)

    @cached_property
    def quick(self) -> Vector:
        """What scaling and adding up may do to the largest element of each parameter."""
        layout = self._window.reference.layout
        terms = len(self._window.members)
        return (
            coarse_bound(self._sizes, terms, self._unit, layout, smallest=self._smallest)
            + self._unsure
        )

    @cached_property
    def summing(self) -> Vector:
        """What scaling and adding up may do to each element."""
        summed = accumulation_bound(
            self._sizes, len(self._window.members), self._unit, smallest=self._smallest
        )
        return summed + self._unsure

    @cached_property
    def _unsure(self) -> Vector:
        """How far the two float64 gradients are apart, within what is not looked for in float64."""
        if self._window.jax is None:
            return np.zeros_like(self._window.torch)
        # torch computes the derivative of expm1(x) as its value + 1, which at x = -40 is 0 in place
        # of 4e-18
        with np.errstate(invalid="ignore"):
            apart = np.abs(self._window.torch - self._window.jax)
        return np.where(np.isfinite(apart), np.fmin(apart, self._window.float64_bound.quick), 0.0)

    @cached_property
    def errors(self) -> RoundingErrors:
        """The rounding errors of the large batch in the coarsest precision that takes part."""
        return self._errors([(self._window.items, 1.0)])

    @cached_property
    def errors_of_parts(self) -> RoundingErrors | None:
        """The rounding errors of the micro-batches' gradients in the coarsest precision that takes
        part.
        """
        return self._errors(self._window.parts) if len(self._window.parts) > 1 else None

    def _errors(self, parts: Sequence[Part]) -> RoundingErrors:
        computation = self._window.float64_bound.computation
        dtype = torch_dtype(self._unit)
        return RoundingErrors(
            computation,
            parts,
            dtype,
            smallest=self._smallest,
        )

    def comparable(self, observed: Vector) -> Vector:
        """Return the gradient, with the expected value where it may be NaN or another infinity.

        Raises:
            CannotJudgeError: one of them alone is finite, and the same holds of the plain large
                batch, or of the window's summed loss: a loop may divide at its end. Or one of them
                alone is finite or has an infinity, and the plain gradient's numbers nearly leave
                the range of the precision: a loop may scale its loss.
        """
        expected = self._window.expected
        if (np.isfinite(observed) != np.isfinite(expected)).any() or other_infinity(
            observed, expected
        ).any():
            self.expect_computable()
            self._expect_finite_sums()
            if self.is_out_of_range():
                name = self._window.reference.instance.case.dtype
                raise CannotJudgeError(
                    f"a gradient of nearly the largest numbers of {name} overflows where it is"
                    " scaled"
                )
        return _comparable(self, observed, expected)

    def expect_computable(self) -> None:
        """Expect torch to compute the large batch in this precision, and all at once and in parts
        alike.

        A gradient that is finite in float64 alone excuses a case only if the numbers of the float64
        computation leave the range of the lower precision. Otherwise it is a fault.

        Raises:
            CannotJudgeError: the plain large batch fails in this precision, or overflows in it, or
                torch cannot add two gradients.
        """
        name = self._window.reference.instance.case.dtype
        where = name if self._compute is None else f"{name} under autocast {self._compute}"
        try:
            large = self.large_batch
        except RuntimeError as error:
            raise CannotJudgeError(f"the plain large batch fails in {where}: {error}") from error
        try:
            accumulated = self._computation.gradient(*self._window.parts)
        except RuntimeError as error:
            # torch has no sum of two sparse gradients in float16 on a CPU
            raise CannotJudgeError(
                f"accumulating plain gradients fails in {where}: {error}"
            ) from error
        finite = np.isfinite(self._window.expected)
        if not any((np.isfinite(gradient) != finite).any() for gradient in (large, accumulated)):
            return
        if self.is_out_of_range():
            raise CannotJudgeError(
                f"the plain gradient of a batch is finite in float64 and not in {where}, or vice"
                " versa"
            )

    def _expect_finite_sums(self) -> None:
        instance = self._window.reference.instance
        batch = instance.batch(self._window.items)
        total = float(instance.count(batch)) if instance.problem.reduction == "mean" else 1.0
        parts = [(cut, share * total) for cut, share in self._window.parts]
        sums = self._computation.gradient(*parts)
        if (np.isfinite(sums) != np.isfinite(self._window.expected)).any() and self._leave_range(
            parts
        ):
            raise CannotJudgeError(
                f"the gradient of the window's summed loss overflows {instance.case.dtype}"
            )

    def is_out_of_range(self) -> bool:
        """Return whether the numbers of the float64 computation leave, or nearly leave, the range
        of a dtype in use.
        """
        return self._leave_range([(self._window.items, 1.0), *self._window.parts])

    def _leave_range(self, parts: Sequence[Part]) -> bool:
        in_use = [
            torch_dtype(name)
            for name in (self._window.reference.instance.case.dtype, self._compute)
            if name
        ]
        narrowest = min(in_use, key=lambda dtype: torch.finfo(dtype).max)
        return leaves_range(self._window.float64_bound.computation, parts, narrowest)

    def is_torchs(self, observed: Vector) -> bool:
        """Return False: in a lower precision no gradient is told to be torch's float64 one."""
        return False


WindowBound = Float64Bound | LowPrecisionBound


def _comparable(bound: WindowBound, observed: Vector, expected: Vector) -> Vector:
    """Return a gradient, with the expected value where it may be NaN, and where rounding decides on
    an infinity.
    """
    compared = finite_or_right(observed, expected)
    other = other_infinity(compared, expected)
    if not other.any():
        return compared
    # terms that cancel leave 0 in one order and a number of either sign in others, and infinity
    # times these is NaN or either infinity; batches of other sizes may leave a zero of the other
    # sign, and 1 over it is the other infinity
    with np.errstate(invalid="ignore"):
        accumulated = np.sum(bound.contributions, axis=0)
    return np.where(
        other & ((accumulated == observed) | bound.errors.reach(observed)), expected, compared
    )


# Compare gradients within a bound whose rounding errors are drawn: as often as it takes to decide.


UNEVEN = 8.0
"""Quotient of the mean squares of two groups of `DRAWS` rounding errors from which rare errors are far larger than the
others. Normally distributed errors in four groups reach it in three of ten million cases."""

SMALL = 100_000
"""Number of elements up to which `MANY_DRAWS` are made: with more, draws take minutes."""


def compare_within(
    bound: WindowBound, evidence: Comparison, *, roughly: bool = False, accumulated: bool = True
) -> Comparison:
    """Compare two gradients with as many draws of the rounding errors as it takes to decide.

    Args:
        bound: what rounding allows.
        evidence: the gradients, and `bound.quick`.
        roughly: whether a violation may be found with `FEW_DRAWS`, whose bound is 30 times as wide.
        accumulated: whether one of the gradients is a sum of micro-batches' gradients.
    """
    if evidence.ratio <= 1:
        return evidence
    found = _compare_drawn(bound, evidence, [bound.errors], roughly)
    # micro-batches whose gradients cancel have larger rounding errors than the large batch: the
    # backward of a normalization takes out what lies along its input, and its error is of the size
    # of what it takes out
    if found.ratio > 1 and accumulated and bound.errors_of_parts is not None:
        found = _compare_drawn(bound, evidence, [bound.errors, bound.errors_of_parts], roughly)
    return found


def is_rarely_rounding(bound: WindowBound, evidence: Comparison, *, has_norm: bool = False) -> bool:
    """Return whether rounding errors as large as a difference come now and then, in some of
    `RARE_DRAWS` draws.

    So many are made only where the draws before differ in size from one group to the next, or
    through a normalization.

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
        # a normalization over two features has nearly no gradient except where rounding makes them
        # equal, which all of `MANY_DRAWS` may miss
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
    """Compare two gradients, whose rounding errors may be as large as the largest of those that are
    measured.
    """
    if roughly:
        found = _within(bound, evidence, (errors.noise(FEW_DRAWS) for errors in measured))
        if found.ratio > 1:
            return found
    found = _within(bound, evidence, (errors.likely(FEW_DRAWS) for errors in measured))
    # each draw is a backward pass, which a large model pays for
    numbers = (DRAWS, MANY_DRAWS) if len(evidence.observed) <= SMALL else (DRAWS,)
    for draws in numbers:
        if found.ratio <= 1:
            return found
        found = _within(bound, evidence, (errors.noise(draws) for errors in measured))
    return found


def _within(bound: WindowBound, evidence: Comparison, noises: Iterable[Vector]) -> Comparison:
    allowed = np.maximum(bound.quick, bound.summing + np.max([*noises], axis=0))
    return Comparison(
        evidence.layout,
        evidence.expected,
        evidence.observed,
        allowed,
    )


# One window of a case: its expected gradient by torch and by JAX, and the comparison of an observed
# one with it.


Parameters = dict[str, torch.Tensor]


class WindowReference:
    """One window's references.

    Vectors are (P,) float64, parameters flattened in the layout's order.

    Attributes:
        reference: the references of the case.
        index: the index of the window in an epoch.
        parameters: those that it is at, by name; None for the initial ones.
        members: indices of its micro-batches.
        items: indices of its items.
        reached: names of the parameters that the window's items reach.
        torch: the large-batch gradient by torch.
        bound: what rounding in the case's dtype allows.
        float64_bound: what rounding allows between torch and JAX, both in float64 whatever the
            case's dtype.
    """

    def __init__(
        self, reference: Reference, index: int, parameters: Parameters | None, compute: Compute
    ) -> None:
        self.reference = reference
        self.parameters = parameters
        instance = reference.instance
        self.index = index
        self.members = instance.case.plan.windows[index]
        self.items = instance.case.plan.window_items(index)
        try:
            gradients = gradients_of(
                instance,
                self.model(),
                self.items,
                dtype=torch.float64,
            )
        except RuntimeError as error:
            raise CannotJudgeError(f"the plain large batch fails in float64: {error}") from error
        self.reached = frozenset(name for name, g in gradients.items() if g is not None)
        self.torch = reference.flat(gradients)
        self._compute = compute
        self._is_confirmed = False
        self._make_bounds()

    def _make_bounds(self) -> None:
        self.float64_bound = Float64Bound(self, self._compute)
        exact = self.reference.instance.case.dtype == "float64"
        self.bound: WindowBound = (
            self.float64_bound if exact else LowPrecisionBound(self, self._compute)
        )

    @property
    def moved(self) -> bool:
        """Whether this is at parameters that a real optimizer has moved."""
        return self.parameters is not None

    @cached_property
    def _model64(self) -> torch.nn.Module:
        return self.reference.model(torch.float64, self.parameters)

    def model(self, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """Return a model in `dtype` at the window's parameters."""
        return (
            self._model64
            if dtype is torch.float64
            else self.reference.model(dtype, self.parameters)
        )

    @cached_property
    def parts(self) -> list[Part]:
        """The items of each micro-batch, and the factor of their loss's gradient in the window's."""
        instance = self.reference.instance
        return shared(instance, self.items, [instance.case.plan.items(j) for j in self.members])

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

    def confirm(self) -> bool:
        """Let XLA compute JAX's gradient again where numpy did, before anything is said that rests
        on it.

        Return whether it did; `expected` and the bounds are those of XLA's gradient from then on.
        """
        if self._is_confirmed or evaluator() == XLA or self.jax is None:
            return False
        self._is_confirmed = True
        by_numpy = self.jax
        with evaluated_by(XLA):
            self.jax = self.reference.by_jax(self.values, [self.items])[0]
        self._make_bounds()
        bound = self.float64_bound
        layout = self.reference.layout
        evidence = Comparison(
            layout,
            self.jax,
            by_numpy,
            bound.quick,
        )
        compared = compare_within(bound, evidence, accumulated=False)
        if compared.ratio > 1:
            programs.PROGRAMS.note_difference(
                f"JAX's large-batch gradients as numpy and as XLA evaluate them of"
                f" {_where(self, compared)}; no loop is to blame, and --jax xla has XLA alone"
                " compute"
            )
        return True

    @property
    def expected(self) -> Vector:
        """The float64 gradient that loops are held to: JAX's where there is one."""
        return self.torch if self.jax is None else self.jax

    def allowed(self, draws: int = DRAWS) -> Vector:
        """Return what rounding allows of each element, measured on so many draws: the fewer, the
        more it allows.
        """
        return np.maximum(self.bound.quick, self.bound.summing + self.bound.errors.noise(draws))

    def compare(self, observed: Vector, *, roughly: bool = False) -> Comparison:
        """Compare a gradient with the expected one, within what rounding in the case's dtype
        allows.

        Args:
            observed: (P,): the gradient.
            roughly: whether a violation may be found with a wider bound, from fewer draws of
                rounding errors.

        Raises:
            CannotJudgeError: the gradient is not finite, nor is that of the plain large batch,
                which is out of range.
        """
        return compare_within(self.bound, self.compare_quickly(observed), roughly=roughly)

    def compare_quickly(self, observed: Vector) -> Comparison:
        """Compare a gradient with the expected one, within the part of the bound that rests on no
        draws.
        """
        compared = self.bound.comparable(observed)
        return Comparison(
            self.reference.layout,
            self.expected,
            compared,
            self.bound.quick,
        )

    def contributions(self, *, summed: bool = False) -> list[Vector]:
        """Return the float64 gradient of each micro-batch's own loss, as `Problem.loss` gives it or
        summed.
        """
        instance = self.reference.instance
        model = self.model()
        cuts = (instance.case.plan.items(j) for j in self.members)
        found = (
            gradients_of(instance, model, cut, summed=summed, dtype=torch.float64) for cut in cuts
        )
        return [self.reference.flat(gradients) for gradients in found]

    @property
    def divisor(self) -> float:
        """What the sums of the micro-batches' losses are divided by."""
        instance = self.reference.instance
        return (
            float(instance.count(instance.batch(self.items)))
            if instance.problem.reduction == "mean"
            else 1.0
        )

    def accumulated(self) -> Vector:
        """Return the gradient as torch accumulates it in float64, each micro-batch's sum by itself."""
        total: Vector = (
            sum(self.contributions(summed=True), start=np.zeros_like(self.torch)) / self.divisor
        )
        return total


def float_values(model: torch.nn.Module) -> Arrays:
    """Return parameters and floating buffers by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().cpu().numpy() for n, t in tensors if t.is_floating_point()}


# Whether torch and JAX agree on a window's large-batch gradient, and who is to be looked at where
# they do not.


NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)
REPEATS = 3
"""How often a gradient that differs from JAX's is computed again, to see whether torch always returns the same."""


def disagreement(window: WindowReference, jax: Vector | None = None) -> str | None:
    """Say where torch's and JAX's large-batch gradients differ by more than rounding, if they do.

    Args:
        window: the window whose gradients are compared.
        jax: (P,), JAX's gradient of a user's problem; a window of a generated one brings its own.
    """
    by_jax = window.jax if jax is None else jax
    if by_jax is None:
        return None
    bound = window.float64_bound
    layout = window.reference.layout
    quickly = Comparison(
        layout,
        by_jax,
        window.torch,
        bound.quick,
    )
    if quickly.ratio <= 1:
        return None
    if text := _randomness(window):
        # a random gradient is no rounding error, and would widen the bound that it is held to
        return text
    compared = compare_within(bound, quickly, accumulated=False)
    if compared.ratio <= 1:
        return None
    # JAX's gradient is XLA's from now on: what differed may have been numpy's fault
    if jax is None and window.confirm():
        return disagreement(window)
    return _differing("large-batch gradients", window, compared, by_jax)


def accumulation_fault(window: WindowReference) -> str | None:
    """Say where torch's own accumulation in float64 and JAX's gradient differ by more than
    rounding, if they do.
    """
    # a fault of torch that rounding switches on and off widens the bound by which `disagreement`
    # judges the large batch; in the accumulated gradient its error is another one
    if window.jax is None:
        return None
    if text := _randomness(window):
        return text
    bound = window.float64_bound
    accumulated = np.sum(window.float64_bound.contributions, axis=0)
    compared = compare_within(
        bound,
        Comparison(
            window.reference.layout,
            window.jax,
            accumulated,
            bound.quick,
        ),
    )
    if compared.ratio <= 1:
        return None
    if window.confirm():
        return accumulation_fault(window)
    return _differing("gradients", window, compared, window.jax)


def _differing(what: str, window: WindowReference, compared: Comparison, jax: Vector) -> str:
    return (
        f"torch's and JAX's {what} of {_where(window, compared)}: "
        f"{blame(opinions(window, jax), compared.allowed)}; no loop is to blame"
    )


def precision_fault(window: WindowReference) -> str | None:
    """Say where torch's large-batch gradient in the case's lower precision is wrong by more than
    rounding, if it is.

    Raises:
        CannotJudgeError: rounding explains it after all, once in hundreds of draws, or numbers
            within the computation leave the range of the precision.
    """
    name = window.reference.instance.case.dtype
    if window.bound is window.float64_bound:
        return None
    try:
        computed = [
            (window.bound.large_batch, False),
            (np.sum(window.bound.contributions, axis=0), True),
        ]
    except RuntimeError:
        return None
    has_norm = any(isinstance(module, NORMS) for module in window.model().modules())
    for gradient, accumulated in computed:
        compared = compare_within(
            window.bound, window.compare_quickly(gradient), accumulated=accumulated
        )
        if compared.ratio > 1:
            if is_rarely_rounding(window.bound, compared, has_norm=has_norm):
                raise CannotJudgeError(
                    f"the gradient jumps where {name} rounds values to equal ones"
                )
            # torch's cosine_embedding_loss divides by a product of squares, which is infinite in
            # float16: it returns 0
            if window.bound.is_out_of_range():
                raise CannotJudgeError(
                    f"numbers within the plain gradient's computation leave the range of {name}"
                )
            by = "torch" if window.jax is None else "JAX"
            return (
                f"torch's large-batch gradient in {name} and {by}'s in float64 of"
                f" {_where(window, compared)}: the {name} computation of torch is wrong, and no"
                " loop is to blame"
            )
    return None


def _randomness(window: WindowReference) -> str | None:
    """Say where torch's float64 gradient changes from one computation to the next, if it does."""
    bound = window.float64_bound
    for _ in range(REPEATS):
        repeated = bound.computation.gradient((window.items, 1.0))
        if np.array_equal(repeated, window.torch):
            continue
        # a summation by several threads, or by atomic additions on CUDA, may take another order
        # each time
        compared = Comparison(
            window.reference.layout,
            window.torch,
            repeated,
            bound.summing,
        )
        if compared.ratio > 1:
            return (
                f"two computations of torch's float64 gradient of {_where(window, compared)}: it is"
                " not deterministic, and no loop is to blame"
            )
    return None


def _where(window: WindowReference, compared: Comparison) -> str:
    worst = compared.worst
    parameter, _ = compared.layout.place(worst.index)
    moved = ", at parameters that the optimizer has moved" if window.moved else ""
    return (
        f"{parameter} differ by {error_text(worst.error, worst.allowed)}, in window {window.index}"
        f" of case {window.reference.instance.case.digest}{moved}"
    )


def opinions(window: WindowReference, jax: Vector) -> dict[str, Vector]:
    """Return a window's gradient by every way there is: in one batch and accumulated by torch, in
    one batch by JAX.
    """
    instance = window.reference.instance
    found = {
        "torch large batch": window.torch,
        "torch accumulated": window.accumulated(),
        "JAX large batch": jax,
    }
    if (spec := instance.case.spec) is None:
        return found
    _, whole = whole_gradient(spec, window.values, window.arrays)
    found["JAX large batch in one piece"] = window.reference.join(whole)
    return found


def blame(opinions: dict[str, Vector], allowed: Vector) -> str:
    """Return which gradients agree with each other, as `a = b against c`, the largest group first."""
    groups: list[list[str]] = []
    for name, gradient in opinions.items():
        for group in groups:
            if worst_difference(gradient, opinions[group[0]], allowed).ratio <= 1:
                group.append(name)
                break
        else:
            groups.append([name])
    groups.sort(key=len, reverse=True)
    return " against ".join(" = ".join(group) for group in groups)


# The references of a case, and the cache that lets several loops share them.


MAX_REFERENCES = 512


class Reference:
    """The references of one case.

    Each window is computed once: while parameters stay, every epoch has the same.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._model64 = instance.model(torch.float64)
        trainable = {n: p for n, p in self._model64.named_parameters() if p.requires_grad}
        self.layout = Layout(tuple(trainable), tuple(tuple(p.shape) for p in trainable.values()))
        self.values64 = float_values(self._model64)
        self._windows: dict[tuple[int, Compute], WindowReference] = {}
        self._started: StartedGradients | None = None

    def window(
        self, index: int, parameters: Parameters | None = None, compute: Compute = None
    ) -> WindowReference:
        """Return a window's reference.

        Args:
            index: index of the window within an epoch.
            parameters: the parameters by name; None for the initial ones.
            compute: the autocast under which the loop computed its losses, or None.
        """
        if parameters is not None:
            return WindowReference(
                self,
                index,
                parameters,
                compute,
            )
        if (index, compute) not in self._windows:
            self._windows[index, compute] = WindowReference(
                self,
                index,
                None,
                compute,
            )
        return self._windows[index, compute]

    def flat(self, gradients: Gradients) -> Vector:
        """Return torch gradients as one float64 vector (P,), with zeros in place of None."""
        parts = []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            gradient = gradients[name]
            parts.append((torch.zeros(shape) if gradient is None else gradient).reshape(-1))
        flat: Vector = torch.cat([p.to("cpu", torch.float64) for p in parts]).numpy()
        return flat

    def join(self, arrays: Arrays) -> Vector:
        """Return numpy gradients as one vector (P,)."""
        return np.concatenate([arrays[name].reshape(-1) for name in self.layout.names])

    def prepare(self) -> None:
        """Let other threads load or compile the programs of `jax`."""
        spec = self.instance.accumulable_spec
        arrays = self.instance.arrays
        if (
            spec is not None
            and arrays is not None
            and self._started is None
            and "jax" not in vars(self)
        ):
            self._started = StartedGradients(
                spec,
                self.values64,
                arrays,
                self._items,
            )

    def start(self) -> None:
        """Compute every window's gradient by torch, while other threads load or compile the
        programs of `jax`.
        """
        self.prepare()
        for index in range(len(self.instance.case.plan.windows)):
            self.window(index)

    @property
    def _items(self) -> list[range]:
        plan = self.instance.case.plan
        return [plan.window_items(w) for w in range(len(plan.windows))]

    @cached_property
    def jax(self) -> list[Vector]:
        """Each window's gradient by JAX, for a generated problem that is separable over samples."""
        if self._started is None:
            return self.by_jax(self.values64, self._items)
        # its result can be taken once, and its arrays are freed with it
        started = self._started
        self._started = None
        return [self.join(gradient) for _, gradient in started.result()]

    def by_jax(self, values: Arrays, windows: Sequence[range]) -> list[Vector]:
        """Return each window's gradient by JAX at the given parameters and floating buffers."""
        spec = self.instance.accumulable_spec
        arrays = self.instance.arrays
        assert spec is not None
        assert arrays is not None
        return [
            self.join(gradient)
            for _, gradient in large_batch_gradients(spec, values, arrays, windows)
        ]

    def model(self, dtype: torch.dtype | None, parameters: Parameters | None) -> torch.nn.Module:
        """Return a model in `dtype` with the given parameters, or with the initial ones where they
        are None.
        """
        # all windows share it: who moves its values puts them back
        if dtype is torch.float64 and parameters is None:
            return self._model64
        model = self.instance.model(dtype)
        if parameters is not None:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in parameters:
                        p.copy_(parameters[name])
        return model

    @cached_property
    def finding(self) -> str | None:
        """The first disagreement between torch and JAX on this generated case, or None.

        No loop is involved.
        """
        for index in range(len(self.instance.case.plan.windows)):
            if text := disagreement(self.window(index)):
                return text
        return None


class References:
    """The references of the latest `MAX_REFERENCES` cases, shared by all loops that are judged on
    one case.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, str], Reference] = OrderedDict()

    def get(self, case: Case, problem: Problem | None) -> Reference:
        """Return the reference of a case."""
        # numpy's gradient is not to stand for XLA's where XLA alone computes
        key = (case.digest, id(problem), evaluator())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        reference = self._kept[key] = Reference(instance_of(case, problem))
        if len(self._kept) > MAX_REFERENCES:
            self._kept.popitem(last=False)
        return reference

    def prepare(self, case: Case) -> None:
        """Let other threads load or compile the programs of JAX for a case, if it is a generated
        one that needs any.
        """
        if case.spec is not None and is_accumulable(case.spec):
            self.get(case, None).prepare()


REFERENCES = References()
