"""A jaxpr as a tape of numpy calls: JAX differentiates, numpy evaluates.

XLA takes 40 to 400 ms to lower and compile a small program that is then called a few times. A tape
is made in a millisecond, and calls numpy for each equation in JAX's own order. So the derivative
rules are those of JAX, and of XLA nothing is used: what a tape computes is held to XLA by
`gradcheck_suite.reference.evaluation`, and in the tests equation by equation.

`RULES` has a row for each primitive. One that is missing makes `Tape` raise
`UnknownPrimitiveError`, and XLA computes the program. A comment says where numpy and JAX differ.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import scipy.special
from jax.extend.core import ClosedJaxpr, Literal
from numpy.lib.stride_tricks import sliding_window_view

from gradcheck_suite.core.jax_equations import scan_parts

Array = npt.NDArray[Any]
Parameters = Mapping[str, Any]
"""The parameters of an equation."""
Operation = Callable[..., Any]
"""Takes the operands of an equation. Returns its result, or a sequence of them where the primitive has several."""
Rule = Callable[[Parameters], Operation]


class UnknownPrimitiveError(Exception):
    """No row of `RULES` computes an equation."""


RULES: dict[str, Rule] = {}
"""For each primitive what makes the operation of an equation from its parameters."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return add


def _always(operation: Operation) -> Rule:
    return lambda _: operation


def _same_in_numpy(**operations: Operation) -> None:
    """Add primitives that have no parameter numpy would have to know of."""
    for name, operation in operations.items():
        RULES[name] = _always(operation)


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f"


# Elementwise operations.


def _quotient(a: Array, b: Array) -> Array:
    if _is_float(a):
        return np.divide(a, b)
    # integers: numpy's quotient is a float, its `//` rounds down, and XLA truncates; a division by
    # zero is -1 in XLA
    divisor = np.where(b == 0, 1, b)
    down = np.floor_divide(a, divisor)
    inexact = (down * divisor != a) & ((a < 0) != (divisor < 0))
    return np.where(b == 0, -1, down + inexact).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    if _is_float(a):
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(a.dtype)


def _sign(x: Array) -> Array:
    # numpy's sign of -0.0 is 0.0, and that of XLA -0.0
    return np.where(x == 0, x, np.sign(x))


def _negative(x: Array) -> Array:
    return np.invert(x) if x.dtype == bool else np.negative(x)


def _reciprocal_root(x: Array) -> Array:
    return 1 / np.sqrt(x)


