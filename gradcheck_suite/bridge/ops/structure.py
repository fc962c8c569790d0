"""Operations without arithmetic: assertions, sizes, constraints for torch's compiler."""

from __future__ import annotations

from typing import Any

from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


@register_op(
    "aten._assert_async",
    "aten._assert_scalar",
    "aten._assert_tensor_metadata",
    "aten._linalg_check_errors",
    "aten.sym_constrain_range_for_size",
)
def nothing(*_: Any, **__: Any) -> None:
    """Return nothing: torch checked the assertion at export."""


@register_op("aten.sym_size.int")
def sym_size(self: Array, dim: int) -> int:
    """Return the length of an axis."""
    return self.shape[dim]


@register_op("aten.sym_numel")
def sym_numel(self: Array) -> int:
    """Return the number of entries."""
    return self.size


@register_op("aten._local_scalar_dense", dynamic=True)
def item(self: Array) -> bool | int | float | complex:
    """Return the tensor's only value as a Python number."""
    number: bool | int | float | complex = lax.stop_gradient(self).item()
    return number
