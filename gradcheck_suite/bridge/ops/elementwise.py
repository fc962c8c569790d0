"""Elementwise functions of one operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from gradcheck_suite.bridge.dtypes import Array, absolute, default_float, is_complex, is_float, is_inexact, promote
from gradcheck_suite.bridge.explicit_derivatives import with_derivatives
from gradcheck_suite.bridge.op_table import register_op


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


for _name, _function in FLOATING.items():
    register_op(_name)(_floating(_function))
for _name, _function in KEEPING.items():
    register_op(_name)(_function)


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
