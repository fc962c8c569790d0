"""Tensor creation: constants, ranges, identity matrices, triangle indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from gradcheck_suite.bridge.dtypes import Array, default_float, jax_dtype, result_dtype
from gradcheck_suite.bridge.op_table import register_op


def _or_default(dtype: torch.dtype | None) -> Any:
    return default_float() if dtype is None else jax_dtype(dtype)


@register_op("aten.full")
def full(size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor filled with one value, of the value's default dtype where none is given."""
    return jnp.full(tuple(size), fill_value, result_dtype(fill_value) if dtype is None else jax_dtype(dtype))


@register_op("aten.full_like")
def full_like(self: Array, fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor of self's shape filled with one value."""
    return jnp.full(self.shape, fill_value, self.dtype if dtype is None else jax_dtype(dtype))


@register_op("aten.new_full")
def new_full(self: Array, size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a tensor filled with one value, of self's dtype where none is given."""
    return jnp.full(tuple(size), fill_value, self.dtype if dtype is None else jax_dtype(dtype))


@register_op("aten.fill")
def fill(self: Array, value: Any) -> Array:
    """Return a tensor of self's shape filled with `value`, through which the gradient flows."""
    return jnp.broadcast_to(jnp.asarray(value).astype(self.dtype), self.shape)


def _constant(value: int, name: str) -> None:
    def new(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Array:
        return jnp.full(tuple(size), value, _or_default(dtype))

    def like(self: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
        return full_like(self, value, dtype)

    def new_like(self: Array, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Array:
        return new_full(self, size, value, dtype)

    register_op(f"aten.{name}")(new)
    register_op(f"aten.{name}_like")(like)
    register_op(f"aten.new_{name}")(new_like)


_constant(0, "zeros")
_constant(1, "ones")
_constant(0, "empty")
register_op("aten.empty.memory_format")(lambda size, dtype=None, **_: jnp.zeros(tuple(size), _or_default(dtype)))
register_op("aten.empty_strided", "aten.empty_permuted")(
    lambda size, stride, dtype=None, **_: jnp.zeros(tuple(size), _or_default(dtype))
)
register_op("aten.new_empty_strided")(lambda self, size, stride, dtype=None, **_: new_full(self, size, 0, dtype))


@register_op("aten.zero")
def zero(self: Array) -> Array:
    """Return zeros of self's shape."""
    return jnp.zeros_like(self)


@register_op("aten.scalar_tensor")
def scalar_tensor(s: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return a zero-dimensional tensor."""
    return jnp.asarray(s, _or_default(dtype))


def _range_dtype(dtype: torch.dtype | None, *numbers: Any) -> Any:
    if dtype is not None:
        return jax_dtype(dtype)
    return jnp.dtype(jnp.int64) if all(isinstance(n, int) for n in numbers) else default_float()


@register_op("aten.arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return start, start + step, ... below end."""
    kind = _range_dtype(dtype, start, end, step)
    count = len(range(start, end, step)) if all(isinstance(n, int) for n in (start, end, step)) else None
    if count is None:
        count = max(0, int(-(-(end - start) // step)))
    wide = jnp.float64 if jnp.issubdtype(kind, jnp.floating) else kind
    return (jnp.asarray(start, wide) + jnp.arange(count).astype(wide) * jnp.asarray(step, wide)).astype(kind)


register_op("aten.arange.start")(lambda start, end, dtype=None, **_: arange(start, end, 1, dtype))
register_op("aten.arange.default")(lambda end, dtype=None, **_: arange(0, end, 1, dtype))


@register_op("aten.linspace")
def linspace(start: Any, end: Any, steps: int, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return `steps` evenly spaced numbers from start to end, both included."""
    kind = _or_default(dtype)
    return jnp.linspace(start, end, steps, dtype=jnp.float64).astype(kind)


@register_op("aten.logspace")
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return base to the power of `linspace`."""
    return jnp.power(base, jnp.linspace(start, end, steps, dtype=jnp.float64)).astype(_or_default(dtype))


@register_op("aten.eye.m")
def eye(n: int, m: int, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return an n x m matrix with ones on the diagonal."""
    return jnp.eye(n, m, dtype=_or_default(dtype))


register_op("aten.eye.default")(lambda n, dtype=None, **_: eye(n, n, dtype))


def _triangle(indices: Any, row: int, col: int, offset: int, dtype: torch.dtype | None) -> Array:
    return jnp.stack(indices(row, offset, col)).astype(jax_dtype(dtype or torch.int64))


@register_op("aten.tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return the row and column indices of the lower triangle, (2, count)."""
    return _triangle(jnp.tril_indices, row, col, offset, dtype)


@register_op("aten.triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return the row and column indices of the upper triangle, (2, count)."""
    return _triangle(jnp.triu_indices, row, col, offset, dtype)
