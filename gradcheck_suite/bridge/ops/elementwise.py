"""Elementwise functions: arithmetic, activations and comparisons, with torch's type promotion and
subgradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from gradcheck_suite.bridge.op_table import (
    Array,
    Lowering,
    RandomnessError,
    absolute,
    default_float,
    is_complex,
    is_float,
    is_inexact,
    promote,
    register_op,
    register_table,
    result_dtype,
    with_derivatives,
)
from gradcheck_suite.catalogue.definitions import SHARES_TIES


def _hardswish(x: Array) -> Array:
    between = jnp.where(x >= 3, x, x * (x + 3) / 6)
    return jnp.where(x <= -3, 0, between).astype(x.dtype)


def _entr(x: Array) -> Array:
    not_positive = jnp.where(x == 0, 0, jnp.where(jnp.isnan(x), x, -jnp.inf))
    value = jnp.where(x > 0, -x * jnp.log(x), not_positive)
    return with_derivatives(value, (x, -1 - jnp.log(x)))


def _cotangent_derivative(n: int, x: Array) -> Array:
    """Return the nth derivative of pi * cot(pi * x)."""
    if n == 0:
        return jnp.pi / jnp.tan(jnp.pi * x)
    _, derivative = jax.jvp(
        lambda y: _cotangent_derivative(n - 1, y),
        (x,),
        (jnp.ones_like(x),),
    )
    return derivative


def _reflected_polygamma(n: int, x: Array) -> Array:
    """Return the nth derivative of digamma, below 1/2 by reflection: JAX's polygamma loses all
    digits below -6.
    """
    below = x < 0.5
    direct = special.polygamma(n, jnp.where(below, 1 - x, x))
    if n % 2:
        direct = jnp.where(below, -direct, direct)
    return jnp.where(below, direct - _cotangent_derivative(n, jnp.where(below, x, 0.25)), direct)


def _digamma(x: Array) -> Array:
    """Return digamma, which is a signed infinity at 0 as in torch: JAX returns NaN there."""
    value = jnp.where(x == 0, -jnp.copysign(jnp.inf, x), special.digamma(x))
    return with_derivatives(value, (x, _reflected_polygamma(1, x)))


def _sinc(x: Array) -> Array:
    at_zero = x == 0
    scaled = jnp.where(at_zero, 1, x * jnp.pi)
    return jnp.where(at_zero, 1, jnp.sin(scaled) / scaled)


def _atan2(y: Array, x: Array) -> Array:
    """Return the angle of the point (x, y); the gradient at the origin is 0."""
    origin = (y == 0) & (x == 0)
    safe = jnp.arctan2(jnp.where(origin, 0.0, y), jnp.where(origin, 1.0, x))
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), safe)


def _acosh(x: Array) -> Array:
    """Return the inverse of cosh, NaN below 1; torch's derivative 1/sqrt(x^2 - 1) goes on there."""
    # since 0.12 JAX's is a product of two roots, which are both NaN below -1
    below = x <= -1
    inside = jnp.arccosh(jnp.where(below, 2.0, x))
    # elsewhere -2 stands for x, since 0 times an infinite derivative would be NaN
    far = jnp.where(below, x, -2.0)
    outside = with_derivatives(jnp.full_like(x, jnp.nan), (far, lax.rsqrt(far * far - 1)))
    return jnp.where(below, outside, inside)


def _copysign(x: Array, y: Array) -> Array:
    """Return |x| with the sign of y; the gradient at x = 0 is 0."""
    flipped = jnp.where(jnp.signbit(x) == jnp.signbit(y), x, -x)
    return jnp.where(x == 0, lax.stop_gradient(flipped), flipped)


