"""Elementwise functions of one operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from gradcheck_suite.bridge.op_table import (
    Array,
    RandomnessError,
    absolute,
    default_float,
    is_complex,
    is_float,
    is_inexact,
    promote,
    register_op,
    result_dtype,
    with_derivatives,
)


def _entr(x: Array) -> Array:
    value = jnp.where(x > 0, -x * jnp.log(x), jnp.where(x == 0, 0, jnp.where(jnp.isnan(x), x, -jnp.inf)))
    return with_derivatives(value, (x, -1 - jnp.log(x)))


def _cotangent_derivative(n: int, x: Array) -> Array:
    """Return the nth derivative of pi * cot(pi * x)."""
    if n == 0:
        return jnp.pi / jnp.tan(jnp.pi * x)
    return jax.jvp(lambda y: _cotangent_derivative(n - 1, y), (x,), (jnp.ones_like(x),))[1]


def _reflected_polygamma(n: int, x: Array) -> Array:
    """Return the nth derivative of digamma, below 1/2 by reflection: JAX's polygamma loses all digits below -6."""
    below = x < 0.5
    direct = special.polygamma(n, jnp.where(below, 1 - x, x))
    if n % 2:
        direct = jnp.where(below, -direct, direct)
    return jnp.where(below, direct - _cotangent_derivative(n, jnp.where(below, x, 0.25)), direct)


def _digamma(x: Array) -> Array:
    """Return digamma, which is a signed infinity at 0 as in torch: JAX returns NaN there."""
    value = jnp.where(x == 0, -jnp.copysign(jnp.inf, x), special.digamma(x))
    return with_derivatives(value, (x, _reflected_polygamma(1, x)))


def _lgamma(x: Array) -> Array:
    return with_derivatives(special.gammaln(x), (x, _digamma(x)))


def _sinc(x: Array) -> Array:
    at_zero = x == 0
    scaled = jnp.where(at_zero, 1, x * jnp.pi)
    return jnp.where(at_zero, 1, jnp.sin(scaled) / scaled)


FLOATING: dict[str, Callable[[Array], Array]] = {
    "aten.acos": jnp.arccos,
    "aten.acosh": jnp.arccosh,
    "aten.asin": jnp.arcsin,
    "aten.asinh": jnp.arcsinh,
    "aten.atan": jnp.arctan,
    "aten.atanh": jnp.arctanh,
    "aten.cos": jnp.cos,
    "aten.cosh": jnp.cosh,
    "aten.deg2rad": jnp.deg2rad,
    "aten.digamma": _digamma,
    "aten.erf": special.erf,
    "aten.erfc": special.erfc,
    "aten.erfinv": special.erfinv,
    "aten.exp": jnp.exp,
    "aten.exp2": jnp.exp2,
    "aten.expm1": jnp.expm1,
    "aten.i0": lambda x: jnp.exp(absolute(x)) * special.i0e(x),
    "aten.lgamma": _lgamma,
    "aten.log": jnp.log,
    "aten.log10": jnp.log10,
    "aten.log1p": jnp.log1p,
    "aten.log2": jnp.log2,
    "aten.rad2deg": jnp.rad2deg,
    "aten.reciprocal": lambda x: 1 / x,
    "aten.rsqrt": lambda x: 1 / jnp.sqrt(x),
    "aten.sigmoid": jax.nn.sigmoid,
    "aten.sin": jnp.sin,
    "aten.sinc": _sinc,
    "aten.sinh": jnp.sinh,
    "aten.special_entr": _entr,
    "aten.special_i0e": special.i0e,
    "aten.special_i1": lambda x: jnp.exp(absolute(x)) * special.i1e(x),
    "aten.special_i1e": special.i1e,
    "aten.special_log_ndtr": special.log_ndtr,
    "aten.special_ndtri": special.ndtri,
    "aten.sqrt": jnp.sqrt,
    "aten.tan": jnp.tan,
    "aten.tanh": jnp.tanh,
}
"""Functions that convert integers to torch's default floating dtype."""


def _keeping_integers(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x) if is_inexact(x) else x


