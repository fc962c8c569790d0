"""Monte Carlo arithmetic: random rounding of the result of every operation, in the forward and the backward pass.

Two frameworks compute the same gradient by different operations and libraries: XLA's tanh is off by up to 4 unit
roundoffs where torch's is off by at most 1.3. The effect on the gradient depends on cancellation, which perturbed
inputs alone do not show: x - tanh(x) maps neighbouring x to the same number, so its error is the same in every draw.
Random rounding of every result shows it.

Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

EXACT = frozenset(
    (
        "_to_copy",
        "arange",
        "cat",
        "clone",
        "constant_pad_nd",
        "embedding",
        "empty",
        "empty_like",
        "flip",
        "full",
        "full_like",
        "gather",
        "index",
        "index_select",
        "masked_fill",
        "masked_select",
        "max",
        "maximum",
        "min",
        "minimum",
        "neg",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "relu",
        "roll",
        "scatter",
        "select_backward",
        "slice_backward",
        "stack",
        "threshold_backward",
        "where",
        "zeros",
        "zeros_like",
    )
)
"""Operations without rounding: they copy, select or negate."""


class RandomRounding(TorchDispatchMode):
    """A mode in which each element of every new floating-point tensor is moved by one ulp up or down or not at all.

    One step of eps, two unit roundoffs, has a root mean square of 1.6 unit roundoffs: more than the 1.0 of XLA's tanh,
    the least accurate of the elementary functions, and than the 0.6 of correct rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and perturb its results."""
        out = func(*args, **(kwargs or {}))
        exact = _rounds_nothing(func) and not _narrows(func, args, out)
        return out if exact else tree_map(self._moved, out)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.is_floating_point():
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        generator = self._generators[value.device]
        steps = torch.randint(-1, 2, value.shape, generator=generator, dtype=value.dtype, device=value.device)
        limits = torch.finfo(value.dtype)
        # attention masks hold the largest finite number, which must not become infinite, nor infinity NaN
        moved = torch.where(value.abs() <= limits.max / 2, value.addcmul(value, steps, value=limits.eps), value)
        return value.copy_(moved)


def _narrows(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Return whether an operation casts to a dtype of lower precision, as at the start of a model's float32 parts."""
    if func.overloadpacket.__name__ != "_to_copy" or not (args[0].is_floating_point() and out.is_floating_point()):
        return False
    return torch.finfo(out.dtype).eps > torch.finfo(args[0].dtype).eps


@cache
def _rounds_nothing(func: Any) -> bool:
    """Return whether an operation's result is exact, or an alias of another tensor."""
    return func.overloadpacket.__name__ in EXACT or any(r.alias_info is not None for r in func._schema.returns)
