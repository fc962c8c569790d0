"""Calls of loss functions, and the cotangents that backward hands to their results.

A mean that divides by n and receives the cotangent c weighs each of its items c / n, a sum weighs each c. An unreduced
loss receives a cotangent for each element: the weight itself. Where the user has multiplied its elements by weights of
the samples, the cotangent of the products is the weight of each sample beside those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from gradcheck_suite.live.recording.graph import mark
from gradcheck_suite.live.recording.losses import Counted, Number
from gradcheck_suite.live.recording.places import Place
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF

DECLARED = "objective"
"""The name of a call that `gradcheck_suite.objective` declares."""


@dataclass(eq=False)
class Call:
    """One call of a loss function whose result requires a gradient.

    Attributes:
        name: of the function.
        place: of the call.
        counted: what it counts.
        target: storage address, first byte and last byte of the target: parts of one tensor are told from whole ones.
        declared: the count by which the trainer has it divided, or None where that is not known.
        inner: whether the call is part of another one that was declared, or of a gradient that is not accumulated.
    """

    name: str
    place: Place
    counted: Counted
    target: tuple[int, int, int] | None
    inner: bool = False
    declared: Any = None
    summand: torch.Tensor | None = None


@dataclass(eq=False)
class Summands:
    """The cotangent of the elements that a reduction adds up, and that an unreduced loss is part of.

    Attributes:
        low: its smallest element.
        high: its largest element.
        elements: number of its elements.
        total: sum of the cotangent of the loss: `high` times the sum of the samples' weights.
    """

    low: Number
    high: Number
    elements: int
    total: Number


@dataclass(eq=False)
class Received:
    """The cotangent that one backward pass handed to a call.

    Attributes:
        call: the call.
        low: the smallest weight of an item that is not 0; with `high` equal where all items weigh the same.
        high: the largest weight of an item.
        items: what the weights are spread over: the divisor of a mean, the elements with a weight for `"none"`.
        unit: unit roundoff of the cotangent.
        ordinal: index of the call among those of its line in this backward pass, in the order of the calls.
        summands: of an unreduced loss whose elements the user has multiplied before a reduction.
    """

    call: Call
    low: Number
    high: Number
    items: Number
    unit: float
    ordinal: int = field(default=0)
    summands: Summands | None = None

    def settle(self) -> None:
        """Turn what is on a device into numbers; waits for the device."""
        self.low, self.high, self.items = float(self.low), float(self.high), float(self.items)
        if (of := self.summands) is not None:
            of.low, of.high, of.total = float(of.low), float(of.high), float(of.total)


def target_place(target: Any) -> tuple[int, int, int] | None:
    """Return where a target lies in memory: storage address, first byte, last byte; None where it has none."""
    if type(target) is not torch.Tensor or target.layout != torch.strided or not target.numel():
        return None
    first = int(target.storage_offset() * target.element_size())
    last = first + sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) * target.element_size()
    return target.untyped_storage().data_ptr(), first, int(last)


def received(call: Call, cotangent: torch.Tensor) -> Received:
    """Read the weights of a call's items off the cotangent of its result."""
    g = cotangent.detach()
    unit = UNIT_ROUNDOFF.get(str(g.dtype).removeprefix("torch."), UNIT_ROUNDOFF["float32"])
    counted = call.counted
    if counted.reduction == "none" and g.dim():
        weighted = g != 0
        if counted.valid is not None:
            weighted &= counted.valid.reshape(g.shape)
        infinity = torch.full((), torch.inf, dtype=g.dtype, device=g.device)
        high = torch.where(weighted, g, -infinity).max()
        low = torch.where(weighted, g, infinity).min()
        found = Received(call, low, high, weighted.sum(), unit)
        if (of := call.summand) is not None and of.numel():
            elements = of.numel() if of.dim() else counted.elements
            found.summands = Summands(of.min(), of.max(), elements, g.sum())
        return found
    weight: Number = g if g.device.type != "cpu" else float(g)
    divisor = counted.divisor if g.device.type != "cpu" else float(counted.divisor)
    if counted.reduction == "mean":
        weight = weight / divisor if isinstance(divisor, torch.Tensor) or divisor else 0.0
    return Received(call, weight, weight, divisor, unit)


def watch(output: torch.Tensor, call: Call, receive: Callable[[Call, torch.Tensor], None]) -> None:
    """Call `receive` with the cotangent of a call's result in every backward pass that reaches it."""

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(cotangent: torch.Tensor) -> None:
        receive(call, cotangent)

    mark(output.grad_fn, call)
    output.register_hook(hook)


def watch_summands(node: Any, call: Call) -> None:
    """Note the cotangent of a node's result in the next backward pass, for a call that the result is made of."""

    def hook(cotangents: Any) -> None:
        handle.remove()
        call.summand = None if cotangents[0] is None else cotangents[0].detach()

    handle = node.register_prehook(hook)
