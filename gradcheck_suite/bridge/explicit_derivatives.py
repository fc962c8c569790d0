"""Functions whose derivative is said outright, where torch's is a convention and not a limit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradcheck_suite.bridge.dtypes import Array


@jax.custom_jvp
def _sloped(value: Array, inputs: tuple[Array, ...], slopes: tuple[Array, ...]) -> Array:
    del inputs, slopes
    return value


def _jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    value, _, slopes = primals
    _, moves, _ = tangents
    total = jnp.zeros_like(value)
    for move, slope in zip(moves, slopes, strict=True):
        # an input that does not move contributes nothing, were its slope infinite
        if not isinstance(move, SymbolicZero):
            total = total + move * slope.astype(value.dtype)
    return value, total


_sloped.defjvp(_jvp, symbolic_zeros=True)


def with_derivatives(value: Array, *inputs_and_slopes: tuple[Array, Array]) -> Array:
    """Return `value` as a function of some inputs whose slopes are given.

    Args:
        value: the function's value.
        inputs_and_slopes: pairs of an input and the partial derivative in it, each of the value's shape or one that
            broadcasts to it. Slopes may be infinite or NaN. Second derivatives are not those of the function.
    """
    pairs = [(jnp.broadcast_to(x, value.shape), jnp.broadcast_to(s, value.shape)) for x, s in inputs_and_slopes]
    still = jax.lax.stop_gradient
    return _sloped(still(value), tuple(x for x, _ in pairs), tuple(still(s) for _, s in pairs))