def _clamped(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _log_gamma(x: Array) -> Array:
    # scipy's is minus infinity at minus infinity
    return np.where(np.isinf(x), np.inf, scipy.special.gammaln(x))


@cache
def _digamma_at_zero() -> float:
    """Return what XLA has at 0: NaN, and since JAX 0.12 minus infinity."""
    return float(jax.lax.digamma(np.float64(0.0)))


def _digamma(x: Array) -> Array:
    # at its poles, the negative integers, XLA has NaN, and scipy an infinity at 0
    at_poles = np.where(x == 0, _digamma_at_zero(), np.nan)
    return np.where((x <= 0) & (x == np.floor(x)), at_poles, scipy.special.psi(x))


def _one_minus_square(x: Array) -> Array:
    return 1 - np.square(x)


_same_in_numpy(
    # a maximum or minimum with a NaN is NaN in both
    abs=np.abs,
    acos=np.arccos,
    acosh=np.arccosh,
    add=np.add,
    add_any=np.add,
    asin=np.arcsin,
    asinh=np.arcsinh,
    atan=np.arctan,
    atan2=np.arctan2,
    atanh=np.arctanh,
    cbrt=np.cbrt,
    ceil=np.ceil,
    clamp=_clamped,
    cos=np.cos,
    cosh=np.cosh,
    digamma=_digamma,
    div=_quotient,
    eq=np.equal,
    erf=scipy.special.erf,
    erf_inv=scipy.special.erfinv,
    erfc=scipy.special.erfc,
    exp=np.exp,
    exp2=np.exp2,
    expm1=np.expm1,
    floor=np.floor,
    ge=np.greater_equal,
    gt=np.greater,
    is_finite=np.isfinite,
    le=np.less_equal,
    lgamma=_log_gamma,
    log=np.log,
    log1p=np.log1p,
    logistic=scipy.special.expit,
    lt=np.less,
    max=np.maximum,
    min=np.minimum,
    mul=np.multiply,
    ne=np.not_equal,
    neg=_negative,
    one_minus_square=_one_minus_square,  # of the derivative of tanh since JAX 0.12
    pow=np.power,
    rem=_remainder,
    rsqrt=_reciprocal_root,
    sign=_sign,
    sin=np.sin,
    sinh=np.sinh,
    sqrt=np.sqrt,
    square=np.square,
    sub=np.subtract,
    tan=np.tan,
    tanh=np.tanh,
    **{"and": np.bitwise_and, "not": np.invert, "or": np.bitwise_or, "xor": np.bitwise_xor},
)


@_rule("integer_pow")
def _integer_power(p: Parameters) -> Operation:
    exponent = int(p["y"])
    if exponent == 2:
        return np.square
    if exponent == 3:
        return lambda x: x * x * x
    # numpy raises an integer to no negative power
    return lambda x: x**exponent if exponent >= 0 else 1 / x**-exponent


@_rule("round")
def _rounded(p: Parameters) -> Operation:
    if p["rounding_method"].name == "TO_NEAREST_EVEN":
        return np.round

    def away_from_zero(x: Array) -> Array:
        # x + 0.5 would round the largest number below 0.5 to 1
        whole = np.trunc(x)
        up: Array = np.abs(x - whole) >= 0.5
        return np.where(up, whole + np.copysign(1.0, x), whole)

    return away_from_zero


@_rule("select_n")
def _selected(_: Parameters) -> Operation:
    def select(which: Array, *cases: Array) -> Array:
        if which.dtype == bool:
            return np.where(which, cases[1], cases[0])
        return np.choose(which, cases)

    return select


@_rule("convert_element_type")
def _converted(p: Parameters) -> Operation:
    if not isinstance(p["new_dtype"], np.dtype):
        raise UnknownPrimitiveError(f"convert_element_type to {p['new_dtype']}")
    dtype = p["new_dtype"]
    if dtype.kind not in "iu":
        return lambda x: x.astype(dtype)

    def to_integers(x: Array) -> Array:
        if not _is_float(x):
            return x.astype(dtype)
        # XLA takes NaN to 0, and what is out of range to the nearest integer there is; in C, and so
        # in numpy, both are undefined
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
        inside = (x > low) & (x < high)
        outside = np.where(x >= high, high, np.where(x <= low, low, 0)).astype(dtype)
        return np.where(inside, np.where(inside, x, 0).astype(dtype), outside)

    return to_integers


# Shapes.


@_rule("broadcast_in_dim")
def _broadcast(p: Parameters) -> Operation:
    shape = tuple(p["shape"])
    dimensions = tuple(p["broadcast_dimensions"])

    def broadcast(x: Array) -> Array:
        aligned = [1] * len(shape)
        for length, dimension in zip(np.shape(x), dimensions, strict=True):
            aligned[dimension] = length
        return np.broadcast_to(np.reshape(x, aligned), shape)

    return broadcast


@_rule("reshape")
def _reshaped(p: Parameters) -> Operation:
    sizes = tuple(p["new_sizes"])
    dimensions = p.get("dimensions")
    if dimensions is None:
        return lambda x: np.reshape(x, sizes)
    return lambda x: np.reshape(np.transpose(x, dimensions), sizes)


@dataclass(frozen=True)
class _OfAxes:
    """A function of numpy that takes one parameter of a primitive, which says which axes.

    Attributes:
        function: called with an array, or with all arrays, and the axes.
        parameter: the parameter's name.
        joins: whether the function takes all arrays, and one axis.
    """

    function: Callable[..., Array]
    parameter: str
    joins: bool = False

    def __call__(self, p: Parameters) -> Operation:
        """Return the operation of an equation."""
        if self.joins:
            return lambda *arrays: self.function(arrays, p[self.parameter])
        axes = tuple(p[self.parameter])
        return lambda x: self.function(x, axes)


RULES |= {
    "squeeze": _OfAxes(np.squeeze, "dimensions"),
    "transpose": _OfAxes(np.transpose, "permutation"),
    "rev": _OfAxes(np.flip, "dimensions"),
    "concatenate": _OfAxes(np.concatenate, "dimension", joins=True),
    "stack": _OfAxes(np.stack, "axis", joins=True),
}


@_rule("unstack")
def _unstacked(p: Parameters) -> Operation:
    axis = p["axis"]
    return lambda x: list(np.moveaxis(x, axis, 0))


@_rule("split")
def _split(p: Parameters) -> Operation:
    ends = np.cumsum(p["sizes"])[:-1]
    axis = p["axis"]
    return lambda x: np.split(x, ends, axis)


@_rule("slice")
def _sliced(p: Parameters) -> Operation:
    strides = p["strides"] or (1,) * len(p["start_indices"])
    index = tuple(map(slice, p["start_indices"], p["limit_indices"], strides))
    return lambda x: x[index]


@_rule("iota")
def _iota(p: Parameters) -> Operation:
    shape = tuple(p["shape"])
    dimension = p["dimension"]
    aligned = [1] * len(shape)
    aligned[dimension] = shape[dimension]
    numbers = np.arange(shape[dimension]).astype(p["dtype"]).reshape(aligned)
    value = np.broadcast_to(numbers, shape)
    return lambda: value


@dataclass(frozen=True)
class Padding:
    """What `pad` adds to one axis.

    Attributes:
        low: number of elements before the first one; a negative number drops elements.
        high: number of elements after the last one; a negative number drops elements.
        interior: number of elements between two neighbours.
    """

    low: int
    high: int
    interior: int = 0


def padded(x: Array, value: Any, paddings: Sequence[Padding]) -> Array:
    """Return an array with elements of a value around and between its own, or without some of its own.

    Args:
        x: the array.
        value: of what is added.
        paddings: for each axis what is added.
    """
    spread = [
        n + max(n - 1, 0) * padding.interior for n, padding in zip(x.shape, paddings, strict=True)
    ]
    before = [max(padding.low, 0) for padding in paddings]
    shape = [
        low + n + max(padding.high, 0)
        for low, n, padding in zip(before, spread, paddings, strict=True)
    ]
    out = np.full(shape, value, x.dtype)
    own = [
        slice(low, low + n, padding.interior + 1)
        for low, n, padding in zip(before, spread, paddings, strict=True)
    ]
    out[tuple(own)] = x
    # numpy's pad drops nothing
    kept = [
        slice(max(-padding.low, 0), n - max(-padding.high, 0))
        for n, padding in zip(shape, paddings, strict=True)
    ]
    return out[tuple(kept)]


@_rule("pad")
def _padded(p: Parameters) -> Operation:
    paddings = [Padding(*each) for each in p["padding_config"]]
    return lambda x, value: padded(x, value, paddings)


# Reductions, running ones, and order.


def _lowest(dtype: np.dtype[Any]) -> Any:
    """Return what every value of a dtype is at least."""
    if dtype.kind == "f":
        return -np.inf
    return False if dtype.kind == "b" else np.iinfo(dtype).min


def _highest(dtype: np.dtype[Any]) -> Any:
    """Return what every value of a dtype is at most."""
    if dtype.kind == "f":
        return np.inf
    return True if dtype.kind == "b" else np.iinfo(dtype).max


# numpy adds up small integers in int64, so it is given the dtype; it reduces no axis of length 0
# without a first value. A maximum or minimum with a NaN is NaN in both.


def _sum(x: Array, axes: tuple[int, ...]) -> Any:
    return np.add.reduce(x, axis=axes, dtype=x.dtype)


def _product(x: Array, axes: tuple[int, ...]) -> Any:
    return np.multiply.reduce(x, axis=axes, dtype=x.dtype)


def _maximum(x: Array, axes: tuple[int, ...]) -> Any:
    return np.maximum.reduce(x, axis=axes, initial=_lowest(x.dtype))


def _minimum(x: Array, axes: tuple[int, ...]) -> Any:
    return np.minimum.reduce(x, axis=axes, initial=_highest(x.dtype))


def _conjunction(x: Array, axes: tuple[int, ...]) -> Any:
    return np.all(x, axes) if x.dtype == bool else np.bitwise_and.reduce(x, axis=axes)


def _disjunction(x: Array, axes: tuple[int, ...]) -> Any:
    return np.any(x, axes) if x.dtype == bool else np.bitwise_or.reduce(x, axis=axes)


_REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...]], Any]] = {
    "reduce_and": _conjunction,
    "reduce_max": _maximum,
    "reduce_min": _minimum,
    "reduce_or": _disjunction,
    "reduce_prod": _product,
    "reduce_sum": _sum,
}


