"""Elementwise functions of two or three operands, with torch's type promotion."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_float, is_inexact, promote, result_dtype
from gradcheck_suite.bridge.explicit_derivatives import with_derivatives
from gradcheck_suite.bridge.op_table import register_op


@register_op("aten.add")
def add(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Return self + alpha * other; for booleans, the logical or."""
    x, y = promote(self, other)
    if x.dtype == jnp.bool_:
        return x | (y & bool(alpha))
    return x + y if alpha == 1 else x + jnp.asarray(alpha, y.dtype) * y


@register_op("aten.sub")
def sub(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Return self - alpha * other."""
    x, y = promote(self, other)
    return x - y if alpha == 1 else x - jnp.asarray(alpha, y.dtype) * y


@register_op("aten.rsub")
def rsub(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Return other - alpha * self."""
    return sub(other, self, alpha)


@register_op("aten.mul")
def mul(self: Any, other: Any) -> Array:
    """Return the product; for booleans, the logical and."""
    x, y = promote(self, other)
    return x & y if x.dtype == jnp.bool_ else x * y


def _floored(x: Array, y: Array) -> Array:
    """Return floor(x / y) computed from the remainder, as torch and Python do: x / y may round up to an integer."""
    remainder = jnp.fmod(x, y)
    quotient = (x - remainder) / y
    quotient = jnp.where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    exact = x / y
    floor = jnp.where(quotient == 0, jnp.copysign(0.0, exact), floor)
    return jnp.where(y == 0, exact, floor).astype(x.dtype)


@register_op("aten.div")
def div(self: Any, other: Any, rounding_mode: str | None = None) -> Array:
    """Return self / other; with a rounding mode the gradient is 0."""
    if rounding_mode is None:
        x, y = promote(self, other, floating=True)
        return x / y
    x, y = map(lax.stop_gradient, promote(self, other))
    if is_inexact(x):
        return _floored(x, y) if rounding_mode == "floor" else jnp.trunc(x / y)
    return jnp.floor_divide(x, y) if rounding_mode == "floor" else lax.div(*jnp.broadcast_arrays(x, y))


@register_op("aten.floor_divide")
def floor_divide(self: Any, other: Any) -> Array:
    """Return floor(self / other); the gradient is 0."""
    return div(self, other, "floor")


def _integral_multiple(x: Array, y: Array, rounded: Array) -> Array:
    """Return `rounded` = x - n * y with the derivative of x - n * y for constant n."""
    n = lax.stop_gradient(jnp.round((x - rounded) / y))
    linear = x - n * y
    return lax.stop_gradient(rounded) + (linear - lax.stop_gradient(linear))


@register_op("aten.remainder")
def remainder(self: Any, other: Any) -> Array:
    """Return the remainder that has the divisor's sign."""
    x, y = promote(self, other)
    if not is_float(x):
        return jnp.remainder(x, y)
    return _integral_multiple(x, y, jnp.remainder(lax.stop_gradient(x), lax.stop_gradient(y)))


@register_op("aten.fmod")
def fmod(self: Any, other: Any) -> Array:
    """Return the remainder that has the dividend's sign."""
    x, y = promote(self, other)
    if not is_float(x):
        return jnp.fmod(x, y)
    return _integral_multiple(x, y, jnp.fmod(lax.stop_gradient(x), lax.stop_gradient(y)))


@register_op("aten.pow")
def pow_(self: Any, exponent: Any) -> Array:
    """Return self ** exponent.

    The gradient of the base is 0 where the exponent is 0, and the gradient of the exponent is 0 where the base is 0 and
    the exponent is not negative, as in torch.
    """
    if not hasattr(exponent, "dtype"):
        dtype = result_dtype(self, exponent)
        x = jnp.asarray(self, dtype)
        if not is_inexact(dtype):
            return lax.integer_pow(x, int(exponent)) if exponent >= 0 else jnp.power(x, int(exponent))
        if exponent == 0.5:
            return jnp.sqrt(x)
        if float(exponent).is_integer() and abs(exponent) <= 1024:
            return lax.integer_pow(x, int(exponent))
        return jnp.power(x, jnp.asarray(exponent, dtype))
    x, y = promote(self, exponent)
    value = jnp.power(x, y)
    if not is_float(value):
        return value
    of_base = jnp.where(y == 0, 0, y * jnp.power(x, y - 1))
    of_exponent = jnp.where((x == 0) & (y >= 0), 0, value * jnp.log(x))
    return with_derivatives(value, (x, of_base), (y, of_exponent))


@register_op("aten.maximum")
def maximum(self: Array, other: Array) -> Array:
    """Return the larger operand; equal operands get half of the gradient each."""
    return jnp.maximum(*promote(self, other))


@register_op("aten.minimum")
def minimum(self: Array, other: Array) -> Array:
    """Return the smaller operand; equal operands get half of the gradient each."""
    return jnp.minimum(*promote(self, other))


@register_op("aten.fmax")
def fmax(self: Array, other: Array) -> Array:
    """Return the larger operand, ignoring NaN; of equal operands the first gets the gradient."""
    x, y = promote(self, other)
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@register_op("aten.fmin")
def fmin(self: Array, other: Array) -> Array:
    """Return the smaller operand, ignoring NaN; of equal operands the first gets the gradient."""
    x, y = promote(self, other)
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@register_op("aten.atan2")
def atan2(self: Array, other: Array) -> Array:
    """Return the angle of the point (other, self); the gradient at the origin is 0."""
    y, x = promote(self, other, floating=True)
    origin = (y == 0) & (x == 0)
    safe = jnp.arctan2(jnp.where(origin, 0.0, y), jnp.where(origin, 1.0, x))
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), safe)


