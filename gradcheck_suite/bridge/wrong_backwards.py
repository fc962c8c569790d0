"""Custom `autograd.Function`s whose backward is not the derivative of their forward, as JAX computes it.

Each is called by itself on the arguments that the loss gives it, in float64. The gradient of a random combination of
its outputs is computed by its own backward and by JAX, which differentiates the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from gradcheck_suite.bridge.custom_gradients import functions_of, restored
from gradcheck_suite.bridge.errors import BridgeError
from gradcheck_suite.bridge.exporting import LossFunction
from gradcheck_suite.bridge.lowered import arguments_of, lower
from gradcheck_suite.bridge.own_backwards import ACCEPTED
from gradcheck_suite.execution.batches import map_leaves
from gradcheck_suite.execution.custom_functions import Forward, replaced_forwards
from gradcheck_suite.schema.contract import Batch

MOST = 4
"""Number of calls of a function that are judged, each of other shapes or other arguments than the ones before."""
RELATIVE = 1e-10
"""Difference that is allowed in float64, over the largest entry of the argument's gradient."""
UNIT = {False: 2.0**-53, True: 2.0**-24}
DRAWS, NOISE = 5, 16.0
"""Number of times that the inputs are moved by one roundoff, and the multiple of what this changes that is allowed."""


@dataclass(frozen=True)
class WrongBackward:
    """A custom function whose backward is not the derivative of its forward.

    Attributes:
        function: the class.
        argument: number of the argument whose gradient differs, the context not counted.
        error: largest difference of an entry, over the largest entry of the two gradients.
        allowed: likewise, what rounding may do.
        factor: the number by which the derivative is multiplied, where that is all, and infinity where the derivative
            is 0; None otherwise.
    """

    function: type
    argument: int
    error: float
    allowed: float
    factor: float | None

    def __str__(self) -> str:
        name = self.function.__name__
        if self.factor == np.inf:
            what = "not 0, and the derivative is"
        elif self.factor == 0:
            what = "0 or None, and the derivative is not"
        elif self.factor is not None and (factor := f"{self.factor:.6g}") != "1":
            what = f"{factor} times the derivative"
        else:
            what = f"off by {self.error:.2g} of its largest entry, where rounding allows {self.allowed:.1g}"
        return (
            f"{name}.backward is not the derivative of {name}.forward, which JAX computes: the gradient of argument "
            f"{self.argument} is {what}. If that is on purpose, as in a straight-through estimator, call "
            f"gradcheck_suite.bridge.accept_backward({name})"
        )


def wrong_backwards(model: nn.Module, loss: LossFunction, batch: Batch) -> tuple[WrongBackward, ...]:
    """Return the custom functions of a loss whose backward is not the derivative of their forward, one line for each.

    Functions for which `accept_backward` was called are left out, and so are those that cannot be called by
    themselves: they show in the gradient of the whole loss. The arguments and errors are those of `lower`.
    """
    functions = functions_of(model, loss, batch) - ACCEPTED - {CheckpointFunction}
    if not functions:
        return ()
    calls: dict[str, _Call] = {}

    def recording(kind: type) -> Any:
        def made(forward: Forward, first: int) -> Forward:
            def recorded(*arguments: Any) -> Any:
                call = _Call(kind, arguments[first:])
                calls.setdefault(call.signature, call)
                return forward(*arguments)

            return recorded

        return made

    with restored(model), replaced_forwards((kind, recording(kind)) for kind in functions), torch.enable_grad():
        loss(model, map_leaves(torch.clone, batch))
    found: list[WrongBackward] = []
    for kind in sorted(functions, key=lambda kind: kind.__qualname__):
        for call in [call for call in calls.values() if call.kind is kind][:MOST]:
            if wrong := _judged(call):
                found.append(wrong)
                break
    return tuple(found)


