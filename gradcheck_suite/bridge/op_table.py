"""The table of ATen operations and their JAX implementations, and the dtypes in which they compute.

An operation is looked up by its full name (`aten.add.Tensor`), then by the name without the
overload (`aten.add`), which stands for all overloads. torch decomposes the operations that are not
in the table, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce, wraps
from textwrap import indent
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.custom_derivatives import SymbolicZero

from gradcheck_suite.core.comparison import dtype_name
from gradcheck_suite.errors import UsageError


class BridgeError(UsageError):
    """The loss cannot be translated to JAX.

    Attributes:
        reason: why, and what to do, in one line.
        rewrite: lines of Python that help, which end the message; empty where none are known.
    """

    def __init__(self, reason: str, rewrite: str = "") -> None:
        super().__init__(f"{reason}:\n{indent(rewrite, '    ')}" if rewrite else reason)
        self.reason = " ".join(reason.split())
        self.rewrite = rewrite


class UnknownOperation(BridgeError):
    """The loss uses an operation that has no JAX implementation."""


class NotExportable(BridgeError):
    """`torch.export` cannot export the loss."""


class RandomnessError(BridgeError):
    """The loss draws random numbers, which differ between torch and JAX."""


class WrongLowering(BridgeError):
    """A registered JAX function failed, or returned another shape or dtype than torch."""


Lowering = Callable[..., Any]
_LoweringT = TypeVar("_LoweringT", bound=Lowering)

_TABLE: dict[str, Lowering] = {}
DYNAMIC: set[str] = set()
"""Operations whose result's shape depends on values: a program with one of them runs without `jax.jit`."""


def register_op(*names: str, dynamic: bool = False) -> Callable[[_LoweringT], _LoweringT]:
    """Register the JAX implementation of an ATen or custom operation.

    As a decorator::

        @register_op("aten.cosh")
        def cosh(self):
            return jax.numpy.cosh(self)

    The function takes the operation's arguments, named as in torch's schema, with JAX arrays in
    place of tensors and dtypes as `torch.dtype`. It returns an array, or a tuple for several
    results, of the shapes and dtypes that torch returns; the bridge checks them at every call. JAX
    must be able to differentiate the function.

    Args:
        names: `namespace.name`, for all overloads, or `namespace.name.overload`. A later
            registration replaces an earlier one.
        dynamic: whether the shape of the result depends on the arguments' values.

    Raises:
        UsageError: a name has another form.
    """
    for name in names:
        if not isinstance(name, str) or name.count(".") not in (1, 2):
            raise UsageError(
                "register_op: expected names such as 'aten.add' or 'aten.add.Tensor', got"
                f" {name!r}: write the namespace, a dot and the operation's name"
            )

    def register(lowering: _LoweringT) -> _LoweringT:
        for name in names:
            _TABLE[name] = lowering
            # a later registration decides: it may have a fixed shape where an earlier one had none
            (DYNAMIC.add if dynamic else DYNAMIC.discard)(name)
        return lowering

    return register


def register_table(
    lowerings: Mapping[str, Lowering],
    wrapped: Callable[[Lowering], Lowering] = lambda function: function,
) -> None:
    """Register each of several operations, after `wrapped` is applied to its function."""
    for name, lowering in lowerings.items():
        register_op(name)(wrapped(lowering))


def _names(op: torch._ops.OpOverload) -> tuple[str, str]:
    packet = f"{op.namespace}.{op._schema.name.partition('::')[2]}"
    return f"{packet}.{op._overloadname}", packet


def lowering_of(op: torch._ops.OpOverload) -> Lowering | None:
    """Return the JAX implementation of an operation, or None where the table has none."""
    full, packet = _names(op)
    # an entry for one overload comes before that for all
    return _TABLE.get(full) or _TABLE.get(packet)


def is_dynamic(op: torch._ops.OpOverload) -> bool:
    """Return whether the shape of the operation's result depends on values."""
    return any(name in DYNAMIC for name in _names(op))


def table() -> dict[str, str]:
    """Return every registered name and its family: the name of the module that registered it."""
    return {
        name: lowering.__module__.rpartition(".")[2] for name, lowering in sorted(_TABLE.items())
    }


# torch's integers are int64, of which JAX makes int32 without this
jax.config.update("jax_enable_x64", True)

Array = jax.Array
_DEFAULT_FLOAT: ContextVar[torch.dtype | None] = ContextVar("default_float", default=None)


@contextmanager
def default_float_is(dtype: torch.dtype) -> Iterator[None]:
    """Fix torch's default dtype to the one at the time of the export."""
    token = _DEFAULT_FLOAT.set(dtype)
    try:
        yield
    finally:
        _DEFAULT_FLOAT.reset(token)


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype of a torch dtype."""
    return jnp.dtype(getattr(jnp, dtype_name(dtype)))


def default_float() -> Any:
    """Return the dtype to which torch converts integers for floating-point operations."""
    return jax_dtype(_DEFAULT_FLOAT.get() or torch.get_default_dtype())


def _default_complex() -> Any:
    return jnp.dtype(jnp.complex128 if default_float() == jnp.float64 else jnp.complex64)


def is_float(x: Any) -> bool:
    """Return whether an array or a dtype is real floating-point."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.floating))


