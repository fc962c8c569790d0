"""Functions of two or three numbers, element by element, with torch's dtype rules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_float, is_inexact, promote, result_dtype
from gradcheck_suite.bridge.explicit_derivatives import with_derivatives
from gradcheck_suite.bridge.table import register_op


@register_op("aten.add")
def add(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Self + alpha * other; of booleans the or."""
    x, y = promote(self, other)
    if x.dtype == jnp.bool_:
        return x | (y & bool(alpha))
    return x + y if alpha == 1 else x + jnp.asarray(alpha, y.dtype) * y


@register_op("aten.sub")
def sub(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Self - alpha * other."""
    x, y = promote(self, other)
    return x - y if alpha == 1 else x - jnp.asarray(alpha, y.dtype) * y


@register_op("aten.rsub")
def rsub(self: Any, other: Any, alpha: Any = 1) -> Array:
    """Other - alpha * self."""
    return sub(other, self, alpha)


@register_op("aten.mul")
def mul(self: Any, other: Any) -> Array:
    """The product; of booleans the and."""
    x, y = promote(self, other)
    return x & y if x.dtype == jnp.bool_ else x * y


def _floored(x: Array, y: Array) -> Array:
    """floor(x / y) by way of the remainder, as torch and Python do: the quotient itself may round up to an integer."""
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
    """The quotient; rounded, it has no gradient."""
    if rounding_mode is None:
        x, y = promote(self, other, floating=True)
        return x / y
    x, y = map(lax.stop_gradient, promote(self, other))
    if is_inexact(x):
        return _floored(x, y) if rounding_mode == "floor" else jnp.trunc(x / y)
    return jnp.floor_divide(x, y) if rounding_mode == "floor" else lax.div(*jnp.broadcast_arrays(x, y))


@register_op("aten.floor_divide")
def floor_divide(self: Any, other: Any) -> Array:
    """floor(self / other), with no gradient."""
    return div(self, other, "floor")


def _integral_multiple(x: Array, y: Array, rounded: Array) -> Array:
    """Rounded = x - n y, as a function of x and y with n held still."""
    n = lax.stop_gradient(jnp.round((x - rounded) / y))
    linear = x - n * y
    return lax.stop_gradient(rounded) + (linear - lax.stop_gradient(linear))


@register_op("aten.remainder")
def remainder(self: Any, other: Any) -> Array:
    """The remainder with the divisor's sign."""
    x, y = promote(self, other)
    if not is_float(x):
        return jnp.remainder(x, y)
    return _integral_multiple(x, y, jnp.remainder(lax.stop_gradient(x), lax.stop_gradient(y)))


@register_op("aten.fmod")
def fmod(self: Any, other: Any) -> Array:
    """The remainder with the dividend's sign."""
    x, y = promote(self, other)
    if not is_float(x):
        return jnp.fmod(x, y)
    return _integral_multiple(x, y, jnp.fmod(lax.stop_gradient(x), lax.stop_gradient(y)))


@register_op("aten.pow")
def pow_(self: Any, exponent: Any) -> Array:
    """Self ** exponent; the gradient is 0 where the exponent is 0, and for the exponent where the base is 0."""
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
    """The larger; equal operands share the gradient."""
    return jnp.maximum(*promote(self, other))


@register_op("aten.minimum")
def minimum(self: Array, other: Array) -> Array:
    """The smaller; equal operands share the gradient."""
    return jnp.minimum(*promote(self, other))


@register_op("aten.fmax")
def fmax(self: Array, other: Array) -> Array:
    """The larger, leaving NaN out; of equal operands the first has the gradient."""
    x, y = promote(self, other)
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@register_op("aten.fmin")
def fmin(self: Array, other: Array) -> Array:
    """The smaller, leaving NaN out; of equal operands the first has the gradient."""
    x, y = promote(self, other)
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@register_op("aten.atan2")
def atan2(self: Array, other: Array) -> Array:
    """The angle of the point (other, self); at the origin the gradient is 0."""
    y, x = promote(self, other, floating=True)
    origin = (y == 0) & (x == 0)
    safe = jnp.arctan2(jnp.where(origin, 0.0, y), jnp.where(origin, 1.0, x))
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), safe)


@register_op("aten.hypot")
def hypot(self: Array, other: Array) -> Array:
    """sqrt(x^2 + y^2); the gradient is operand / result, NaN at the origin as in torch."""
    x, y = promote(self, other)
    value = jnp.hypot(x, y)
    return with_derivatives(value, (x, x / value), (y, y / value))


@register_op("aten.copysign")
def copysign(self: Any, other: Any) -> Array:
    """|self| with the sign of other; at self = 0 the gradient is 0."""
    x, y = promote(self, other, floating=True)
    flipped = jnp.where(jnp.signbit(x) == jnp.signbit(y), x, -x)
    return jnp.where(x == 0, lax.stop_gradient(flipped), flipped)


@register_op("aten.logaddexp")
def logaddexp(self: Array, other: Array) -> Array:
    """log(e^x + e^y)."""
    return jnp.logaddexp(*promote(self, other))


@register_op("aten.logaddexp2")
def logaddexp2(self: Array, other: Array) -> Array:
    """log2(2^x + 2^y)."""
    return jnp.logaddexp2(*promote(self, other))


@register_op("aten.xlogy")
def xlogy(self: Any, other: Any) -> Array:
    """X log(y), 0 where x is 0 unless y is NaN."""
    x, y = promote(self, other, floating=True)
    value = jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log(y))
    return with_derivatives(value, (x, jnp.where((x == 0) & (y <= 0), 0, jnp.log(y))), (y, x / y))


@register_op("aten.special_xlog1py")
def xlog1py(self: Any, other: Any) -> Array:
    """X log(1 + y), 0 where x is 0 unless y is NaN."""
    x, y = promote(self, other, floating=True)
    value = jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log1p(y))
    return with_derivatives(value, (x, jnp.where((x == 0) & (y <= -1), 0, jnp.log1p(y))), (y, x / (y + 1)))


@register_op("aten.lerp")
def lerp(self: Array, end: Array, weight: Any) -> Array:
    """Self + weight (end - self)."""
    x, y, w = promote(self, end, weight) if hasattr(weight, "dtype") else (*promote(self, end), weight)
    return jnp.where(jnp.abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1 - w))


@register_op("aten.addcmul")
def addcmul(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    """Self + value * tensor1 * tensor2."""
    x, a, b = promote(self, tensor1, tensor2)
    return x + jnp.asarray(value, x.dtype) * a * b


@register_op("aten.addcdiv")
def addcdiv(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    """Self + value * tensor1 / tensor2."""
    x, a, b = promote(self, tensor1, tensor2, floating=True)
    return x + jnp.asarray(value, x.dtype) * (a / b)


@register_op("aten.heaviside")
def heaviside(self: Array, values: Array) -> Array:
    """0 below zero, 1 above, `values` at zero; no gradient."""
    x, v = promote(self, values)
    return jnp.where(x == 0, v, (x > 0).astype(x.dtype))


@register_op("aten.ldexp")
def ldexp(self: Array, other: Array) -> Array:
    """Self * 2 ** other."""
    x, y = promote(self, other, floating=True)
    return x * jnp.exp2(y)