class _Call(nn.Module):
    """A call of a custom function as a module: its parameters are the arguments that require a gradient."""

    def __init__(self, kind: Any, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.kind = kind
        leaves, self._spec = pytree.tree_flatten(list(arguments))
        self.numbers: list[int] = []
        self._leaves: list[Any] = []
        described = []
        for i, value in enumerate(leaves):
            if not isinstance(value, torch.Tensor):
                self._leaves.append(value)
                described.append(repr(value))
                continue
            copy = value.detach().clone()
            copy = copy.double() if copy.is_floating_point() else copy
            self._leaves.append(None)
            if value.requires_grad and copy.is_floating_point():
                self.register_parameter(f"argument_{i}", nn.Parameter(copy))
                self.numbers.append(i)
            else:
                self.register_buffer(f"argument_{i}", copy)
            described.append(f"{copy.dtype}{tuple(copy.shape)}{value.requires_grad}")
        self.signature = f"{id(kind)} {' '.join(described)}"

    def forward(self) -> list[torch.Tensor]:
        """Return the outputs of floating point that are differentiable."""
        leaves = list(self._leaves)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            leaves[int(name.removeprefix("argument_"))] = tensor.clone()  # the function may write to it
        out = self.kind.apply(*pytree.tree_unflatten(leaves, self._spec))
        several = out if isinstance(out, tuple) else (out,)
        return [x for x in several if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _combined(call: nn.Module, weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x * w).sum().double() for x, w in zip(call(), weights, strict=True)]).sum()


def _own_gradient(call: _Call, weights: list[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
    wanted = list(call.parameters())
    found = torch.autograd.grad(_combined(call, weights), wanted, allow_unused=True)
    return [np.zeros(tuple(x.shape)) if g is None else g.numpy() for x, g in zip(wanted, found, strict=True)]


def _judged(call: _Call) -> WrongBackward | None:
    generator = torch.Generator().manual_seed(0)
    try:
        outputs = call()
        weights = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) * x.requires_grad for x in outputs
        ]
        own = _own_gradient(call, weights)
        lowered = lower(call, _combined, weights)
        by_name = lowered.value_and_gradient(*arguments_of(call, weights), jit=False)[1]
        derivative = [by_name[name] for name in lowered.trainable]
        unit = UNIT[bool(lowered.narrow)]
        noise = _noise(call, weights, own, unit, generator)
    except (BridgeError, RuntimeError, TypeError, ValueError):
        return None  # it cannot be called by itself
    relative = max(RELATIVE, 2 * unit * len(lowered.narrow))
    for number, got, right, rounding in zip(call.numbers, own, derivative, noise, strict=True):
        if wrong := _compared(call.kind, number, got, right, (relative, rounding)):
            return wrong
    return None


def _noise(
    call: _Call,
    weights: list[torch.Tensor],
    own: list[npt.NDArray[np.float64]],
    unit: float,
    generator: torch.Generator,
) -> list[float]:
    """Return by how much the function's own gradient changes where its inputs change by one roundoff."""
    largest = [0.0] * len(own)
    points = [x.detach().clone() for x in call.parameters()]
    for _ in range(DRAWS):
        with torch.no_grad():
            for x, point in zip(call.parameters(), points, strict=True):
                x.copy_(point * (1 + unit * torch.randint(-1, 2, point.shape, generator=generator)))
        for i, moved in enumerate(_own_gradient(call, weights)):
            change = np.abs(moved - own[i])
            largest[i] = max(largest[i], float(np.max(change, initial=0, where=np.isfinite(change))))
    with torch.no_grad():
        for x, point in zip(call.parameters(), points, strict=True):
            x.copy_(point)
    return largest


def _compared(
    kind: type,
    number: int,
    got: npt.NDArray[np.float64],
    right: npt.NDArray[np.float64],
    tolerances: tuple[float, float],
) -> WrongBackward | None:
    relative, rounding = tolerances
    with np.errstate(all="ignore"):
        off = np.where((got == right) | (np.isnan(got) & np.isnan(right)), 0, np.abs(got - right))
    largest = max(float(np.max(np.abs(x), initial=0, where=np.isfinite(x))) for x in (got, right))
    allowed = relative * largest + NOISE * rounding
    worst = float(np.max(np.where(np.isnan(off), np.inf, off), initial=0))
    if worst <= allowed:
        return None
    factor: float | None = np.inf
    if np.any(right):
        with np.errstate(all="ignore"):
            factor = float(np.sum(got * right) / np.sum(right * right))
            factor = factor if np.max(np.abs(got - factor * right)) <= allowed else None
    return WrongBackward(kind, number, worst / (largest or 1.0), allowed / (largest or 1.0), factor)