@register_op("aten.hypot")
def hypot(self: Array, other: Array) -> Array:
    """Return sqrt(x^2 + y^2); the gradient is operand / result, which is NaN at the origin as in torch."""
    x, y = promote(self, other)
    value = jnp.hypot(x, y)
    return with_derivatives(value, (x, x / value), (y, y / value))


@register_op("aten.copysign")
def copysign(self: Any, other: Any) -> Array:
    """Return |self| with the sign of other; the gradient at self = 0 is 0."""
    x, y = promote(self, other, floating=True)
    flipped = jnp.where(jnp.signbit(x) == jnp.signbit(y), x, -x)
    return jnp.where(x == 0, lax.stop_gradient(flipped), flipped)


@register_op("aten.logaddexp")
def logaddexp(self: Array, other: Array) -> Array:
    """Return log(e^x + e^y)."""
    return jnp.logaddexp(*promote(self, other))


@register_op("aten.logaddexp2")
def logaddexp2(self: Array, other: Array) -> Array:
    """Return log2(2^x + 2^y)."""
    return jnp.logaddexp2(*promote(self, other))


@register_op("aten.xlogy")
def xlogy(self: Any, other: Any) -> Array:
    """Return x * log(y), and 0 where x is 0 and y is not NaN."""
    x, y = promote(self, other, floating=True)
    value = jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log(y))
    return with_derivatives(value, (x, jnp.where((x == 0) & (y <= 0), 0, jnp.log(y))), (y, x / y))


@register_op("aten.special_xlog1py")
def xlog1py(self: Any, other: Any) -> Array:
    """Return x * log(1 + y), and 0 where x is 0 and y is not NaN."""
    x, y = promote(self, other, floating=True)
    value = jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log1p(y))
    return with_derivatives(value, (x, jnp.where((x == 0) & (y <= -1), 0, jnp.log1p(y))), (y, x / (y + 1)))


@register_op("aten.lerp")
def lerp(self: Array, end: Array, weight: Any) -> Array:
    """Return self + weight * (end - self)."""
    x, y, w = promote(self, end, weight) if hasattr(weight, "dtype") else (*promote(self, end), weight)
    return jnp.where(jnp.abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1 - w))


@register_op("aten.addcmul")
def addcmul(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    """Return self + value * tensor1 * tensor2."""
    x, a, b = promote(self, tensor1, tensor2)
    return x + jnp.asarray(value, x.dtype) * a * b


@register_op("aten.addcdiv")
def addcdiv(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    """Return self + value * tensor1 / tensor2."""
    x, a, b = promote(self, tensor1, tensor2, floating=True)
    return x + jnp.asarray(value, x.dtype) * (a / b)


@register_op("aten.heaviside")
def heaviside(self: Array, values: Array) -> Array:
    """Return 0 below zero, 1 above and `values` at zero; the gradient is 0."""
    x, v = promote(self, values)
    return jnp.where(x == 0, v, (x > 0).astype(x.dtype))


@register_op("aten.ldexp")
def ldexp(self: Array, other: Array) -> Array:
    """Return self * 2 ** other."""
    x, y = promote(self, other, floating=True)
    return x * jnp.exp2(y)
