"""Operations that compute nothing: assertions, sizes, hints to torch's own compiler."""

from __future__ import annotations

from typing import Any

from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.table import register_op


@register_op(
    "aten._assert_async",
    "aten._assert_scalar",
    "aten._assert_tensor_metadata",
    "aten.sym_constrain_range_for_size",
)
def nothing(*_: Any, **__: Any) -> None:
    """What torch checked when it exported."""


@register_op("aten.sym_size.int")
def sym_size(self: Array, dim: int) -> int:
    """The length of an axis."""
    return self.shape[dim]


@register_op("aten.sym_numel")
def sym_numel(self: Array) -> int:
    """The number of entries."""
    return self.size


@register_op("aten._local_scalar_dense", dynamic=True)
def item(self: Array) -> bool | int | float | complex:
    """A tensor's only value, as a Python number."""
    number: bool | int | float | complex = lax.stop_gradient(self).item()
    return number
