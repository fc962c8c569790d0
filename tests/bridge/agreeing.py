"""Compare a whole loss in torch and in JAX: its value, gradient and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge import Lowered, arguments_of, lower

TOLERANCE = 1e-10
"""Of the largest entry of all gradients."""


@dataclass(frozen=True)
class Agreement:
    """The differences between torch and JAX on one loss.

    Attributes:
        lowered: the loss in JAX.
        loss: |JAX - torch|, over the loss where that exceeds 1.
        gradient: the largest difference of an entry, over the largest entry of all gradients.
        allowed: how large it may be.
    """

    lowered: Lowered
    loss: float
    gradient: float
    allowed: float


def assert_agrees(
    model: nn.Module, loss: Any, batch: Any, *, tolerance: float = TOLERANCE, jit: bool = True
) -> Lowered:
    """Assert that JAX's loss, gradient and buffers agree with torch's; return the lowered loss."""
    __tracebackhide__ = True
    return assert_agreement(model, loss, batch, tolerance=tolerance, jit=jit).lowered


def assert_agreement(
    model: nn.Module,
    loss: Any,
    batch: Any,
    *,
    tolerance: float | Callable[[Lowered], float] = TOLERANCE,
    jit: bool = True,
) -> Agreement:
    """Assert that JAX's loss, gradient and buffers agree with torch's; return the differences."""
    __tracebackhide__ = True
    fresh = copy.deepcopy(model)  # some models keep tensors of their last forward
    lowered = lower(model, loss, batch)
    allowed = tolerance(lowered) if callable(tolerance) else tolerance
    got, gradient, buffers = lowered.value_and_gradient(*arguments_of(model, batch), jit=jit)
    model = fresh
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert gradient.keys() == trainable.keys()
    arrays = {
        name: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.to_dense().numpy(force=True)
        for name, p in trainable.items()
    }
    assert abs(got - value.item()) <= allowed * max(1.0, abs(value.item())), (
        f"loss: {got}, expected {value.item()}"
    )
    largest = max(float(np.abs(g).max(initial=0)) for g in arrays.values())
    farthest = 0.0
    for name, want in arrays.items():
        worst = float(np.abs(gradient[name] - want).max(initial=0))
        assert worst <= allowed * largest, (
            f"{name}: off by {worst:.2g}, the largest entry is {largest:.2g}"
        )
        farthest = max(farthest, worst / (largest or 1.0))
    after = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    size = max(
        (float(np.abs(b).max(initial=0, where=np.isfinite(b))) for b in after.values()), default=0.0
    )
    for name, buffer in after.items():
        # the running mean of a layer without bias after a normalization is rounding errors
        np.testing.assert_allclose(
            buffers[name], buffer, rtol=max(allowed, 1e-12), atol=1e-15 * size, err_msg=name
        )
    return Agreement(
        lowered, abs(got - value.item()) / max(1.0, abs(value.item())), farthest, allowed
    )


def assert_exported_agrees(op: Any, args: Any, kwargs: Any) -> None:
    """Assert that the exported program of one call agrees with torch in value and gradient."""
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    moving = [x for x in tensors if x.requires_grad]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        parameters, still = iter(model), iter(batch)
        factor = next(parameters)
        full = [
            x if not isinstance(x, torch.Tensor) else next(parameters if x.requires_grad else still)
            for x in leaves
        ]
        a, k = pytree.tree_unflatten(full, spec)
        outs = [
            torch.view_as_real(x) if x.is_complex() else x for x in pytree.tree_leaves(op(*a, **k))
        ]
        return sum(factor * (out.double() + 1).sin().sum() for out in outs)

    model = nn.ParameterList(
        [torch.ones((), dtype=torch.float64), *(x.detach().clone() for x in moving)]
    )
    assert_agrees(model, loss, [x for x in tensors if not x.requires_grad], jit=False)
