"""torch's type promotion in JAX.

JAX promotes by its own lattice and treats Python numbers as weakly typed. torch has three priorities (tensors with
dimensions, zero-dimensional tensors, Python numbers), and an operand of a lower priority changes the dtype only if its
category (boolean, integer, float, complex) is higher. Every lowered operation calls `promote`, so that no result is
weakly typed.
Source: "Tensor attributes, type promotion" of torch's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

jax.config.update("jax_enable_x64", True)

Array = jax.Array
_DEFAULT_FLOAT: ContextVar[torch.dtype | None] = ContextVar("default_float", default=None)

_JAX = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}


@contextmanager
def default_float_is(dtype: torch.dtype) -> Iterator[None]:
    """Fix torch's default dtype to the one at the time of the export."""
    token = _DEFAULT_FLOAT.set(dtype)
    try:
        yield
    finally:
        _DEFAULT_FLOAT.reset(token)


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype of a torch dtype."""
    return jnp.dtype(_JAX[dtype])


def default_float() -> Any:
    """Return the dtype to which torch converts integers for floating-point operations."""
    return jax_dtype(_DEFAULT_FLOAT.get() or torch.get_default_dtype())


def _default_complex() -> Any:
    return jnp.dtype(jnp.complex128 if default_float() == jnp.float64 else jnp.complex64)


def is_float(x: Any) -> bool:
    """Return whether an array or a dtype is real floating-point."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.floating))


def is_complex(x: Any) -> bool:
    """Return whether an array or a dtype is complex."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.complexfloating))


def is_inexact(x: Any) -> bool:
    """Return whether an array or a dtype is floating-point or complex, so that it has derivatives."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.inexact))


def _number_dtype(number: Any) -> Any:
    if isinstance(number, bool):
        return jnp.dtype(jnp.bool_)
    if isinstance(number, int):
        return jnp.dtype(jnp.int64)
    return _default_complex() if isinstance(number, complex) else default_float()


def _joined(dtypes: list[Any]) -> Any:
    joined = None
    for dtype in dtypes:
        joined = dtype if joined is None else jnp.promote_types(joined, dtype)
    return joined


def _over(high: Any, low: Any) -> Any:
    """Return the result dtype of operands of dtype `high` and of lower-priority operands of dtype `low`."""
    if high is None or low is None:
        return low if high is None else high
    if is_complex(high):
        return high
    if is_float(high):
        return jnp.promote_types(high, jnp.complex64) if is_complex(low) else high
    if high == jnp.bool_ or is_inexact(low):
        return jnp.promote_types(high, low) if not is_inexact(low) else low
    return high


def result_dtype(*operands: Any) -> Any:
    """Return the dtype in which torch computes with these operands: arrays or Python numbers."""
    arrays = [x for x in operands if hasattr(x, "dtype")]
    numbers = _joined([_number_dtype(x) for x in operands if not hasattr(x, "dtype")])
    sized = _joined([jnp.dtype(x.dtype) for x in arrays if x.ndim])
    scalars = _joined([jnp.dtype(x.dtype) for x in arrays if not x.ndim])
    return _over(_over(sized, scalars), numbers)


def promote(*operands: Any, floating: bool = False) -> list[Array]:
    """Return the operands as arrays of the dtype in which torch computes with them.

    Args:
        operands: arrays or Python numbers.
        floating: whether integers are converted to torch's default floating dtype.
    """
    dtype = result_dtype(*operands)
    if floating and not is_inexact(dtype):
        dtype = default_float()
    return [jnp.asarray(x, dtype) for x in operands]


def absolute(x: Array) -> Array:
    """Return |x| with gradient 0 at 0, as in torch; JAX's gradient is 1 there for real and NaN for complex numbers."""
    if is_float(x):
        return x * lax.stop_gradient(jnp.sign(x))
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x))) if is_complex(x) else jnp.abs(x)


def to_array(tensor: torch.Tensor) -> Array:
    """Return a copy of a torch tensor's values as a JAX array of the same dtype."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    # `jnp.array` would compile a copy for every shape
    if tensor.dtype is torch.bfloat16:
        return jax.device_put(tensor.to(torch.float32).numpy().astype(jnp.bfloat16))
    return jax.device_put(np.array(tensor.numpy(force=True)))
