"""Detection of autocast: whether a loop computes its losses under `torch.autocast`, and in which dtype.

Autocast does not change float64 tensors, so a float64 run computes in float64 and is judged in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.schema.contract import Batch

Compute = str | None
"""The name of the autocast dtype under which losses were computed, or None."""


class AutocastRecorder:
    """A loss that records the autocast dtype of its calls that need gradients.

    Attributes:
        compute: the autocast dtype of the calls so far; the coarsest one if they differ.
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
    """Return the dtype with the largest unit roundoff, ignoring None."""
    return max((name for name in names if name is not None), key=UNIT_ROUNDOFF.__getitem__, default=None)


def autocast_context(device: torch.device, compute: Compute) -> AbstractContextManager[object]:
    """Return an autocast context of this dtype, or for None a context that does nothing."""
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=getattr(torch, compute))