def _reduced(reduce: Callable[[Array, tuple[int, ...]], Any]) -> Rule:
    def rule(p: Parameters) -> Operation:
        axes = tuple(p["axes"])
        return lambda x: reduce(x, axes)

    return rule


for _name, _reduction in _REDUCTIONS.items():
    RULES[_name] = _reduced(_reduction)


def _place_of(find: Callable[[Array, int], Any]) -> Rule:
    # the first NaN counts as the largest and as the smallest, in both
    def rule(p: Parameters) -> Operation:
        (axis,) = p["axes"]
        return lambda x: np.asarray(find(x, axis)).astype(p["index_dtype"])

    return rule


RULES["argmax"] = _place_of(np.argmax)
RULES["argmin"] = _place_of(np.argmin)


def _running(function: np.ufunc) -> Rule:
    def rule(p: Parameters) -> Operation:
        axis = p["axis"]

        def accumulate(x: Array) -> Array:
            # numpy would add up small integers in int64
            return function.accumulate(x, axis, dtype=x.dtype)

        if p["reverse"]:
            return lambda x: np.flip(accumulate(np.flip(x, axis)), axis)
        return accumulate

    return rule


_RUNNING = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
    "cumlogsumexp": np.logaddexp,
}
for _name, _function in _RUNNING.items():
    RULES[_name] = _running(_function)


