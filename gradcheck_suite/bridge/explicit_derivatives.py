"""JAX functions with given derivatives, for points where torch's derivative is a convention and not a limit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradcheck_suite.bridge.dtypes import Array


@jax.custom_jvp
def _with_derivatives(value: Array, inputs: tuple[Array, ...], derivatives: tuple[Array, ...]) -> Array:
    del inputs, derivatives
    return value


def _jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    value, _, derivatives = primals
    _, tangents_in, _ = tangents
    total = jnp.zeros_like(value)
    for tangent, derivative in zip(tangents_in, derivatives, strict=True):
        # skipped, not multiplied by 0: the derivative may be infinite
        if not isinstance(tangent, SymbolicZero):
            total = total + tangent * derivative.astype(value.dtype)
    return value, total


_with_derivatives.defjvp(_jvp, symbolic_zeros=True)


def with_derivatives(value: Array, *inputs_and_derivatives: tuple[Array, Array]) -> Array:
    """Return `value` as a function of some inputs with given partial derivatives. Second derivatives are wrong.

    Args:
        value: the function's value.
        inputs_and_derivatives: pairs of an input and the partial derivative with respect to it, each broadcastable to
            the value's shape. Derivatives may be infinite or NaN.
    """
    pairs = [(jnp.broadcast_to(x, value.shape), jnp.broadcast_to(s, value.shape)) for x, s in inputs_and_derivatives]
    detach = jax.lax.stop_gradient
    return _with_derivatives(detach(value), tuple(x for x, _ in pairs), tuple(detach(s) for _, s in pairs))
