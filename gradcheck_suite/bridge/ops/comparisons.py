"""Comparisons, logical and bitwise operations, whose derivatives are zero, and `where`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_inexact, promote
from gradcheck_suite.bridge.op_table import register_op


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
for _name, _function in BINARY.items():
    register_op(_name)(_on_promoted(_function))

LOGICAL: dict[str, Callable[..., Array]] = {
    "aten.logical_and": jnp.logical_and,
    "aten.logical_or": jnp.logical_or,
    "aten.logical_xor": jnp.logical_xor,
}
for _name, _logic in LOGICAL.items():
    register_op(_name)(lambda self, other, _logic=_logic: _logic(self, other))

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
for _name, _test in UNARY.items():
    register_op(_name)(lambda self, _test=_test: _test(self))


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
