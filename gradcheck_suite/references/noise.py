"""Monte Carlo rounding error of a gradient: the same gradient in another dtype, under autocast, at perturbed values.

The rounding error of a gradient is measured by Monte Carlo arithmetic (D. S. Parker, UCLA CSD-970002, 1997) of its
first operations. Every parameter and input is moved by one ulp up or down or not at all; whole numbers among the inputs
are not moved, since they may be class labels. The loss is multiplied by a factor that is not a power of two, and the
gradient is divided by it, so that operations that are exact for the case's values (products with 1/2, ones and zeros)
round, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradcheck_suite.execution.autocast import Compute, autocast_context
from gradcheck_suite.execution.batches import map_leaves
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.numerics.bounds import DRAWS, noise_bound, summation_bound
from gradcheck_suite.numerics.comparison import Layout, Vector
from gradcheck_suite.references.random_rounding import RandomRounding
from gradcheck_suite.schema.contract import Batch

Part = tuple[range, float]
"""Some items, and the factor of their loss's gradient in the window's gradient."""


def shared(instance: Instance, window: range, cuts: Sequence[range]) -> list[Part]:
    """Return parts of a window's items, each with the factor of its gradient in the window's gradient."""
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

    def gradient(self, *parts: Part) -> Vector:
        """Return the sum of the parts' gradients, (P,); each loss is multiplied by its factor before backward."""
        return self._gradient([(self._batch(items), share) for items, share in parts])

    def rounded_at_random(self, part: Part, draws: int = DRAWS) -> Vector:
        """Return the mean squared change of a part's gradient under random rounding of every operation, (P,).

        The centre is the unperturbed gradient of the same framework: a difference between two frameworks is not
        rounding error.
        """
        centre = self.gradient(part)
        total = np.zeros_like(centre)
        for draw in range(draws):
            gradient = self._with_random_rounding(part, draw)
            with np.errstate(invalid="ignore", over="ignore"):
                square = (gradient - centre) ** 2
            total += np.where(np.isfinite(square), square, 0.0)
        return total / draws

    def _with_random_rounding(self, part: Part, draw: int) -> Vector:
        try:
            with RandomRounding(draw):
                return self.gradient(part)
        except (RuntimeError, NotImplementedError, ValueError):
            # a loss may reject values outside of its range: only parameters and inputs are moved then
            items, share = part
            values = [p.detach().clone() for p in self._model.parameters()]
            try:
                return self._drawn(draw, [(self._batch(items), share)], values)
            finally:
                self._put(values)

    def mean_square(self, parts: Sequence[Part], centre: Vector, draws: int = DRAWS) -> Vector:
        """Return the mean over the Monte Carlo draws of the squared distance from `centre`, (P,)."""
        batches = [(self._batch(items), share) for items, share in parts]
        values = [p.detach().clone() for p in self._model.parameters()]
        total = np.zeros_like(centre)
        try:
            for draw in range(draws):
                with np.errstate(invalid="ignore", over="ignore"):
                    square = (self._drawn(draw, batches, values) - centre) ** 2
                total += np.where(np.isfinite(square), square, 0.0)
        finally:
            self._put(values)
        return total / draws

    def _drawn(self, draw: int, batches: Sequence[tuple[Batch, float]], values: Sequence[torch.Tensor]) -> Vector:
        generator = torch.Generator().manual_seed(draw)
        scale = 0.5 ** float(torch.rand((), generator=generator))
        self._put([_moved(value, generator) for value in values])
        moved = [(map_leaves(lambda t: _moved_data(t, generator), batch), share) for batch, share in batches]
        try:
            return self._gradient(moved, scale)
        except (RuntimeError, NotImplementedError, ValueError):
            # a loss may reject a target outside of its range: only the parameters are moved then
            return self._gradient(batches, scale)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self._model.parameters(), values, strict=True):
                p.copy_(value)

    def _batch(self, items: range) -> Batch:
        if items not in self._batches:
            self._batches[items] = self.instance.batch(items, self._dtype)
        return self._batches[items]

    def _gradient(self, batches: Sequence[tuple[Batch, float]], scale: float = 1.0) -> Vector:
        with autocast_context(self.instance.device, self._compute):
            losses = [self.instance.problem.loss(self._model, batch) * (share * scale) for batch, share in batches]
        reaching = [loss for loss in losses if loss.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(self._trainable)
        if reaching:
            found = torch.autograd.grad(reaching, self._trainable, allow_unused=True)
        parts = [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else _flat(g)
            for p, g in zip(self._trainable, found, strict=True)
        ]
        flat: Vector = torch.cat(parts).numpy()
        return flat / scale


def float64_noise(
    computation: Computation, window: range, cuts: Sequence[range], layout: Layout, draws: int = DRAWS
) -> Vector:
    """Return a bound on the difference of two correct float64 computations of a window's gradient, (P,).

    Args:
        computation: a computation in float64.
        window: the items of the window.
        cuts: the items of each micro-batch.
        layout: the layout of the gradient.
        draws: number of Monte Carlo draws.
    """
    instance = computation.instance
    items = [range(i, i + 1) for i in window]
    try:
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, items)]
    except (RuntimeError, ValueError):
        # a user's model may reject a single item, but not a micro-batch
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, cuts)]
    drawn = noise_bound(computation.rounded_at_random((window, 1.0), draws), draws)
    return drawn + summation_bound(np.sum(sizes, axis=0), len(window), layout)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.reshape(-1).to("cpu", torch.float64)


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with each element moved by an ulp or two away from zero, towards zero, or not at all."""
    if not tensor.is_floating_point():
        return tensor
    steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * steps)


def _moved_data(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return perturbed data; whole numbers are not moved.

    They may be class labels: a loss that tests whether its target is 1 or -1 would take 1.0001 for neither, and the
    change of its value would not be a rounding error.
    """
    moved = _moved(tensor, generator)
    return torch.where(tensor == tensor.round(), tensor, moved) if tensor.is_floating_point() else moved
