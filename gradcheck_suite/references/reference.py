"""What each window's gradient should be: by torch and by JAX, and what rounding may do to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from gradcheck_suite.catalogue import is_accumulable
from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.execution.autocast import Compute, coarsest
from gradcheck_suite.execution.instance import Instance, generated_instance, user_instance
from gradcheck_suite.numerics.bounds import DRAWS, accumulation_bound, farthest, noise_bound, quick_bound
from gradcheck_suite.numerics.comparison import Comparison, Layout, Vector, worst_difference
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.accumulated import accumulated_gradient, whole_gradient
from gradcheck_suite.references.jax_reference import large_batch_gradients
from gradcheck_suite.references.noise import Computation, Part, float64_noise, shared
from gradcheck_suite.references.torch_reference import Gradients, gradients_of
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.spec import ProblemSpec

MAX_REFERENCES = 512
Parameters = dict[str, torch.Tensor]


class CannotJudgeError(Exception):
    """The case itself cannot run here: the plain large batch fails before any loop is involved."""


class Reference:
    """The references of one case. Windows are computed once: with parameters held still, every epoch has the same."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._model64 = instance.model(torch.float64)
        trainable = {n: p for n, p in self._model64.named_parameters() if p.requires_grad}
        self.layout = Layout(tuple(trainable), tuple(tuple(p.shape) for p in trainable.values()))
        self.values64 = _values(self._model64)
        self._windows: dict[tuple[int, Compute], Window] = {}

    def window(self, index: int, parameters: Parameters | None = None, compute: Compute = None) -> Window:
        """Return a window's reference.

        Args:
            index: of the window.
            parameters: at which, if not at the drawn ones.
            compute: of the autocast that the loop computed its losses under, or None.
        """
        if parameters is not None:
            return Window(self, index, parameters, compute)
        if (index, compute) not in self._windows:
            self._windows[index, compute] = Window(self, index, None, compute)
        return self._windows[index, compute]

    def flat(self, gradients: Gradients) -> Vector:
        """Return gradients as one float64 vector, zeros in place of None."""
        parts = [
            torch.zeros(shape).reshape(-1) if (g := gradients[name]) is None else g.reshape(-1)
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        ]
        flat: Vector = torch.cat([p.to("cpu", torch.float64) for p in parts]).numpy()
        return flat

    def join(self, arrays: Arrays) -> Vector:
        """Return gradients in numpy as one vector."""
        return np.concatenate([arrays[name].reshape(-1) for name in self.layout.names])

    @cached_property
    def jax(self) -> list[Vector]:
        """Each window's gradient by JAX, of a generated problem that is a sum over items."""
        plan = self.instance.case.plan
        return self.by_jax(self.values64, [plan.window_items(w) for w in range(len(plan.windows))])

    def by_jax(self, values: Arrays, windows: Sequence[range]) -> list[Vector]:
        """Return each window's gradient by JAX at parameters and floating buffers given by name."""
        spec, arrays = self.instance.case.problem, self.instance.arrays
        assert isinstance(spec, ProblemSpec)
        assert arrays is not None
        return [self.join(gradient) for _, gradient in large_batch_gradients(spec, values, arrays, windows)]

    def model(self, dtype: torch.dtype | None, parameters: Parameters | None) -> torch.nn.Module:
        """Return a model in `dtype` at given parameters or at the drawn ones."""
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
        """What torch and JAX disagree about on this generated case, or None. No loop is involved."""
        for index in range(len(self.instance.case.plan.windows)):
            if text := self.window(index).disagreement():
                return text
        return None