def _sgn(x: Array) -> Array:
    if not is_complex(x):
        return jnp.sign(x)
    size = jnp.abs(jnp.where(x == 0, 1, x))
    return jnp.where(x == 0, 0, x / size)


KEEPING: dict[str, Callable[[Array], Array]] = {
    "aten.abs": absolute,
    "aten.ceil": _keeping_integers(jnp.ceil),
    "aten.floor": _keeping_integers(jnp.floor),
    "aten.frac": lambda x: x - jnp.trunc(x),
    "aten.neg": jnp.negative,
    "aten.positive": lambda x: x,
    "aten.sgn": _sgn,
    "aten.sign": lambda x: x if x.dtype == jnp.bool_ else jnp.sign(x),
    "aten.square": lambda x: x * x,
    "aten.trunc": _keeping_integers(jnp.trunc),
}
"""Functions that keep the operand's dtype."""


def _floating(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda self: function(*promote(self, floating=True))


for _elementwise_name, _elementwise_function in FLOATING.items():
    register_op(_elementwise_name)(_floating(_elementwise_function))
for _elementwise_name, _elementwise_function in KEEPING.items():
    register_op(_elementwise_name)(_elementwise_function)


@register_op("aten.round")
def round_(self: Array, decimals: int = 0) -> Array:
    """Return self rounded half to even; negative `decimals` divide by 10^-decimals first, as torch does."""
    if not is_inexact(self):
        return self
    if decimals == 0:
        return jnp.round(self)
    scale = 10.0 ** abs(decimals)
    return jnp.round(self * scale) / scale if decimals > 0 else jnp.round(self / scale) * scale


@register_op("aten.polygamma")
def polygamma(n: int, self: Array) -> Array:
    """Return the (n+1)th derivative of the logarithm of the gamma function."""
    (x,) = promote(self, floating=True)
    return _digamma(x) if n == 0 else _reflected_polygamma(n, x)


@register_op("aten.logit")
def logit(self: Array, eps: float | None = None) -> Array:
    """Return log(x / (1 - x)) of x clamped to [eps, 1 - eps].

    The gradient outside [eps, 1 - eps] is 0; without eps the gradient outside [0, 1] is NaN.
    """
    (x,) = promote(self, floating=True)
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    outside = (x < low) | (x > high)
    inside = x if eps is None else jnp.clip(x, low, high)
    slope = jnp.where(outside, jnp.nan if eps is None else 0, 1 / (x * (1 - x)))
    return with_derivatives(jnp.log(inside / (1 - inside)), (x, slope))


@register_op("aten.nan_to_num")
def nan_to_num(
    self: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """Return self with NaN and infinities replaced; a replaced entry's gradient is 0."""
    if not is_float(self):
        return self
    limits = jnp.finfo(self.dtype)
    out = jnp.where(jnp.isnan(self), 0.0 if nan is None else nan, self)
    out = jnp.where(self == jnp.inf, limits.max if posinf is None else posinf, out)
    return jnp.where(self == -jnp.inf, limits.min if neginf is None else neginf, out).astype(self.dtype)


@register_op("aten.clamp", "aten.clamp_min")
def clamp(self: Array, min: Any = None, max: Any = None) -> Array:
    """Return self clamped to [min, max].

    At a bound the input gets the gradient, as in torch. Where min exceeds max the result is max.
    """
    dtype = jnp.result_type(*promote(*(x for x in (self, min, max) if x is not None)))
    x = jnp.asarray(self, dtype)
    low = None if min is None else jnp.asarray(min, dtype)
    high = None if max is None else jnp.asarray(max, dtype)
    if low is not None and high is not None and is_float(dtype) and (low.ndim or high.ndim):
        value = jnp.minimum(jnp.maximum(x, low), high)
        from_low, from_high = (x < low) & (low < high), (x > high) | (high < low)
        return with_derivatives(value, (x, (x >= low) & (x <= high)), (low, from_low), (high, from_high))
    if low is not None:
        x = jnp.where((x < low) | jnp.isnan(low), low, x)
    if high is not None:
        x = jnp.where((x > high) | jnp.isnan(high), high, x)
    return x


@register_op("aten.clamp_max")
def clamp_max(self: Array, max: Any) -> Array:
    """Return self clamped from above."""
    return clamp(self, None, max)


@register_op("aten.angle")
def angle(self: Array) -> Array:
    """Return the argument of a complex number; for real numbers pi, 0 or NaN, with gradient 0."""
    if is_complex(self):
        nought = self == 0
        return jnp.where(nought, 0, jnp.angle(jnp.where(nought, 1, self)))
    x = lax.stop_gradient(self)
    dtype = x.dtype if is_float(x) else default_float()
    flat = jnp.where(jnp.isnan(x) if is_float(x) else False, x, 0)
    return jnp.where(x < 0, jnp.pi, flat).astype(dtype)


@register_op("aten._conj", "aten.conj_physical", "aten._conj_physical")
def conj(self: Array) -> Array:
    """Return the complex conjugate, which is self for a real tensor."""
    return jnp.conj(self)


register_op("aten.resolve_conj", "aten.resolve_neg")(lambda self: self)


@register_op("aten.real")
def real(self: Array) -> Array:
    """Return the real part."""
    return jnp.real(self)


@register_op("aten.imag")
def imag(self: Array) -> Array:
    """Return the imaginary part."""
    return jnp.imag(self)


@register_op("aten.view_as_real")
def view_as_real(self: Array) -> Array:
    """Return a complex tensor (...) as real and imaginary parts, (..., 2)."""
    return jnp.stack([jnp.real(self), jnp.imag(self)], axis=-1)


@register_op("aten.view_as_complex")
def view_as_complex(self: Array) -> Array:
    """Return real and imaginary parts (..., 2) as a complex tensor (...)."""
    return lax.complex(self[..., 0], self[..., 1])


@register_op("aten.complex")
def complex_(real: Array, imag: Array) -> Array:
    """Return the complex numbers with these real and imaginary parts."""
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@register_op("aten.polar")
def polar(abs: Array, angle: Array) -> Array:
    """Return the complex numbers with these absolute values and angles."""
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


# Elementwise functions of two or three operands, with torch's type promotion.


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


# Activations, with torch's constants and with torch's subgradients at their kinks.


SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


@register_op("aten.relu")
def relu(self: Array) -> Array:
    """Return max(x, 0); the gradient at 0 is 0."""
    return jnp.where(self <= 0, 0, self)


@register_op("aten.relu6")
def relu6(self: Array) -> Array:
    """Return min(max(x, 0), 6); the gradient at 0 and at 6 is 0."""
    return hardtanh(self, 0, 6)


@register_op("aten.hardtanh")
def hardtanh(self: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    """Return x clamped to [min_val, max_val]; the gradient at both bounds is 0, unlike clamp's."""
    return jnp.where(self <= min_val, min_val, jnp.where(self >= max_val, max_val, self)).astype(self.dtype)


@register_op("aten.hardsigmoid")
def hardsigmoid(self: Array) -> Array:
    """Return clamp(x / 6 + 1/2, 0, 1); the gradient at both kinks is 0."""
    return jnp.where(self <= -3, 0, jnp.where(self >= 3, 1, (self + 3) / 6)).astype(self.dtype)


@register_op("aten.hardswish")
def hardswish(self: Array) -> Array:
    """Return x * hardsigmoid(x); the gradient is 0 at -3 and 1 at 3."""
    return jnp.where(self <= -3, 0, jnp.where(self >= 3, self, self * (self + 3) / 6)).astype(self.dtype)


@register_op("aten.leaky_relu")
def leaky_relu(self: Array, negative_slope: Any = 0.01) -> Array:
    """Return x above 0 and negative_slope * x elsewhere; the gradient at 0 is negative_slope."""
    return jnp.where(self > 0, self, self * negative_slope)


@register_op("aten.prelu", "aten._prelu_kernel")
def prelu(self: Array, weight: Array) -> Array:
    """Return leaky_relu with one slope, or one slope per channel (axis 1)."""
    if weight.ndim == 1 and self.ndim >= 1 and weight.size > 1:
        weight = weight.reshape(1, -1, *([1] * (self.ndim - 2))) if self.ndim > 1 else weight
    elif weight.size == 1:
        weight = weight.reshape(())
    return jnp.where(self > 0, self, self * weight)


@register_op("aten.threshold")
def threshold(self: Array, threshold: Any, value: Any) -> Array:
    """Return x where it is above the threshold and `value` elsewhere."""
    return jnp.where(self <= threshold, value, self).astype(self.dtype)


@register_op("aten.elu")
def elu(self: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    """Return scale * x above 0 and scale * alpha * (e^(input_scale * x) - 1) below."""
    below = jnp.where(self > 0, 0, self)
    return jnp.where(self > 0, scale * self, scale * alpha * jnp.expm1(input_scale * below))


@register_op("aten.celu")
def celu(self: Array, alpha: Any = 1.0) -> Array:
    """Return the variant of elu whose derivative is continuous."""
    return elu(self, alpha, 1.0, 1.0 / alpha)


@register_op("aten.selu")
def selu(self: Array) -> Array:
    """Return elu with the constants of Klambauer et al. 2017, equation 14."""
    return elu(self, SELU_ALPHA, SELU_SCALE, 1.0)


@register_op("aten.silu")
def silu(self: Array) -> Array:
    """Return x * sigmoid(x)."""
    return self * jax.nn.sigmoid(self)


@register_op("aten.mish")
def mish(self: Array) -> Array:
    """Return x * tanh(log(1 + e^x))."""
    return self * jnp.tanh(jnp.logaddexp(self, 0.0))


@register_op("aten.gelu")
def gelu(self: Array, approximate: str = "none") -> Array:
    """Return x times the standard normal distribution function, or its tanh approximation."""
    if approximate == "tanh":
        inner = (2 / jnp.pi) ** 0.5 * (self + 0.044715 * self * self * self)
        return 0.5 * self * (1 + jnp.tanh(inner))
    return 0.5 * self * (1 + special.erf(self * 0.5**0.5))


@register_op("aten.softplus")
def softplus(self: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    """Return log(1 + e^(beta * x)) / beta, and x itself where beta * x exceeds the threshold."""
    scaled = self * beta
    linear = scaled > threshold
    return jnp.where(linear, self, jnp.log1p(jnp.exp(jnp.where(linear, 0, scaled))) / beta)


@register_op("aten.log_sigmoid")
def log_sigmoid(self: Array) -> Array:
    """Return log(sigmoid(x)) without overflow."""
    return -jnp.logaddexp(-self, 0.0)


@register_op("aten.log_sigmoid_forward")
def log_sigmoid_forward(self: Array) -> tuple[Array, Array]:
    """Return log_sigmoid and e^-|x|, the buffer that torch's CPU backward reads."""
    return log_sigmoid(self), jnp.exp(-jnp.abs(self))


@register_op("aten.hardshrink")
def hardshrink(self: Array, lambd: Any = 0.5) -> Array:
    """Return 0 within [-lambd, lambd] and x elsewhere."""
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@register_op("aten.softshrink")
def softshrink(self: Array, lambd: Any = 0.5) -> Array:
    """Return x moved towards 0 by lambd, and 0 within [-lambd, lambd]."""
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, 0 * self))


@register_op("aten.glu")
def glu(self: Array, dim: int = -1) -> Array:
    """Return the first half along `dim` times the sigmoid of the second half."""
    first, second = jnp.split(self, 2, axis=dim)
    return first * jax.nn.sigmoid(second)


@register_op("aten._softmax")
def softmax(self: Array, dim: int, half_to_float: bool = False) -> Array:
    """Return e^x / sum e^x along `dim`."""
    x = self.astype(jnp.float32) if half_to_float else self
    return x if x.size == 0 else jax.nn.softmax(jnp.atleast_1d(x), axis=dim).reshape(x.shape)


@register_op("aten._log_softmax")
def log_softmax(self: Array, dim: int, half_to_float: bool = False) -> Array:
    """Return x - log sum e^x along `dim`."""
    x = self.astype(jnp.float32) if half_to_float else self
    return x if x.size == 0 else jax.nn.log_softmax(jnp.atleast_1d(x), axis=dim).reshape(x.shape)


@register_op("aten._safe_softmax")
def safe_softmax(self: Array, dim: int, dtype: Any = None) -> Array:
    """Return softmax along `dim`; a row that is -infinity everywhere gives zeros."""
    del dtype
    masked = jnp.all(self == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(masked, 0, jax.nn.softmax(jnp.where(masked, 0, self), axis=dim))


def _identity_unless_active(name: str) -> Callable[..., Array]:
    def dropout(input: Array, p: float, train: bool) -> Array:
        if train and p > 0:
            raise RandomnessError(f"{name} is active (p = {p:g}, train mode)")
        return input

    return dropout


for _activations_name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
    register_op(f"aten.{_activations_name}")(_identity_unless_active(_activations_name))


@register_op("aten.native_dropout")
def native_dropout(input: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    """Return the input and a mask of True; active dropout raises `RandomnessError`."""
    if train is not False and p > 0:
        raise RandomnessError(f"native_dropout is active (p = {p:g}, train mode)")
    return input, jnp.ones(input.shape, jnp.bool_)


@register_op("aten.rrelu")
def rrelu(self: Array, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, generator: Any = None) -> Array:
    """Return leaky_relu with the mean slope; random slopes (train mode) raise `RandomnessError`."""
    del generator
    if training and lower != upper:
        raise RandomnessError("rrelu draws its slopes in train mode")
    return leaky_relu(self, (lower + upper) / 2)


# Comparisons, logical and bitwise operations, whose derivatives are zero, and `where`.


def _on_promoted(function: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
    return lambda self, other: function(*promote(self, other))


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "aten.bitwise_and": jnp.bitwise_and,
    "aten.bitwise_or": jnp.bitwise_or,
    "aten.bitwise_xor": jnp.bitwise_xor,
    "aten.bitwise_left_shift": jnp.left_shift,
    "aten.bitwise_right_shift": jnp.right_shift,
    "aten.eq": jnp.equal,
    "aten.gcd": jnp.gcd,
    "aten.ge": jnp.greater_equal,
    "aten.gt": jnp.greater,
    "aten.lcm": jnp.lcm,
    "aten.le": jnp.less_equal,
    "aten.lt": jnp.less,
    "aten.ne": jnp.not_equal,
}
for _comparisons_name, _comparisons_function in BINARY.items():
    register_op(_comparisons_name)(_on_promoted(_comparisons_function))

LOGICAL: dict[str, Callable[..., Array]] = {
    "aten.logical_and": jnp.logical_and,
    "aten.logical_or": jnp.logical_or,
    "aten.logical_xor": jnp.logical_xor,
}
for _comparisons_name, _logic in LOGICAL.items():
    register_op(_comparisons_name)(lambda self, other, _logic=_logic: _logic(self, other))

UNARY: dict[str, Callable[[Array], Array]] = {
    "aten.bitwise_not": jnp.invert,
    "aten.isfinite": jnp.isfinite,
    "aten.isinf": jnp.isinf,
    "aten.isnan": jnp.isnan,
    "aten.isneginf": jnp.isneginf,
    "aten.isposinf": jnp.isposinf,
    "aten.logical_not": jnp.logical_not,
    "aten.signbit": lambda x: jnp.signbit(x) if is_inexact(x) else x < 0,
}
for _comparisons_name, _test in UNARY.items():
    register_op(_comparisons_name)(lambda self, _test=_test: _test(self))


@register_op("aten.isclose")
def isclose(self: Array, other: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Array:
    """Return whether |self - other| <= atol + rtol * |other|."""
    if not is_inexact(self):
        self, other = self.astype(jnp.float64), other.astype(jnp.float64)
    return jnp.isclose(self, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


@register_op("aten.isin")
def isin(
    elements: Any = None,
    test_elements: Any = None,
    assume_unique: bool = False,
    invert: bool = False,
    test_element: Any = None,
    element: Any = None,
) -> Array:
    """Return whether each element is one of the test elements."""
    x, y = promote(element if elements is None else elements, test_element if test_elements is None else test_elements)
    return jnp.isin(x, y, invert=invert)


@register_op("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(condition: Array, self: Any, other: Any) -> Array:
    """Return self where the condition holds and other elsewhere; only the chosen operand gets the gradient."""
    x, y = promote(self, other)
    return lax.select(*jnp.broadcast_arrays(condition.astype(jnp.bool_), x, y))
