"""The program's own parameters in a second computation, with what is written to them put back.

A copy of all parameters is a quarter of the memory of a training run with Adam, and does not fit
where the accelerator is full. A forward rarely writes to a parameter: what does so is seen before it
happens, and of that parameter alone a copy is made. Not seen is what a kernel writes that is called
past torch's dispatcher, with a tensor and not with its address.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.auditing.samples import OWN, is_shard

_MEMORY = (
    "numpy",
    "data_ptr",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "share_memory_",
    "__array__",
    "__dlpack__",
)
"""Methods of a tensor that give its memory away: what is written there is no operation of torch's."""
_storage: Any = torch._C.TensorBase.untyped_storage


def can_be_shared(parameter: torch.Tensor) -> bool:
    """Return whether what is written to a parameter can be put back by its elements alone."""
    return (
        type(parameter) in OWN
        and parameter.layout == torch.strided
        and not parameter.is_nested
        and not parameter.is_meta
        and not is_shard(parameter)
    )


def shared(parameter: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the memory of a parameter, whose version is its own."""
    return parameter.data.requires_grad_()


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(_storage(tensor).data_ptr())
    except (RuntimeError, NotImplementedError):  # of a wrapper, which has no memory
        return 0


class _Kept:
    """Parameters, of which copies are made before something is written to them.

    Args:
        parameters: that are shared.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            self._own.setdefault(_address(parameter), []).append(parameter.detach())
        self._own.pop(0, None)
        self._copies = list[tuple[torch.Tensor, torch.Tensor]]()

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy the parameters whose memory a tensor has."""
        own = self._own.pop(_address(tensor), ()) if self._own else ()
        self._copies += [(one, one.clone()) for one in own]

    def put_back(self) -> None:
        """Put back what was copied."""
        for one, copy in self._copies:
            one.data.copy_(copy)


class _BeforeWrites(TorchDispatchMode):
    """Sees operations that write, before they do."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Copy what an operation writes to, and call it."""
        named = kwargs or {}
        # a mode is given Python's number for a tensor that was made of one, as a node has saved it,
        # and an operation of a tensor takes none (torch/csrc/autograd/python_variable.cpp, no issue
        # known)
        if args and type(args[0]) in _DTYPES and _is_of_tensor(func):
            args = (torch.tensor(args[0], dtype=_DTYPES[type(args[0])]), *args[1:])
        written = _written_by(func, args, named)
        if written:
            for value in pytree.tree_leaves(written):
                if isinstance(value, torch.Tensor):
                    self._kept.keep(value)
        return func(*args, **named)


_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""Type of a number -> the dtype of a tensor that torch makes of it."""


@functools.lru_cache(maxsize=4096)
def _writes(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Return the places and the names of the arguments that an operation writes to, None where it
    does not tell.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.lru_cache(maxsize=4096)
def _is_of_tensor(func: Any) -> bool:
    """Return whether the first argument of an operation is a tensor."""
    schema = getattr(func, "_schema", None)
    first: Any = next(iter(schema.arguments), None) if schema is not None else None
    return first is not None and first.type.kind() == "TensorType"


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    places = _writes(func)
    if places is None:  # an operation of a higher order
        return [args, kwargs]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in places]


@contextlib.contextmanager
def put_back(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what is written to parameters in a block."""
    kept = _Kept(parameters)

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def inner(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor):
                kept.keep(tensor)
            return method(tensor, *args, **kwargs)

        return inner

    try:
        with contextlib.ExitStack() as stack:
            for name in _MEMORY:
                plain = getattr(torch.Tensor, name, None)
                if plain is not None:
                    stack.enter_context(mock.patch.object(torch.Tensor, name, noting(plain)))
            stack.enter_context(_BeforeWrites(kept))
            yield
    finally:
        kept.put_back()
