"""The table of ATen operations and their JAX implementations.

An operation is looked up by its full name (`aten.add.Tensor`), then by the name without the overload (`aten.add`),
which stands for all overloads. torch decomposes the operations that are not in the table, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradcheck_suite.errors import UsageError

Lowering = Callable[..., Any]
_LoweringT = TypeVar("_LoweringT", bound=Lowering)

_TABLE: dict[str, Lowering] = {}
_FAMILY: dict[str, str] = {}
DYNAMIC: set[str] = set()
"""Operations whose result's shape depends on values: a program with one of them runs without `jax.jit`."""


def register_op(*names: str, dynamic: bool = False) -> Callable[[_LoweringT], _LoweringT]:
    """Register the JAX implementation of an ATen or custom operation.

    As a decorator::

        @register_op("aten.cosh")
        def cosh(self):
            return jax.numpy.cosh(self)

    The function takes the operation's arguments, named as in torch's schema, with JAX arrays in place of tensors and
    dtypes as `torch.dtype`. It returns an array, or a tuple for several results, of the shapes and dtypes that torch
    returns; the bridge checks them at every call. JAX must be able to differentiate the function.

    Args:
        names: `namespace.name`, for all overloads, or `namespace.name.overload`. A later registration replaces an
            earlier one.
        dynamic: whether the shape of the result depends on the arguments' values.

    Raises:
        UsageError: a name has another form.
    """
    for name in names:
        if not isinstance(name, str) or name.count(".") not in (1, 2):
            raise UsageError(
                f"register_op: expected names such as 'aten.add' or 'aten.add.Tensor', got {name!r}: "
                "write the namespace, a dot and the operation's name"
            )

    def register(lowering: _LoweringT) -> _LoweringT:
        for name in names:
            _TABLE[name] = lowering
            _FAMILY[name] = lowering.__module__.rpartition(".")[2]
            DYNAMIC.discard(name)
            if dynamic:
                DYNAMIC.add(name)
        return lowering

    return register


def _names(op: torch._ops.OpOverload) -> tuple[str, str]:
    packet = f"{op.namespace}.{op._schema.name.partition('::')[2]}"
    return f"{packet}.{op._overloadname}", packet


def lowering_of(op: torch._ops.OpOverload) -> Lowering | None:
    """Return the JAX implementation of an operation, or None where the table has none."""
    full, packet = _names(op)
    return _TABLE.get(full) or _TABLE.get(packet)


def is_dynamic(op: torch._ops.OpOverload) -> bool:
    """Return whether the shape of the operation's result depends on values."""
    return any(name in DYNAMIC for name in _names(op))


def table() -> dict[str, str]:
    """Return every registered name and its family: the name of the module that registered it."""
    return dict(sorted(_FAMILY.items()))
