"""What a loop is handed, what a user's problem provides, what a loop may assume.

This module is data only: torch appears in annotations and is never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.spec import REDUCTIONS, Reduction

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

Batch = Any
Loop = Callable[["TrainingRun"], None]
_LoopT = TypeVar("_LoopT", bound=Callable[..., Any])

EQUAL_MICRO_BATCHES = "equal-micro-batches"
WHOLE_WINDOWS = "whole-windows"
SUM_REDUCTION = "sum-reduction"
ASSUMPTIONS = {
    EQUAL_MICRO_BATCHES: "every micro-batch of a window has the same count",
    WHOLE_WINDOWS: "no short last window",
    SUM_REDUCTION: "the loss is a sum over items",
}


@dataclass(frozen=True)
class TrainingRun:
    """What a loop trains with.

    Attributes:
        model: a fresh `torch.nn.Module` in train mode, on `device`.
        optimizer: a real `torch.optim.Optimizer` over the model's trainable parameters.
        loader: a real `DataLoader`; one pass is one epoch; it yields micro-batches in order.
        loss: `loss(model, batch)`, the scalar loss of a micro-batch, reduced as `reduction` says.
        count: `count(batch)`, a scalar tensor: what the mean divides by.
        accumulation_steps: micro-batches per window; the last window of an epoch may be shorter.
        epochs: passes over `loader`.
        reduction: `"mean"` or `"sum"`.
        device: where model and batches are.
        dtype: of the parameters.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    accumulation_steps: int
    epochs: int
    reduction: Reduction
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Problem:
    """A user's problem.

    Attributes:
        model: seed -> a fresh module.
        batch: (items, seed) -> a pytree (dict, list, tuple) of tensors whose leading dimension is items.
        loss: (model, batch) -> a scalar tensor, reduced over the items as `reduction` says.
        reduction: `"mean"` or `"sum"`.
        count: batch -> what the mean divides by; the number of items when None.
    """

    model: Callable[[int], torch.nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    reduction: Reduction = "mean"
    count: Callable[[Batch], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "batch", "loss"):
            if not callable(getattr(self, name)):
                raise UsageError(f"Problem: {name} must be callable, got {type(getattr(self, name)).__name__}")
        if self.count is not None and not callable(self.count):
            raise UsageError(f"Problem: count must be callable or None, got {type(self.count).__name__}")
        for name, wanted in _ARGUMENTS.items():
            _expect_arguments(name, getattr(self, name), wanted)
        if self.reduction not in REDUCTIONS:
            raise UsageError(f"Problem: reduction must be one of {', '.join(REDUCTIONS)}; got {self.reduction!r}")


_ARGUMENTS = {
    "model": ("seed",),
    "batch": ("items", "seed"),
    "loss": ("model", "batch"),
    "count": ("batch",),
}


def _expect_arguments(name: str, function: Any, wanted: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called as a problem's is."""
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables written in C have none: let the call tell
    try:
        signature.bind(*wanted)
    except TypeError:
        shown = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise UsageError(
            f"Problem: {name} is called as {name}({', '.join(wanted)}), and {shown} does not take that"
        ) from None


def checked_assumptions(names: Iterable[str]) -> frozenset[str]:
    """Return the names as a set; `UsageError` names the ones that do not exist."""
    if isinstance(names, str):
        raise UsageError(f"assumes must be a tuple of names such as ({names!r},), got the string {names!r}")
    chosen = frozenset(names)
    unknown = sorted(chosen - ASSUMPTIONS.keys())
    if unknown:
        raise UsageError(f"assumption must be one of {', '.join(ASSUMPTIONS)}; got {', '.join(map(repr, unknown))}")
    return chosen


def training_loop(*, assumes: Iterable[str] = ()) -> Callable[[_LoopT], _LoopT]:
    """Mark a loop and state what it relies on; the generator then stays inside it.

    Args:
        assumes: names from `ASSUMPTIONS`: `"equal-micro-batches"`, `"whole-windows"`, `"sum-reduction"`.
    """
    chosen = checked_assumptions(assumes)

    def mark(loop: _LoopT) -> _LoopT:
        loop.assumes = chosen  # type: ignore[attr-defined]
        return loop

    return mark


def assumptions_of(loop: Loop) -> frozenset[str]:
    """Return what a loop states that it relies on."""
    return frozenset(getattr(loop, "assumes", ()))
