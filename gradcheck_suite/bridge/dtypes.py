"""torch's dtype rules in JAX.

JAX promotes by its own lattice and lets Python numbers be weakly typed; torch looks at three priorities (tensors with
dimensions, tensors without, Python numbers) and lets a lower one raise the category only. Every lowered operation
goes through `promote`, so that no weak type ever reaches a result.
Source: "Tensor attributes, type promotion" of torch's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
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
    """Hold torch's default dtype at what it was when a program was exported."""
    token = _DEFAULT_FLOAT.set(dtype)
    try:
        yield
    finally:
        _DEFAULT_FLOAT.reset(token)


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return JAX's dtype of a torch dtype."""
    return jnp.dtype(_JAX[dtype])


def default_float() -> Any:
    """Return the dtype that integers become where torch computes in floating point."""
    return jax_dtype(_DEFAULT_FLOAT.get() or torch.get_default_dtype())


def _default_complex() -> Any:
    return jnp.dtype(jnp.complex128 if default_float() == jnp.float64 else jnp.complex64)


def is_float(x: Any) -> bool:
    """Whether an array or a dtype is of real floating point."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.floating))


def is_complex(x: Any) -> bool:
    """Whether an array or a dtype is complex."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.complexfloating))


def is_inexact(x: Any) -> bool:
    """Whether an array or a dtype has derivatives."""
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
    """Return the dtype where operands of a higher priority have `high` and those of a lower one `low`."""
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
    """Return the dtype that torch computes these operands in: arrays, or Python numbers."""
    arrays = [x for x in operands if hasattr(x, "dtype")]
    numbers = _joined([_number_dtype(x) for x in operands if not hasattr(x, "dtype")])
    sized = _joined([jnp.dtype(x.dtype) for x in arrays if x.ndim])
    scalars = _joined([jnp.dtype(x.dtype) for x in arrays if not x.ndim])
    return _over(_over(sized, scalars), numbers)


def promote(*operands: Any, floating: bool = False) -> list[Array]:
    """Return the operands as arrays of one dtype, the one that torch computes in.

    Args:
        operands: arrays or Python numbers.
        floating: whether integers become torch's default floating dtype.
    """
    dtype = result_dtype(*operands)
    if floating and not is_inexact(dtype):
        dtype = default_float()
    return [jnp.asarray(x, dtype) for x in operands]


def promote_some(*operands: Any, floating: bool = False) -> list[Array | None]:
    """Return `promote` of the operands that are there, None in the place of the others."""
    present = iter(promote(*(x for x in operands if x is not None), floating=floating))
    return [None if x is None else next(present) for x in operands]


def absolute(x: Array) -> Array:
    """|x|, of a real array, with gradient 0 at 0 as in torch; JAX has 1 there."""
    return x * lax.stop_gradient(jnp.sign(x))


def to_array(tensor: torch.Tensor) -> Array:
    """Return a torch tensor's values as a JAX array of the same dtype, which shares no memory with it."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.to(torch.float32).numpy()).astype(jnp.bfloat16)
    return jnp.array(tensor.numpy(force=True), copy=True)
