"""Work of the suite's own inside of a program that watches or changes operations.

A program may run under modes (`TorchDispatchMode`, `TorchFunctionMode`, a counter of operations, a
default device) and use subclasses of tensors with a `__torch_function__`. What the audit does must
not be counted there, and must not be changed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

_BATCHED = torch._C._dispatch_key_parse("Batched")


def is_of_rows(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a batch of gradients that `vmap` hides: rows of a Jacobian."""
    # `is_grads_batched` still uses the `vmap` from before functorch (torch/_vmap_internals.py)
    keys = torch._C._dispatch_keys(tensor)
    return is_functorch_wrapped_tensor(tensor) or keys.has(_BATCHED)


class Apart:
    """A block in which neither modes nor `__torch_function__` of the program see an operation.

    Attributes:
        modes: those that were on, of both kinds, the innermost first.
    """

    __slots__ = ("_dispatch", "_functions", "_subclasses", "modes")

    def __enter__(self) -> Apart:
        self._subclasses = torch._C.DisableTorchFunctionSubclass()
        self._subclasses.__enter__()
        # taken off and not only disabled: `AsBefore` enables subclasses, and modes with them
        self._functions: list[Any] = []
        self._dispatch: list[Any] = []
        while torch._C._len_torch_function_stack():
            self._functions.append(torch._C._pop_torch_function_stack())
        while torch._C._len_torch_dispatch_stack():
            self._dispatch.append(_python_dispatch._pop_mode())
        self.modes = [*self._functions, *self._dispatch]
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._dispatch):
            _python_dispatch._push_mode(mode)
        for mode in reversed(self._functions):
            torch._C._push_on_torch_function_stack(mode)
        self._subclasses.__exit__(None, None, None)


class AsBefore:
    """A block inside of `Apart` in which subclasses and default devices are those of the program.

    Its other modes stay off: what counts operations would count those of the suite.

    Args:
        modes: that were on when the program did what is done once more, the innermost first.
    """

    __slots__ = ("_devices", "_enabled")

    def __init__(self, modes: Sequence[Any]) -> None:
        self._devices = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]

    def __enter__(self) -> None:
        self._enabled = torch._C._EnableTorchFunction()
        self._enabled.__enter__()
        for mode in self._devices:
            torch._C._push_on_torch_function_stack(mode)

    def __exit__(self, *error: object) -> None:
        for _ in self._devices:
            torch._C._pop_torch_function_stack()
        self._enabled.__exit__(None, None, None)