def _number(x: Array, y: Array, before: Array, first: Array) -> Array:
    """Return x where it comes first, or y is NaN, and y elsewhere: fmax and fmin, which ignore NaN."""
    y_is_nan = jnp.isnan(y)
    value = jnp.where(first | y_is_nan, x, y)
    if not (SHARES_TIES and is_float(value)):
        return value
    # where one is NaN both have the whole gradient
    half = jnp.where(x == y, 0.5, 0)
    unordered = jnp.isnan(x) | y_is_nan
    return with_derivatives(
        value, (x, half + (before | unordered)), (y, half + (~first | unordered))
    )


def _times_log(log: Callable[[Array], Array], shift: int) -> Lowering:
    """Return x * log(y + shift), which is 0 where x is 0 and y is not NaN."""

    def lowering(x: Array, y: Array) -> Array:
        shifted = y + shift if shift else y
        value = jnp.where((x == 0) & ~jnp.isnan(y), 0, x * log(y))
        # where the logarithm is infinite or NaN, a factor of 0 has no gradient in torch
        of_x = jnp.where((x == 0) & (shifted <= 0), 0, log(y))
        return with_derivatives(value, (x, of_x), (y, x / shifted))

    return lowering


FLOATING: dict[str, Lowering] = {
    "aten.acos": jnp.arccos,
    "aten.acosh": _acosh,
    "aten.asin": jnp.arcsin,
    "aten.asinh": jnp.arcsinh,
    "aten.atan": jnp.arctan,
    "aten.atan2": _atan2,
    "aten.atanh": jnp.arctanh,
    "aten.copysign": _copysign,
    "aten.cos": jnp.cos,
    "aten.cosh": jnp.cosh,
    "aten.digamma": _digamma,
    "aten.erf": special.erf,
    "aten.erfc": special.erfc,
    "aten.erfinv": special.erfinv,
    "aten.exp": jnp.exp,
    "aten.exp2": jnp.exp2,
    "aten.expm1": jnp.expm1,
    "aten.i0": lambda x: jnp.exp(absolute(x)) * special.i0e(x),
    "aten.ldexp": lambda x, y: x * jnp.exp2(y),
    "aten.lgamma": lambda x: with_derivatives(special.gammaln(x), (x, _digamma(x))),
    "aten.log": jnp.log,
    "aten.log10": jnp.log10,
    "aten.log1p": jnp.log1p,
    "aten.log2": jnp.log2,
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
    "aten.special_xlog1py": _times_log(jnp.log1p, 1),
    "aten.sqrt": jnp.sqrt,
    "aten.tan": jnp.tan,
    "aten.tanh": jnp.tanh,
    "aten.xlogy": _times_log(jnp.log, 0),
}
"""Functions that convert integers to torch's default floating dtype."""


def _keeping_integers(function: Callable[[Array], Array]) -> Lowering:
    return lambda x: function(x) if is_inexact(x) else x


def _sgn(x: Array) -> Array:
    if not is_complex(x):
        return jnp.sign(x)
    size = jnp.abs(jnp.where(x == 0, 1, x))
    return jnp.where(x == 0, 0, x / size)


def _hypot(x: Array, y: Array) -> Array:
    """Return sqrt(x^2 + y^2).

    The gradient is operand / result, which is NaN at the origin as in torch.
    """
    value = jnp.hypot(x, y)
    return with_derivatives(value, (x, x / value), (y, y / value))


def _remainder(function: Callable[[Array, Array], Array]) -> Lowering:
    """Return x - n * y, as `function` computes it, with its derivative for constant n."""

    def lowering(x: Array, y: Array) -> Array:
        rounded = function(lax.stop_gradient(x), lax.stop_gradient(y))
        if not is_float(x):
            return rounded
        # the value is the function's own, to the bit; the derivative is that of x - n * y
        linear = x - lax.stop_gradient(jnp.round((x - rounded) / y)) * y
        return rounded + (linear - lax.stop_gradient(linear))

    return lowering


