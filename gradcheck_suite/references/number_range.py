"""Whether a computation's numbers fit into the range of a lower precision.

A gradient that is finite in float64 may overflow in float16 without a fault. The float64 computation tells: some of its
numbers are too large there, or become 0 or infinite when each result is rounded to the precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.references.noise import Computation, Part

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
