"""Autocast, recognised and not declared: whether a loop computed its losses under `torch.autocast`, in which dtype.

Autocast leaves float64 tensors alone, so a float64 run computes in float64 whatever the loop asks for and is judged
so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.schema.contract import Batch

Compute = str | None
"""The dtype's name of the autocast that losses were computed under; None for none."""


class NotedLoss:
    """A loss that writes down under which autocast it is called, where gradients are asked for.

    Attributes:
        compute: of the calls so far; where they differ, the coarsest dtype.
    """

    def __init__(self, loss: Callable[[torch.nn.Module, Batch], torch.Tensor], device: torch.device) -> None:
        self._loss, self._device = loss, device.type
        self.compute: Compute = None

    def __call__(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss."""
        if torch.is_grad_enabled() and torch.is_autocast_enabled(self._device):
            self.compute = coarsest(self.compute, str(torch.get_autocast_dtype(self._device)).removeprefix("torch."))
        return self._loss(model, batch)


def coarsest(*names: Compute) -> Compute:
    """Return the dtype with the largest unit roundoff; None counts for nothing."""
    return max((name for name in names if name is not None), key=UNIT_ROUNDOFF.__getitem__, default=None)


def entered(device: torch.device, compute: Compute) -> AbstractContextManager[object]:
    """Return the autocast of that dtype, to be entered, or a context that does nothing."""
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=getattr(torch, compute))