@_rule("sort")
def _sorted(p: Parameters) -> Operation:
    axis = p["dimension"]
    number = p["num_keys"]

    def sort(*arrays: Array) -> list[Array]:
        # both put NaN last and take -0.0 for 0.0; numpy's last key is the first one of JAX. Where
        # JAX may exchange equal keys, it is as in a stable sort
        order = np.lexsort(arrays[number - 1 :: -1], axis=axis)
        return [np.take_along_axis(x, order, axis) for x in arrays]

    return sort


@_rule("top_k")
def _top(p: Parameters) -> Operation:
    number = p["k"]
    axis = p.get("axis", -1)

    def top(x: Array) -> list[Array]:
        # NaN is the largest; of equal values the first one comes first. `~x` falls as an integer
        # x rises, and has no overflow
        keys = (-x, ~np.isnan(x)) if _is_float(x) else (~x,)
        order = np.take(np.lexsort(keys, axis=axis), range(number), axis)
        return [np.take_along_axis(x, order, axis), order.astype(np.int32)]

    return top


# Products.


@_rule("dot_general")
def _product_of_two(p: Parameters) -> Operation:
    (left_summed, right_summed), (left_batch, right_batch) = p["dimension_numbers"]
    dtype = p.get("preferred_element_type")

    def product(a: Array, b: Array) -> Array:
        left = [i for i in range(a.ndim) if i not in (*left_summed, *left_batch)]
        right = [i for i in range(b.ndim) if i not in (*right_summed, *right_batch)]
        batch = [a.shape[i] for i in left_batch]
        rows = [a.shape[i] for i in left]
        columns = [b.shape[i] for i in right]
        summed = math.prod(a.shape[i] for i in left_summed)
        one = a.transpose(*left_batch, *left, *left_summed)
        other = b.transpose(*right_batch, *right_summed, *right)
        found = np.matmul(
            one.reshape(*batch, math.prod(rows), summed),
            other.reshape(*batch, summed, math.prod(columns)),
        )
        return found.reshape(*batch, *rows, *columns).astype(dtype or found.dtype, copy=False)

    return product