PROMOTING: dict[str, Lowering] = {
    "aten._conj": jnp.conj,
    "aten._conj_physical": jnp.conj,
    "aten.abs": absolute,
    "aten.bitwise_and": jnp.bitwise_and,
    "aten.bitwise_left_shift": jnp.left_shift,
    "aten.bitwise_not": jnp.invert,
    "aten.bitwise_or": jnp.bitwise_or,
    "aten.bitwise_right_shift": jnp.right_shift,
    "aten.bitwise_xor": jnp.bitwise_xor,
    "aten.ceil": _keeping_integers(jnp.ceil),
    "aten.eq": jnp.equal,
    "aten.floor": _keeping_integers(jnp.floor),
    "aten.fmax": lambda x, y: _number(x, y, x > y, x >= y),
    "aten.fmin": lambda x, y: _number(x, y, x < y, x <= y),
    "aten.fmod": _remainder(jnp.fmod),
    "aten.gcd": jnp.gcd,
    "aten.ge": jnp.greater_equal,
    "aten.gt": jnp.greater,
    "aten.hypot": _hypot,
    "aten.isinf": jnp.isinf,
    "aten.isnan": jnp.isnan,
    "aten.lcm": jnp.lcm,
    "aten.le": jnp.less_equal,
    "aten.logical_and": jnp.logical_and,
    "aten.logical_not": jnp.logical_not,
    "aten.logical_or": jnp.logical_or,
    "aten.logical_xor": jnp.logical_xor,
    "aten.lt": jnp.less,
    # equal operands get half of the gradient each
    "aten.maximum": jnp.maximum,
    "aten.minimum": jnp.minimum,
    "aten.mul": jnp.multiply,
    "aten.ne": jnp.not_equal,
    "aten.neg": jnp.negative,
    "aten.remainder": _remainder(jnp.remainder),
    "aten.sgn": _sgn,
    "aten.sign": lambda x: x if x.dtype == jnp.bool_ else jnp.sign(x),
    "aten.signbit": lambda x: jnp.signbit(x) if is_inexact(x) else x < 0,
    "aten.trunc": _keeping_integers(jnp.trunc),
}
"""Functions that compute in the dtype to which torch promotes the operands."""

register_table(
    FLOATING, lambda function: lambda *operands: function(*promote(*operands, floating=True))
)
register_table(PROMOTING, lambda function: lambda *operands: function(*promote(*operands)))


@register_op("aten.round")
def round_(self: Array, *, decimals: int = 0) -> Array:
    """Return self rounded half to even.

    Negative `decimals` divide by 10^-decimals first, as torch does.
    """
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


def _clamp_with_shared_ties(x: Array, low: Any, high: Any, *, numbers: bool) -> Array:
    """Return x clamped with the derivatives of torch 2.14.

    `numbers`: whether no bound is a tensor.
    """
    if not numbers and (low is None or high is None):
        return jnp.maximum(x, low) if high is None else jnp.minimum(x, high)
    low = jnp.asarray(-jnp.inf, x.dtype) if low is None else low
    high = jnp.asarray(jnp.inf, x.dtype) if high is None else high
    value = jnp.minimum(jnp.maximum(x, low), high)
    if numbers:
        return with_derivatives(value, (x, (x > low) & (x < high)))
    ordered = ~(low > high)
    at_low, at_high = (ordered & (x == bound) & (low != high) for bound in (low, high))
    outside = (x < low) | (x > high)
    of_x = jnp.where(ordered, ~outside, jnp.isnan(x)) - 0.5 * (at_low | at_high)
    of_low = (ordered & (x < low)) + 0.5 * at_low
    of_high = (~ordered | (x > high)) + 0.5 * at_high
    return with_derivatives(value, (x, of_x), (low, of_low), (high, of_high))


def _clamp_between_tensors(x: Array, low: Array, high: Array) -> Array:
    value = jnp.minimum(jnp.maximum(x, low), high)
    from_low = (x < low) & (low < high)
    from_high = (x > high) | (high < low)
    return with_derivatives(
        value, (x, (x >= low) & (x <= high)), (low, from_low), (high, from_high)
    )