def is_complex(x: Any) -> bool:
    """Return whether an array or a dtype is complex."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.complexfloating))


def is_inexact(x: Any) -> bool:
    """Return whether an array or a dtype is floating-point or complex, so that it has derivatives."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.inexact))


def _number_dtype(number: Any) -> Any:
    # a float of Python is no float64 in torch: it has the default dtype
    if isinstance(number, bool):
        return jnp.dtype(jnp.bool_)
    if isinstance(number, int):
        return jnp.dtype(jnp.int64)
    return _default_complex() if isinstance(number, complex) else default_float()


def _joined(dtypes: Iterable[Any]) -> Any:
    dtypes = list(dtypes)
    return reduce(jnp.promote_types, dtypes) if dtypes else None


def _over(high: Any, low: Any) -> Any:
    """Return the result dtype of operands of dtype `high` and of lower-priority operands of dtype
    `low`.
    """
    if high is None or low is None:
        return low if high is None else high
    if is_complex(high):
        return high
    if is_float(high):
        return jnp.promote_types(high, jnp.complex64) if is_complex(low) else high
    # an operand of a higher category decides, though its priority is lower
    if high == jnp.bool_ or is_inexact(low):
        return jnp.promote_types(high, low) if not is_inexact(low) else low
    return high


def result_dtype(*operands: Any) -> Any:
    """Return the dtype in which torch computes with these operands: arrays or Python numbers.

    JAX promotes by its own lattice and treats Python numbers as weakly typed. torch has three
    priorities (tensors with dimensions, zero-dimensional tensors, Python numbers), and an operand
    of a lower priority changes the dtype only if its category (boolean, integer, float, complex) is
    higher. Every lowered operation calls `promote`, so that no result is weakly typed. Source:
    "Tensor attributes, type promotion" of torch's documentation.
    """
    arrays = [x for x in operands if hasattr(x, "dtype")]
    numbers = _joined(_number_dtype(x) for x in operands if not hasattr(x, "dtype"))
    sized = _joined(jnp.dtype(x.dtype) for x in arrays if x.ndim)
    scalars = _joined(jnp.dtype(x.dtype) for x in arrays if not x.ndim)
    return _over(_over(sized, scalars), numbers)


def promote(*operands: Any, floating: bool = False) -> list[Array]:
    """Return the operands as arrays of the dtype in which torch computes with them.

    Args:
        operands: arrays or Python numbers.
        floating: whether integers are converted to torch's default floating dtype.
    """
    dtype = result_dtype(*operands)
    if floating and not is_inexact(dtype):
        dtype = default_float()
    return [jnp.asarray(x, dtype) for x in operands]


def on_vectors(function: _LoweringT) -> _LoweringT:
    """Return the function of tensors with axes for a first tensor without any, which torch takes as
    a vector of one.
    """

    @wraps(function)
    def lowering(self: Array, *args: Any, **kwargs: Any) -> Any:
        if self.ndim:
            return function(self, *args, **kwargs)
        flat = [x.reshape(-1) if isinstance(x, Array) else x for x in args]
        return jax.tree.map(lambda x: x.reshape(()), function(self.reshape(1), *flat, **kwargs))

    return cast("_LoweringT", lowering)


def absolute(x: Array) -> Array:
    """Return |x| with gradient 0 at 0, as in torch.

    JAX's gradient is 1 there for real and NaN for complex numbers.
    """
    if is_float(x):
        # sign(x) is the derivative, and 0 at 0
        return x * lax.stop_gradient(jnp.sign(x))
    return unless_zero(jnp.abs, x) if is_complex(x) else jnp.abs(x)


def unless_zero(function: Callable[[Array], Array], x: Array) -> Array:
    """Return what a function makes of x, and 0 with gradient 0 where x is 0."""
    zero = x == 0
    # JAX multiplies the derivative of the branch that is not taken by 0, and 0 times infinity is
    # NaN: the inner `where` keeps it finite
    # (https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where)
    return jnp.where(zero, 0, function(jnp.where(zero, 1, x)))


def to_array(tensor: torch.Tensor) -> Array:
    """Return a copy of a torch tensor's values as a JAX array of the same dtype."""
    # a conjugate or a negative may be a bit of the view, which numpy does not know
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    # numpy has no bfloat16 of its own, so torch hands none over
    if tensor.dtype is torch.bfloat16:
        return jax.device_put(tensor.to(torch.float32).numpy().astype(jnp.bfloat16))
    # `jnp.array` would compile a copy for every shape
    return jax.device_put(np.array(tensor.numpy(force=True)))


@jax.custom_jvp
def _with_derivatives(
    value: Array, inputs: tuple[Array, ...], derivatives: tuple[Array, ...]
) -> Array:
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
    """Return `value` as a function of some inputs with given partial derivatives.

    Second derivatives are wrong. It serves where torch's derivative is a convention and not a
    limit.

    Args:
        value: the function's value.
        inputs_and_derivatives: pairs of an input and the partial derivative with respect to it,
            each broadcastable to the value's shape. Derivatives may be infinite or NaN.
    """
    pairs = [
        (jnp.broadcast_to(x, value.shape), jnp.broadcast_to(s, value.shape))
        for x, s in inputs_and_derivatives
    ]
    detach = jax.lax.stop_gradient
    return _with_derivatives(
        detach(value), tuple(x for x, _ in pairs), tuple(detach(s) for _, s in pairs)
    )