class Window:
    """One window's gradient by each reference, flat, in float64, and what rounding may do to it."""

    def __init__(self, reference: Reference, index: int, parameters: Parameters | None, compute: Compute) -> None:
        self.reference, self._parameters = reference, parameters
        self._compute = None if reference.instance.case.dtype == "float64" else compute
        plan = reference.instance.case.plan
        self.index, self.members, self.items = index, plan.windows[index], plan.window_items(index)
        model = reference.model(torch.float64, parameters)
        try:
            gradients = gradients_of(reference.instance, model, self.items, dtype=torch.float64)
        except (RuntimeError, NotImplementedError) as error:
            raise CannotJudgeError(f"the plain large batch fails in float64: {error}") from error
        self.reached = frozenset(name for name, g in gradients.items() if g is not None)
        self.torch = reference.flat(gradients)
        self._bounds: dict[int, Vector] = {}

    @cached_property
    def jax(self) -> Vector | None:
        """The gradient by JAX, of a generated problem that is a sum over items."""
        spec = self.reference.instance.case.problem
        if not isinstance(spec, ProblemSpec) or not is_accumulable(spec):
            return None
        if self._parameters is None:
            return self.reference.jax[self.index]
        return self.reference.by_jax(_values(self.model()), [self.items])[0]

    @property
    def expected(self) -> Vector:
        """The float64 gradient that loops are held to: JAX's where there is one."""
        return self.torch if self.jax is None else self.jax

    def allowed(self, draws: int = DRAWS) -> Vector:
        """Return what rounding allows of each element, measured on so many draws: the fewer, the more it allows."""
        if draws not in self._bounds:
            exact = self.reference.instance.case.dtype == "float64"
            self._bounds[draws] = self._measured(draws) if exact else self._low_precision(draws)
        return self._bounds[draws]

    @property
    def moved(self) -> bool:
        """Whether this is at parameters that a real optimizer has moved."""
        return self._parameters is not None

    def model(self) -> torch.nn.Module:
        """Return the float64 model at the window's parameters."""
        return self.reference.model(torch.float64, self._parameters)

    def is_torchs(self, observed: Vector) -> bool:
        """Whether a float64 gradient is that of torch's large batch, within the part of the bound that needs no draws.

        No loop is to blame for it then, whatever JAX says, and JAX is not asked.
        """
        if self.reference.instance.case.dtype != "float64":
            return False
        return worst_difference(observed, self.torch, quick_bound(self.torch, len(self.members))).ratio <= 1

    def compare(self, observed: Vector, *, draws: int = DRAWS) -> Comparison:
        """Compare a gradient with the expected one, within what rounding in the case's dtype allows.

        The dear part of the bound, noise that is drawn, is asked for only where the rest of it does not suffice.
        """
        quick = self.compare_steady(observed)
        if quick.ratio <= 1:
            return quick
        layout, allowed = self.reference.layout, self.allowed(draws)
        comparison = Comparison(layout, self.expected, self._alike(observed), allowed)
        if comparison.ratio <= 1 or self._parameters is None or self.jax is None:
            return comparison
        # where a real optimizer has taken a model to saturation, one framework's formula may cancel to exactly 0 and
        # the other's to a rounding of large terms: the loop computes with torch, whose own large batch it may match
        by_torch = Comparison(layout, self.torch, comparison.observed, allowed)
        return min(comparison, by_torch, key=lambda found: found.ratio)

    def compare_steady(self, observed: Vector) -> Comparison:
        """Compare a gradient with the expected one, within the part of the bound that rests on no draws."""
        exact = self.reference.instance.case.dtype == "float64"
        steady = quick_bound(self.expected, len(self.members)) if exact else self._steady
        return Comparison(self.reference.layout, self.expected, self._alike(observed), steady)

    def _alike(self, observed: Vector) -> Vector:
        """Let infinity and NaN be one in lower precisions: what overflows first decides which of them comes out."""
        if self.reference.instance.case.dtype == "float64":
            return observed
        return np.where(np.isfinite(observed) | np.isfinite(self.expected), observed, self.expected)

    @cached_property
    def large_batch(self) -> Vector:
        """The window's gradient in one batch by torch, in the case's dtype and under the loop's autocast."""
        if self.reference.instance.case.dtype == "float64":
            return self.torch
        return self._in_dtype.gradient((self.items, 1.0))

    @cached_property
    def contributions(self) -> list[Vector]:
        """Each micro-batch's part of the window's gradient, computed likewise."""
        exact = self.reference.instance.case.dtype == "float64"
        computation = self._in_float64 if exact else self._in_dtype
        return [computation.gradient(part) for part in self._parts]

    @cached_property
    def _parts(self) -> list[Part]:
        plan = self.reference.instance.case.plan
        return shared(self.reference.instance, self.items, [plan.items(j) for j in self.members])

    @cached_property
    def _in_float64(self) -> Computation:
        return Computation(self.reference.instance, self.model(), torch.float64)

    @cached_property
    def _in_dtype(self) -> Computation:
        instance = self.reference.instance
        return Computation(
            instance, self.reference.model(instance.dtype, self._parameters), instance.dtype, self._compute
        )

    def _measured(self, draws: int) -> Vector:
        """Return the bound in float64."""
        cuts = [items for items, _ in self._parts]
        noise = float64_noise(self._in_float64, self.items, cuts, self.reference.layout, draws)
        return quick_bound(self.expected, len(self.members)) + noise

    @cached_property
    def _steady(self) -> Vector:
        """The part of the bound in a lower precision that no chance is in."""
        name = self.reference.instance.case.dtype
        where = name if self._compute is None else f"{name} under autocast {self._compute}"
        try:
            large, low = self.large_batch, self.contributions
        except (RuntimeError, NotImplementedError) as error:
            raise CannotJudgeError(f"the plain large batch fails in {where}: {error}") from error
        with np.errstate(invalid="ignore"):
            accumulated = np.sum(low, axis=0)
        finite = np.isfinite(self.expected)
        if any((np.isfinite(gradient) != finite).any() for gradient in (large, accumulated)):
            raise CannotJudgeError(
                f"the plain gradient of a batch is finite in float64 and not in {where}, or vice versa"
            )
        high = [self._in_float64.gradient(part) for part in self._parts]
        sizes = np.sum([np.maximum(np.abs(a), np.abs(b)) for a, b in zip(low, high, strict=True)], axis=0)
        rounding = farthest(self.expected, [large, accumulated])
        unit = coarsest(name, self._compute)
        assert unit is not None
        return rounding + accumulation_bound(sizes, len(self.members), unit)

    @cached_property
    def _float64_bound(self) -> Vector:
        """What rounding allows between torch and JAX, both in float64 whatever the case's dtype."""
        exact = self.reference.instance.case.dtype == "float64"
        return self.allowed() if exact else self._measured(DRAWS)

    def _low_precision(self, draws: int) -> Vector:
        """Return the bound in a lower precision."""
        return self._steady + noise_bound(self._in_dtype.mean_square(self._parts, self.expected, draws), draws)

    def disagreement(self, other: Vector | None = None) -> str | None:
        """Say where torch's and JAX's large-batch gradients differ by more than rounding, if they do.

        Args:
            other: JAX's gradient of a user's problem; a generated one brings its own.
        """
        jax = self.jax if other is None else other
        if jax is None or self._agrees(jax):
            return None
        bound = self._float64_bound
        worst = worst_difference(self.torch, jax, bound)
        parameter, _ = self.reference.layout.place(worst.index)
        return (
            f"torch's and JAX's large-batch gradients of {parameter} differ by "
            f"{error_text(worst.error, worst.allowed)}, in window {self.index} of case "
            f"{self.reference.instance.case.digest}: {blame(self.opinions(jax), bound)}; no loop is to blame"
        )

    def _agrees(self, jax: Vector) -> bool:
        quick = worst_difference(self.torch, jax, quick_bound(jax, 1))
        return quick.ratio <= 1 or worst_difference(self.torch, jax, self._float64_bound).ratio <= 1

    def opinions(self, jax: Vector) -> dict[str, Vector]:
        """Return this window's gradient by every way there is: large batch and accumulated, in torch and in JAX."""
        reference = self.reference
        instance, spec = reference.instance, reference.instance.case.problem
        model = reference.model(torch.float64, self._parameters)
        by_torch = {"torch large batch": self.torch, "torch accumulated": self.accumulated()}
        if not isinstance(spec, ProblemSpec):
            return {**by_torch, "JAX large batch": jax}
        arrays, values = self._arrays(), _values(model)
        sizes = [instance.case.plan.micro_batches[j] for j in self.members]
        _, whole = whole_gradient(spec, values, arrays)
        return {
            **by_torch,
            "JAX large batch": jax,
            "JAX large batch in one piece": reference.join(whole),
            "JAX accumulated": reference.join(accumulated_gradient(spec, values, arrays, sizes)),
        }

    def accumulated(self) -> Vector:
        """Return the gradient as torch accumulates it in float64, each micro-batch's sum by itself."""
        instance, model = self.reference.instance, self.model()
        plan, total = instance.case.plan, np.zeros_like(self.torch)
        for j in self.members:
            part = gradients_of(instance, model, plan.items(j), summed=True, dtype=torch.float64)
            total += self.reference.flat(part)
        if instance.problem.reduction == "mean":
            total /= float(instance.count(instance.batch(self.items)))
        return total

    def _arrays(self) -> Arrays:
        arrays = self.reference.instance.arrays
        assert arrays is not None
        return {name: array[self.items.start : self.items.stop] for name, array in arrays.items()}


def _values(model: torch.nn.Module) -> Arrays:
    """Return parameters and floating buffers by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().cpu().numpy() for n, t in tensors if t.is_floating_point()}


def blame(opinions: dict[str, Vector], allowed: Vector) -> str:
    """Say which opinions agree with each other, the largest group first: who stands alone is to be looked at."""
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


class References:
    """References by case, the latest `MAX_REFERENCES` of them, so that several loops judged on one case share them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Reference] = OrderedDict()

    def get(self, case: Case, problem: Problem | None) -> Reference:
        """Return the reference of a case."""
        key = (case.digest, id(problem))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        instance = generated_instance(case) if problem is None else user_instance(case, problem)
        reference = self._kept[key] = Reference(instance)
        if len(self._kept) > MAX_REFERENCES:
            self._kept.popitem(last=False)
        return reference


REFERENCES = References()