@register_op("aten.clamp", "aten.clamp_min")
def clamp(self: Array, low: Any = None, high: Any = None) -> Array:
    """Return self clamped to [low, high].

    At a bound the input gets the gradient, as in torch before 2.14; see `SHARES_TIES`. Where `low`
    exceeds `high` the result is `high`.
    """
    dtype = jnp.result_type(*promote(*(x for x in (self, low, high) if x is not None)))
    numbers = all(bound is None or isinstance(bound, int | float) for bound in (low, high))
    x = jnp.asarray(self, dtype)
    low, high = (None if bound is None else jnp.asarray(bound, dtype) for bound in (low, high))
    if SHARES_TIES and is_float(dtype):
        return _clamp_with_shared_ties(
            x,
            low,
            high,
            numbers=numbers,
        )
    if low is not None and high is not None and is_float(dtype) and (low.ndim or high.ndim):
        return _clamp_between_tensors(x, low, high)
    if numbers and is_float(dtype):
        # torch's gradient at a NaN is 0
        x = jnp.where(jnp.isnan(x), lax.stop_gradient(x), x)
    return _cut(x, low, high)


def _cut(x: Array, low: Array | None, high: Array | None) -> Array:
    if low is not None:
        x = jnp.where((x < low) | jnp.isnan(low), low, x)
    if high is not None:
        x = jnp.where((x > high) | jnp.isnan(high), high, x)
    return x


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


def _sum(function: Callable[[Array, Array], Array]) -> Lowering:
    """Return the function of an operand and alpha times the other.

    Of booleans, the sum is the logical or.
    """

    def lowering(self: Any, other: Any, *, alpha: Any = 1) -> Array:
        x, y = promote(self, other)
        return function(x, y if alpha == 1 else jnp.asarray(alpha, y.dtype) * y)

    return lowering


