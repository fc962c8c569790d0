"""Activations, with torch's constants and with torch's subgradients at their kinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.errors import RandomnessError
from gradcheck_suite.bridge.op_table import register_op

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


for _name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
    register_op(f"aten.{_name}")(_identity_unless_active(_name))


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