@_rule("conv_general_dilated")
def _convolution(p: Parameters) -> Operation:
    numbers = p["dimension_numbers"]
    strides = p["window_strides"]
    paddings = [Padding(0, 0)] * 2 + [
        Padding(low, high, dilation - 1)
        for (low, high), dilation in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    dilations = p["rhs_dilation"]
    # groups of the batch are groups of features, once they stand beside each other
    batch_groups = p["batch_group_count"]
    groups = batch_groups if batch_groups > 1 else p["feature_group_count"]

    def rows(a: Array, kernel: Sequence[int]) -> tuple[Array, list[int]]:
        """Return (groups, places, terms), what each place of the result is a sum over, and the shape of the places."""
        filled = padded(a, 0, paddings)
        view = _windows(filled, (1, 1, *kernel), (1, 1, *strides), (1, 1, *dilations))
        items, features, *places = view.shape[: a.ndim]
        grouped = view.reshape(
            items,
            groups,
            features // groups,
            *places,
            *kernel,
        )
        spatial = range(3, 3 + len(places))
        terms = [2, *range(3 + len(places), grouped.ndim)]
        found = grouped.transpose(1, 0, *spatial, *terms)
        return found.reshape(groups, items * math.prod(places), -1), [items, *places]

    def convolve(a: Array, b: Array) -> Array:
        a = a.transpose(numbers.lhs_spec)
        b = b.transpose(numbers.rhs_spec)
        if batch_groups > 1:
            a = np.concatenate(np.split(a, batch_groups, 0), 1)
        factors, shape = rows(a, b.shape[2:])
        columns = b.reshape(groups, b.shape[0] // groups, -1).transpose(0, 2, 1)
        if np.isfinite(b).all():
            found = np.matmul(factors, columns)
        else:
            # XLA leaves out what pads and dilates: 0 there, where a product with an infinity is NaN
            own, _ = rows(np.ones_like(a), b.shape[2:])
            terms = factors[..., np.newaxis] * columns[:, np.newaxis]
            found = np.where(own[..., np.newaxis] != 0, terms, 0).sum(axis=2)
        found = np.moveaxis(found.reshape(groups, *shape, -1), (0, -1), (1, 2))
        found = found.reshape(shape[0], b.shape[0], *shape[1:])
        return found.transpose(np.argsort(numbers.out_spec))

    return convolve


# Windows.


def _windows(
    x: Array, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Array:
    """Return a view of windows: first the axes of their places, then those within a window."""
    extent = [(n - 1) * dilation + 1 for n, dilation in zip(sizes, dilations, strict=True)]
    if any(n < length for n, length in zip(x.shape, extent, strict=True)):
        places = [max(n - e + 1, 0) for n, e in zip(x.shape, extent, strict=True)]
        return np.empty((*(-(-n // s) for n, s in zip(places, strides, strict=True)), *sizes))
    view = sliding_window_view(x, tuple(extent))
    steps = [slice(None, None, step) for step in (*strides, *dilations)]
    return view[tuple(steps)]


def _over_windows(
    reduce: Callable[[Array, tuple[int, ...]], Any], neutral: Callable[[np.dtype[Any]], Any]
) -> Rule:
    def rule(p: Parameters) -> Operation:
        sizes = p["window_dimensions"]
        strides = p["window_strides"]
        dilations = p["window_dilation"]
        paddings = [
            Padding(low, high, dilation - 1)
            for (low, high), dilation in zip(p["padding"], p["base_dilation"], strict=True)
        ]

        def over_windows(x: Array) -> Any:
            filled = padded(x, neutral(x.dtype), paddings)
            view = _windows(filled, sizes, strides, dilations)
            return reduce(view, tuple(range(x.ndim, 2 * x.ndim)))

        return over_windows

    return rule


RULES["reduce_window_sum"] = _over_windows(_sum, lambda _: 0)
RULES["reduce_window_max"] = _over_windows(_maximum, _lowest)
RULES["reduce_window_min"] = _over_windows(_minimum, _highest)


@_rule("select_and_scatter_add")
def _scattered_to_selected(p: Parameters) -> Operation:
    sizes = p["window_dimensions"]
    strides = p["window_strides"]
    paddings = [Padding(low, high) for low, high in p["padding"]]
    takes_largest = p["select_prim"].name == "ge"
    stays = np.greater_equal if takes_largest else np.less_equal
    neutral = _lowest if takes_largest else _highest

    def scatter(source: Array, x: Array) -> Array:
        filled = padded(x, neutral(x.dtype), paddings)
        view = _windows(filled, sizes, strides, (1,) * x.ndim)
        flat = view.reshape(*view.shape[: x.ndim], -1)
        # XLA walks through a window and leaves an element where `>=` fails, as it does from a NaN
        # and to one; numpy's argmax stays at the first NaN
        selected = flat[..., 0]
        place = np.zeros(flat.shape[:-1], int)
        for number in range(1, flat.shape[-1]):
            kept = stays(selected, flat[..., number])
            selected = np.where(kept, selected, flat[..., number])
            place = np.where(kept, place, number)
        index = [
            _along(np.arange(n) * step, axis, x.ndim) + inner
            for axis, (n, step, inner) in enumerate(
                zip(source.shape, strides, np.unravel_index(place, sizes), strict=True)
            )
        ]
        out = np.zeros_like(filled)
        np.add.at(out, tuple(index), source)
        own = [
            slice(padding.low, padding.low + n)
            for n, padding in zip(x.shape, paddings, strict=True)
        ]
        return out[tuple(own)]

    return scatter


def _along(numbers: Array, axis: int, dimensions: int) -> Array:
    """Return a vector as an array whose other axes have length 1."""
    shape = [1] * dimensions
    shape[axis] = -1
    return numbers.reshape(shape)


# Reads and writes at indices.


def _clamped_start(start: Any, length: int, size: int) -> int:
    # XLA moves a slice into the array, where numpy would cut it off
    return min(max(int(start), 0), length - size)


@_rule("dynamic_slice")
def _dynamic_slice(p: Parameters) -> Operation:
    sizes = tuple(p["slice_sizes"])

    def read(x: Array, *starts: Any) -> Array:
        first = map(_clamped_start, starts, x.shape, sizes)
        return x[tuple(slice(start, start + n) for start, n in zip(first, sizes, strict=True))]

    return read


@_rule("dynamic_update_slice")
def _dynamic_update(_: Parameters) -> Operation:
    def write(x: Array, update: Array, *starts: Any) -> Array:
        first = map(_clamped_start, starts, x.shape, update.shape)
        out = np.array(x)
        index = [slice(start, start + n) for start, n in zip(first, update.shape, strict=True)]
        out[tuple(index)] = update
        return out

    return write


@dataclass(frozen=True)
class SliceIndex:
    """Where the slices of a `gather` or `scatter` begin, and how they lie in the operand.

    Attributes:
        dimensions: the axes of the operand that the last axis of the indices counts, in its order.
        dropped: the axes of the operand that a slice does not have, since it has length 1 there.
        batching: the axes of the operand that follow an axis of the indices.
        batching_of_indices: these axes of the indices.
    """

    dimensions: Sequence[int]
    dropped: Sequence[int]
    batching: Sequence[int]
    batching_of_indices: Sequence[int]

    def kept(self, dimensions: int) -> list[int]:
        """Return the axes of the operand that a slice has."""
        return [d for d in range(dimensions) if d not in (*self.dropped, *self.batching)]

    def starts(self, x: Array, indices: Array) -> list[Array]:
        """Return for each axis of the operand where the slices begin, each of the slices' shape."""
        batch = indices.shape[:-1]
        found = [np.zeros(batch, np.int64) for _ in range(x.ndim)]
        for number, axis in enumerate(self.dimensions):
            found[axis] = indices[..., number].astype(np.int64)
        for axis, along in zip(self.batching, self.batching_of_indices, strict=True):
            found[axis] = np.broadcast_to(_along(np.arange(batch[along]), along, len(batch)), batch)
        return found

    def elements(self, starts: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
        """Return for each axis of the operand the index of every element of every slice."""
        kept = self.kept(len(starts))
        found = []
        for axis, start in enumerate(starts):
            index = start.reshape(*start.shape, *(1,) * len(kept))
            if axis in kept:
                index = index + _along(np.arange(sizes[axis]), kept.index(axis), len(kept))
            found.append(index)
        return found


def _inside(starts: Sequence[Array], x: Array, sizes: Sequence[int]) -> Array:
    """Return for each slice whether it lies within the operand."""
    inside = np.ones(starts[0].shape if starts else (), bool)
    for start, length, size in zip(starts, x.shape, sizes, strict=True):
        inside &= (start >= 0) & (start <= length - size)
    return inside


def _moved_inside(starts: Sequence[Array], x: Array, sizes: Sequence[int]) -> list[Array]:
    return [
        np.clip(start, 0, length - size)
        for start, length, size in zip(starts, x.shape, sizes, strict=True)
    ]


def _fill_value(dtype: np.dtype[Any], value: Any) -> Any:
    """Return what a `gather` reads outside of its operand in the mode FILL_OR_DROP.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.GatherScatterMode.html
    """
    if value is not None:
        return value
    if dtype.kind == "f":
        return np.nan
    # the smallest signed integer, the largest unsigned one, True
    return _lowest(dtype) if dtype.kind == "i" else _highest(dtype)


@_rule("gather")
def _gathered(p: Parameters) -> Operation:
    numbers = p["dimension_numbers"]
    sizes = tuple(p["slice_sizes"])
    mode = p["mode"]
    where = SliceIndex(
        numbers.start_index_map,
        numbers.collapsed_slice_dims,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    if mode.name not in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"):
        raise UnknownPrimitiveError(f"gather in the mode {mode.name}")

    def gather(x: Array, indices: Array) -> Array:
        starts = where.starts(x, indices)
        batch = indices.shape[:-1]
        inside = _inside(starts, x, sizes)
        # a slice outside of the operand is moved into it: XLA does so in every mode, and JAX
        # replaces it afterwards in that which fills
        elements = where.elements(_moved_inside(starts, x, sizes), sizes)
        out = x[tuple(np.broadcast_arrays(*elements))] if elements else np.asarray(x)
        if mode.name == "FILL_OR_DROP" and not inside.all():
            kept = inside.reshape(*batch, *(1,) * (out.ndim - len(batch)))
            out = np.where(kept, out, np.array(_fill_value(x.dtype, p["fill_value"]), x.dtype))
        # the slices' own axes are last, and go to where the equation has them
        own = range(len(batch), out.ndim)
        return np.moveaxis(out, own, numbers.offset_dims)

    return gather


def _assigned(out: Array, index: tuple[Array, ...], updates: Array) -> None:
    # of several updates of one element the last one stays; XLA promises none
    out[index] = updates


def _scattered(write: Callable[[Array, tuple[Array, ...], Array], None]) -> Rule:
    def rule(p: Parameters) -> Operation:
        numbers = p["dimension_numbers"]
        mode = p["mode"]
        windows = list(numbers.update_window_dims)
        where = SliceIndex(
            numbers.scatter_dims_to_operand_dims,
            numbers.inserted_window_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
        )
        if mode.name not in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"):
            raise UnknownPrimitiveError(f"scatter in the mode {mode.name}")

        def scatter(x: Array, indices: Array, updates: Array) -> Array:
            batch = indices.shape[:-1]
            # the axes of a slice last
            updates = np.moveaxis(updates, windows, range(len(batch), updates.ndim))
            sizes = [1] * np.ndim(x)
            for axis, size in zip(where.kept(np.ndim(x)), updates.shape[len(batch) :], strict=True):
                sizes[axis] = size
            starts = where.starts(x, indices)
            out = np.array(x)
            # what is out of bounds is dropped as a whole slice, except where it is moved inside
            inside = _inside(starts, x, sizes) | (mode.name == "CLIP")
            elements = where.elements(_moved_inside(starts, x, sizes), sizes)
            written = np.broadcast_to(
                inside.reshape(*batch, *(1,) * (updates.ndim - len(batch))), updates.shape
            )
            index = tuple(np.broadcast_to(each, updates.shape)[written] for each in elements)
            write(out, index, updates[written])
            return out

        return scatter

    return rule


_WRITES: dict[str, Callable[[Array, tuple[Array, ...], Array], None]] = {
    "scatter": _assigned,
    "scatter-add": np.add.at,
    "scatter-max": np.maximum.at,
    "scatter-min": np.minimum.at,
    "scatter-mul": np.multiply.at,
    "scatter-sub": np.subtract.at,
}
for _name, _write in _WRITES.items():
    RULES[_name] = _scattered(_write)


# Loops and branches.


@_rule("scan")
def _scan(p: Parameters) -> Operation:
    body = Tape(p["jaxpr"])
    parts = scan_parts(p)
    length = p["length"]
    order = [*reversed(range(length))] if p["reverse"] else [*range(length)]
    avals = p["jaxpr"].out_avals[parts.carried :]
    first = parts.constants + parts.carried

    def scan(*operands: Array) -> list[Any]:
        constants = operands[: parts.constants]
        sequences = operands[first:]
        carry: Sequence[Any] = operands[parts.constants : first]
        steps: list[Sequence[Any]] = [()] * length
        for number in order:
            found = body(*constants, *carry, *(each[number] for each in sequences))
            carry = found[: parts.carried]
            steps[number] = found[parts.carried :]
        if not length:
            return [*carry, *(np.zeros((0, *aval.shape), aval.dtype) for aval in avals)]
        return [*carry, *(np.stack(column) for column in zip(*steps, strict=True))]

    return scan


@_rule("while")
def _while(p: Parameters) -> Operation:
    condition = Tape(p["cond_jaxpr"])
    body = Tape(p["body_jaxpr"])
    of_condition = p["cond_nconsts"]
    of_body = p["body_nconsts"]

    def loop(*operands: Array) -> Sequence[Any]:
        asked = operands[:of_condition]
        constants = operands[of_condition:][:of_body]
        carry: Sequence[Any] = operands[of_condition + of_body :]
        while condition(*asked, *carry)[0]:
            carry = body(*constants, *carry)
        return carry

    return loop


@_rule("cond")
def _branch(p: Parameters) -> Operation:
    branches = [Tape(branch) for branch in p["branches"]]

    def choose(index: Any, *operands: Array) -> Sequence[Any]:
        return branches[_clamped_start(index, len(branches), 1)](*operands)

    return choose


# The tape.


IDENTITIES = frozenset(
    ("copy", "copy_p", "device_put", "optimization_barrier", "stop_gradient", "pvary")
)
"""Primitives that return their operands."""
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that call a function once, and the parameter that has it: its equations become the tape's own."""

ULPS = 8.0
"""Relative size of the rounding errors that are drawn, in units of 2**-53: that of functions such as tanh."""


class _RoundingErrors(threading.local):
    """The generator of this thread's rounding errors, or None."""

    generator: np.random.Generator | None = None

    def of(self, value: Any) -> Any:
        """Return a value with a rounding error in each floating element."""
        if self.generator is None or not _is_float(value):
            return value
        return value * (1 + ULPS * 2.0**-53 * self.generator.uniform(-1, 1, np.shape(value)))


_ROUNDING = _RoundingErrors()


@contextmanager
def drawn_rounding(seed: int) -> Iterator[None]:
    """Let the tapes of this thread add a rounding error to the result of each of their equations."""
    before = _ROUNDING.generator
    _ROUNDING.generator = np.random.default_rng(seed)
    try:
        yield
    finally:
        _ROUNDING.generator = before


def _moved(argument: Array) -> Array:
    """Return an argument with rounding errors; whole numbers are labels and counts, and exact."""
    if not _is_float(argument) or np.array_equal(argument, np.round(argument)):
        return argument
    moved: Array = _ROUNDING.of(argument)
    return moved


@dataclass(frozen=True)
class _TapeStep:
    """One equation: the slots that an operation reads, and those that its results go to."""

    operation: Operation
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_single: bool


@dataclass
class _TapeWriter:
    """Puts equations on a tape.

    Attributes:
        values: for each slot its value where that is a constant.
        steps: the equations so far.
    """

    values: list[Any] = field(default_factory=list)
    steps: list[_TapeStep] = field(default_factory=list)

    def slot(self, value: Any = None) -> int:
        """Return the number of a new slot."""
        self.values.append(value)
        return len(self.values) - 1

    def record(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """Put the equations of a jaxpr on the tape.

        Args:
            jaxpr: the equations.
            constants: the values of its constants.
            inputs: the slots of its arguments.

        Returns:
            The slots of its results.

        Raises:
            UnknownPrimitiveError: an equation has no rule.
        """
        known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            known[variable] = self.slot(np.asarray(value))

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                aval: Any = atom.aval  # of an array, which has a dtype
                return self.slot(np.asarray(atom.val, aval.dtype))
            return known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            known.update(zip(equation.outvars, self._record(equation, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _record(self, equation: Any, operands: Sequence[int]) -> Sequence[int]:
        name = equation.primitive.name
        parameters = equation.params
        if name in IDENTITIES:
            return operands
        if name in CALLS and CALLS[name] in parameters:
            called = parameters[CALLS[name]]
            closed = isinstance(called, ClosedJaxpr)
            jaxpr, constants = (called.jaxpr, called.consts) if closed else (called, ())
            return self.record(jaxpr, constants, operands)
        if name not in RULES:
            raise UnknownPrimitiveError(name)
        operation = RULES[name](parameters)
        results = [self.slot() for _ in equation.outvars]
        single = not equation.primitive.multiple_results
        self.steps.append(
            _TapeStep(
                operation,
                tuple(operands),
                tuple(results),
                single,
            )
        )
        return results


class Tape:
    """The equations of a jaxpr, as calls of numpy."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        """Record the equations.

        Raises:
            UnknownPrimitiveError: an equation has no rule.
        """
        recorder = _TapeWriter()
        self._inputs = [recorder.slot() for _ in closed.jaxpr.invars]
        self._outputs = recorder.record(closed.jaxpr, closed.consts, self._inputs)
        self._values = recorder.values
        self._steps = recorder.steps

    def __call__(self, *arguments: Array) -> list[Any]:
        """Return the results for these arguments, which may be views of them."""
        values = list(self._values)
        rounding = _ROUNDING.generator is not None
        for slot, argument in zip(self._inputs, arguments, strict=True):
            values[slot] = _moved(argument) if rounding else argument
        for step in self._steps:
            found = step.operation(*[values[slot] for slot in step.reads])
            for slot, result in zip(
                step.writes, (found,) if step.is_single else found, strict=True
            ):
                values[slot] = _ROUNDING.of(result) if rounding else result
        return [values[slot] for slot in self._outputs]