def _floored(x: Array, y: Array) -> Array:
    """Return floor(x / y) computed from the remainder, as torch and Python do: x / y may round up
    to an integer.
    """
    remainder = jnp.fmod(x, y)
    quotient = (x - remainder) / y
    is_below = (remainder != 0) & ((y < 0) != (remainder < 0))
    quotient = jnp.where(is_below, quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    exact = x / y
    floor = jnp.where(quotient == 0, jnp.copysign(0.0, exact), floor)
    return jnp.where(y == 0, exact, floor).astype(x.dtype)


@register_op("aten.div")
def div(self: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    """Return self / other; with a rounding mode the gradient is 0."""
    if rounding_mode is None:
        x, y = promote(self, other, floating=True)
        return x / y
    x, y = map(lax.stop_gradient, promote(self, other))
    if is_inexact(x):
        return _floored(x, y) if rounding_mode == "floor" else jnp.trunc(x / y)
    return (
        jnp.floor_divide(x, y) if rounding_mode == "floor" else lax.div(*jnp.broadcast_arrays(x, y))
    )


@register_op("aten.pow")
def pow_(self: Any, exponent: Any) -> Array:
    """Return self ** exponent.

    The gradient of the base is 0 where the exponent is 0, and the gradient of the exponent is 0
    where the base is 0 and the exponent is not negative, as in torch.
    """
    if not hasattr(exponent, "dtype"):
        dtype = result_dtype(self, exponent)
        x = jnp.asarray(self, dtype)
        if not is_inexact(dtype):
            return (
                lax.integer_pow(x, int(exponent)) if exponent >= 0 else jnp.power(x, int(exponent))
            )
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


def _hardtanh(self: Array, low: Any = -1, high: Any = 1) -> Array:
    """Return x clamped to [low, high]; the gradient at both bounds is 0, unlike clamp's."""
    at_most = jnp.where(self >= high, high, self)
    return jnp.where(self <= low, low, at_most).astype(self.dtype)


def log_sigmoid(self: Array) -> Array:
    """Return log(sigmoid(x)) without overflow."""
    return -jnp.logaddexp(-self, 0.0)


def _softmax(function: Callable[..., Array]) -> Lowering:
    def lowering(self: Array, dim: int, half_to_float: bool) -> Array:
        x = self.astype(jnp.float32) if half_to_float else self
        return x if x.size == 0 else function(jnp.atleast_1d(x), axis=dim).reshape(x.shape)

    return lowering


def _softplus(self: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    """Return log(1 + e^(beta * x)) / beta, and x itself where beta * x exceeds the threshold."""
    scaled = self * beta
    linear = scaled > threshold
    # beyond the threshold the exponential may be infinite: the branch that is not taken stays finite
    soft = jnp.log1p(jnp.exp(jnp.where(linear, 0, scaled))) / beta
    return jnp.where(linear, self, soft)


@register_op("aten.rrelu")
def rrelu(
    self: Array,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Array:
    """Return leaky_relu with the mean slope; random slopes (train mode) raise `RandomnessError`.

    torch decomposes it into an operation that counts as random without random slopes, too.
    """
    del generator
    if training and lower != upper:
        raise RandomnessError("rrelu draws its slopes in train mode")
    return jnp.where(self > 0, self, self * (lower + upper) / 2)


@register_op("aten.native_dropout")
def native_dropout(input: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    """Return the input and a mask of True; active dropout raises `RandomnessError`."""
    if train is not False and p > 0:
        raise RandomnessError(f"dropout is active (p = {p:g}, train mode)")
    return input, jnp.ones(input.shape, jnp.bool_)


@register_op("aten._safe_softmax")
def safe_softmax(self: Array, dim: int, dtype: Any = None) -> Array:
    """Return softmax along `dim`; a row that is -infinity everywhere gives zeros.

    Differentiating torch's decomposition would give NaN in such a row.
    """
    del dtype
    masked = jnp.all(self == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(masked, 0, jax.nn.softmax(jnp.where(masked, 0, self), axis=dim))


register_table(
    {
        "aten._log_softmax": _softmax(jax.nn.log_softmax),
        "aten._softmax": _softmax(jax.nn.softmax),
        "aten.add": _sum(jnp.add),
        "aten.clamp_max": lambda self, high: clamp(self, None, high),
        "aten.complex": lambda real, imag: lax.complex(*jnp.broadcast_arrays(real, imag)),
        # clamp(x / 6 + 1/2, 0, 1); the gradient at both kinks is 0
        "aten.hardsigmoid": lambda self: _hardtanh(self, -3, 3) / 6 + 0.5,
        # x * hardsigmoid(x); the gradient is 0 at -3 and 1 at 3
        "aten.hardswish": _hardswish,
        "aten.hardtanh": _hardtanh,
        "aten.leaky_relu": lambda self, negative_slope=0.01: jnp.where(
            self > 0, self, self * negative_slope
        ),
        # torch's CPU backward reads the second result
        "aten.log_sigmoid_forward": lambda self: (log_sigmoid(self), jnp.exp(-jnp.abs(self))),
        "aten.polar": lambda size, angle: lax.complex(size * jnp.cos(angle), size * jnp.sin(angle)),
        # the gradient at 0 is 0
        "aten.relu": lambda self: jnp.where(self <= 0, 0, self),
        "aten.softplus": _softplus,
        "aten.sub": _sum(jnp.subtract),
        "aten.view_as_complex": lambda self: lax.complex(self[..., 0], self[..., 1]),
        "aten.view_as_real": lambda self: jnp.stack([jnp.real(self), jnp.imag(self)], axis=-1),
        # only the chosen operand gets the gradient
        "aten.where.self": lambda condition, x, y: lax.select(
            *jnp.broadcast_arrays(condition.astype(jnp.bool_), *promote(x, y))
        ),
    }
)
