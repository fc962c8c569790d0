"""Tells when torch's clipping begins: what is divided before it is told apart by what stands in `.grad`
then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

GROUPING = "_group_tensors_by_device_and_dtype"
"""What torch's clipping calls first, in `torch.nn.utils.clip_grad`."""


class ClippingWatch:
    """Calls a function when one of torch's functions that clip begins.

    All of them first group what they are given, by a name of their module, however the program has
    imported them.

    Args:
        begins: called then.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._original: Any = None
        self._replaced: Any = None

    def open(self) -> None:
        """Begin to watch; a release of torch that groups otherwise is not watched."""
        grouping = getattr(clip_grad, GROUPING, None)
        if grouping is None:
            return

        @functools.wraps(grouping)
        def grouped(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._begins()
            return grouping(*args, **kwargs)

        self._original = grouping
        self._replaced = grouped
        setattr(clip_grad, GROUPING, grouped)

    def close(self) -> None:
        """Put the function back, unless another tool has replaced it meanwhile."""
        if self._replaced is not None and getattr(clip_grad, GROUPING) is self._replaced:
            setattr(clip_grad, GROUPING, self._original)
        self._replaced = None
