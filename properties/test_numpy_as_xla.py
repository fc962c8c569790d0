"""numpy evaluates JAX's equations as XLA does: each primitive of the tape, then whole programs.

Both compute in float64, so they may differ by rounding, and by nothing else. Elements are drawn
that decide: zeros of both signs, ties, infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxprs_in_params

from gradcheck_suite.reference import programs, tape
from gradcheck_suite.reference.evaluation import (
    NumpyProgram,
    ProgramRequest,
    Sample,
    copied,
    difference,
    leaves,
)
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.reference.programs import CompiledPrograms
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.strategies.cases import cases
from gradcheck_suite.strategies.drawing import draw_cases

FINITE = (0.0, -0.0, 0.5, -0.5, 1.0, 1.0, -1.5, 2.5, 3.0, 1e-3, -40.3, 700.3)
SPECIAL = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Primitive:
    """Functions of JAX that have a primitive of the tape among their equations.

    Attributes:
        name: of the primitive.
        function: draw of an example -> the function, and its arguments.
        special: whether NaN and infinities are drawn.
    """

    name: str
    function: Callable[[st.DataObject], tuple[Callable[..., Any], tuple[np.ndarray, ...]]]
    special: bool = True


def _floats(data: st.DataObject, *shape: int, special: bool = True) -> np.ndarray:
    values = st.sampled_from(FINITE + SPECIAL * special) | st.floats(-3, 3, allow_subnormal=False)
    count = int(np.prod(shape, dtype=int))
    return np.array(data.draw(st.lists(values, min_size=count, max_size=count))).reshape(shape)


def _integers(data: st.DataObject, *shape: int, low: int = -4, high: int = 4) -> np.ndarray:
    count = int(np.prod(shape, dtype=int))
    drawn = data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    return np.array(drawn, np.int64).reshape(shape)


def _shape(data: st.DataObject, most: int = 3, *, least: int = 0) -> tuple[int, ...]:
    return tuple(data.draw(st.lists(st.integers(1, 3), min_size=least, max_size=most)))


def _axes(data: st.DataObject, dimensions: int) -> tuple[int, ...]:
    return tuple(data.draw(st.lists(st.integers(0, dimensions - 1), unique=True)))


def _elementwise(name: str, function: Callable[..., Any], arguments: int = 1) -> Primitive:
    def drawn(data: st.DataObject) -> Any:
        shape = _shape(data)
        return function, tuple(_floats(data, *shape) for _ in range(arguments))

    return Primitive(name, drawn)


def _of_integers(name: str, function: Callable[..., Any], arguments: int = 2) -> Primitive:
    def drawn(data: st.DataObject) -> Any:
        shape = _shape(data)
        return function, tuple(_integers(data, *shape) for _ in range(arguments))

    return Primitive(name, drawn)


def _of_axes(name: str, function: Callable[..., Any], *, special: bool = True) -> Primitive:
    def drawn(data: st.DataObject) -> Any:
        shape = _shape(data, least=1)
        axes = _axes(data, len(shape))
        return lambda x: function(x, axes), (_floats(data, *shape, special=special),)

    return Primitive(name, drawn)


def _of_axis(name: str, function: Callable[..., Any], *, special: bool = True) -> Primitive:
    def drawn(data: st.DataObject) -> Any:
        shape = _shape(data, least=1)
        axis = data.draw(st.integers(0, len(shape) - 1))
        return lambda x: function(x, axis), (_floats(data, *shape, special=special),)

    return Primitive(name, drawn)


def _running(name: str, function: Callable[..., Any]) -> Primitive:
    def drawn(data: st.DataObject) -> Any:
        shape, reverse = _shape(data, least=1), data.draw(st.booleans())
        axis = data.draw(st.integers(0, len(shape) - 1))
        return lambda x: function(x, axis=axis, reverse=reverse), (_floats(data, *shape),)

    return Primitive(name, drawn)


def _booleans(data: st.DataObject) -> Any:
    shape = _shape(data, least=1)
    axes = _axes(data, len(shape))

    def function(x: Any, y: Any) -> Any:
        a, b = x > 0, y > 0
        reduced = jnp.all(a, axes), jnp.any(b, axes)
        return lax.bitwise_and(a, b), lax.bitwise_or(a, b), lax.bitwise_xor(a, b), ~a, *reduced

    return function, (_floats(data, *shape), _floats(data, *shape))


def _select(data: st.DataObject) -> Any:
    shape = _shape(data)
    which = _integers(data, *shape, low=0, high=2).astype(np.int32)
    return lax.select_n, (which, *(_floats(data, *shape) for _ in range(3)))


def _convert(data: st.DataObject) -> Any:
    shape = _shape(data)
    dtype = data.draw(st.sampled_from((np.int64, np.int32, np.int8, np.bool_, np.float64)))
    return lambda x: lax.convert_element_type(x * 1e6, dtype), (_floats(data, *shape),)


def _broadcast(data: st.DataObject) -> Any:
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    return lambda x: lax.broadcast_in_dim(x, (2, rows, columns), (2,)), (_floats(data, columns),)


def _shapes(data: st.DataObject) -> Any:
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))

    def function(x: Any, y: Any) -> Any:
        joined = lax.concatenate([x, y], 0)
        parts = lax.split(joined, (rows, rows), 0)
        return (
            lax.reshape(joined, (columns, 2 * rows)),
            lax.reshape(x, (columns * rows,), (1, 0)),
            lax.transpose(joined, (1, 0)),
            lax.squeeze(lax.expand_dims(x, (0,)), (0,)),
            lax.rev(joined, (0, 1)),
            lax.slice(joined, (0, 0), (2 * rows, columns), (2, 1)),
            jnp.stack(parts),
            *jnp.unstack(joined),
            lax.iota(jnp.int32, 3),
            lax.broadcasted_iota(jnp.float64, (rows, columns), 1) + x,
        )

    return function, (_floats(data, rows, columns), _floats(data, rows, columns))


def _pad(data: st.DataObject) -> Any:
    shape = _shape(data, least=1)
    one = st.tuples(st.integers(-1, 2), st.integers(-1, 2), st.integers(0, 2))
    config = [
        (max(low, -n // 2), max(high, 0), inside)
        for n, (low, high, inside) in zip(
            shape, data.draw(st.tuples(*[one] * len(shape))), strict=True
        )
    ]
    return lambda x: lax.pad(x, 7.0, config), (_floats(data, *shape),)


def _round(data: st.DataObject) -> Any:
    how = data.draw(
        st.sampled_from((lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN))
    )
    x = np.append(_floats(data, 4), [0.49999999999999994, 1.5, -2.5])
    return lambda x: lax.round(x, how), (x,)


def _power(data: st.DataObject) -> Any:
    exponent = data.draw(st.integers(-4, 5))
    return lambda x: lax.integer_pow(x, exponent), (_floats(data, 4),)


def _sort(data: st.DataObject) -> Any:
    keys, rows = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    keyed = [_floats(data, rows, 2) for _ in range(2)]
    operands = (*keyed, _integers(data, rows, 2))
    return lambda *x: lax.sort(x, dimension=0, num_keys=keys, is_stable=True), operands


def _top(data: st.DataObject) -> Any:
    x = _floats(data, 2, 5) if data.draw(st.booleans()) else _integers(data, 2, 5)
    return lambda x: lax.top_k(x, 3), (x,)


def _dot(data: st.DataObject) -> Any:
    batch, rows, inner, columns = (data.draw(st.integers(1, 3)) for _ in range(4))
    numbers = (((2,), (0,)), ((0,), (2,)))
    a, b = _floats(data, batch, rows, inner), _floats(data, inner, columns, batch)
    return lambda a, b: lax.dot_general(a, b, numbers), (a, b)


def _convolution(data: st.DataObject) -> Any:
    groups, batched = data.draw(st.sampled_from(((1, 1), (2, 1), (1, 2))))
    stride, left, right = (data.draw(st.integers(1, 2)) for _ in range(3))
    padding = data.draw(st.tuples(st.integers(-1, 2), st.integers(0, 2)))
    a = _floats(data, 2, 2 * groups, 6, special=False)
    b = _floats(data, 2, 2, 2, special=False)

    def function(a: Any, b: Any) -> Any:
        return lax.conv_general_dilated(
            a,
            b,
            (stride,),
            (padding,),
            (left,),
            (right,),
            ("NCH", "OIH", "NHC"),
            feature_group_count=groups,
            batch_group_count=batched,
        )

    return function, (a, b)


def _windows(function: Callable[..., Any], *, special: bool = True) -> Callable[..., Any]:
    def drawn(data: st.DataObject) -> Any:
        size, stride, dilation = (data.draw(st.integers(1, 2)) for _ in range(3))
        padding = data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
        x = _floats(data, 2, 5, special=special)
        return lambda x: function(x, size, stride, dilation, padding), (x,)

    return drawn


def _reduce_window(name: str) -> Callable[..., Any]:
    def function(x: Any, size: int, stride: int, dilation: int, padding: Any) -> Any:
        made = {"window_dimensions": (1, size), "window_strides": (1, stride)}
        made |= {"padding": ((0, 0), padding), "base_dilation": (1, dilation)}
        made |= {"window_dilation": (1, dilation)}
        return getattr(lax, f"{name}_p").bind(x, **made)

    return function


def _pool_gradient(x: Any, size: int, stride: int, dilation: int, padding: Any) -> Any:
    def pooled(x: Any) -> Any:
        window = (1, size), (1, stride), ((0, 0), padding)
        return lax.reduce_window(x, -jnp.inf, lax.max, *window)

    return jax.vjp(pooled, x)[1](jnp.ones_like(pooled(x)))


MODES = ("clip", "fill", "promise_in_bounds")


def _gather(data: st.DataObject) -> Any:
    mode, dtype = (
        data.draw(st.sampled_from(MODES)),
        data.draw(st.sampled_from((np.float64, np.int32, np.uint8, np.bool_))),
    )
    x = _integers(data, 3, 4, 2, low=0).astype(dtype)
    indices = _integers(data, 2, 3, low=0, high=2) if mode == MODES[2] else _integers(data, 2, 3)
    numbers = lax.GatherDimensionNumbers((1, 3), (0,), (0,))
    return lambda x, i: lax.gather(x, i[..., None], numbers, (1, 3, 2), mode=mode), (x, indices)


def _taken_along(data: st.DataObject) -> Any:
    x, indices = _floats(data, 3, 4), _integers(data, 3, 2, low=-5, high=5)
    return lambda x, i: jax.value_and_grad(lambda x: jnp.take_along_axis(x, i, 1).sum())(x), (
        x,
        indices,
    )


def _scatter(function: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(data: st.DataObject) -> Any:
        mode = data.draw(st.sampled_from(MODES[:2]))
        # XLA promises no order, so of one element that is only assigned there is one update
        count = 1 if function is lax.scatter else 2
        starts, x, updates = (
            _integers(data, count, 1, high=9),
            _floats(data, 8),
            _floats(data, count, 2),
        )
        numbers = lax.ScatterDimensionNumbers((1,), (), (0,))
        return lambda x, i, u: function(x, i, u, numbers, mode=mode), (x, starts, updates)

    return drawn


def _dynamic(data: st.DataObject) -> Any:
    start, x, update = _integers(data, 2), _floats(data, 4, 3), _floats(data, 2, 2)

    def function(x: Any, update: Any, start: Any) -> Any:
        read = lax.dynamic_slice(x, start, (2, 2))
        return read, lax.dynamic_update_slice(x, update, tuple(start))

    return function, (x, update, start)


def _scan(data: st.DataObject) -> Any:
    length, reverse = data.draw(st.integers(0, 3)), data.draw(st.booleans())

    def function(scale: Any, first: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            return carry * scale + x, (carry, x > 0)

        return lax.scan(step, first, xs, reverse=reverse)

    return function, (_floats(data), _floats(data, 2), _floats(data, length, 2))


def _while(data: st.DataObject) -> Any:
    most = data.draw(st.integers(0, 4))

    def function(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] + 1, c[1] * x + 1), (0, x))

    return function, (_floats(data, 2),)


def _cond(data: st.DataObject) -> Any:
    branches = [lambda x: x, jnp.exp, lambda x: x * 2]
    return lambda i, x: lax.switch(i[0], branches, x), (_integers(data, 1), _floats(data, 2))


def _calls(data: st.DataObject) -> Any:
    """One of each primitive that calls a function."""

    def function(x: Any) -> Any:
        fast = jax.jit(jnp.sin)(x)
        saved = jax.checkpoint(lambda x: jnp.tanh(x) ** 2)
        twice = jax.grad(lambda x: jnp.sum(jnp.sin(x) * x))(x)
        pulled_back = jax.vjp(saved, x)[1](x)
        return fast, twice, pulled_back, jax.nn.relu(x), jax.nn.silu(x), lax.stop_gradient(x)

    return function, (_floats(data, 3),)


ELEMENTWISE = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor"
    " is_finite lgamma log log1p logistic neg rsqrt sign sin sinh sqrt square tan tanh"
)
BINARY = "add sub mul max min div rem pow atan2 eq ne lt le gt ge"
ROWS = [
    *(_elementwise(name, getattr(lax, name)) for name in ELEMENTWISE.split()),
    *(_elementwise(name, getattr(lax, name), 2) for name in BINARY.split()),
    *(_of_integers(name, getattr(lax, name)) for name in ("div", "rem", "max", "mul")),
    *(_of_integers(name, getattr(lax, name), 1) for name in ("sign", "abs", "bitwise_not")),
    _elementwise("clamp", lambda low, x: lax.clamp(low, x, low + 1), 2),
    _of_axes("reduce_max", jnp.max),
    _of_axes("reduce_min", jnp.min),
    _of_axes("reduce_prod", jnp.prod),
    _of_axes("reduce_sum", jnp.sum),
    *(
        _of_axis(name, lambda x, a, name=name: getattr(lax, name)(x, a, np.int32))
        for name in ("argmax", "argmin")
    ),
    *(
        _running(name, getattr(lax, name))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    ),
    Primitive("and", _booleans),
    Primitive("select_n", _select),
    Primitive("convert_element_type", _convert),
    Primitive("broadcast_in_dim", _broadcast),
    Primitive("reshape", _shapes),
    Primitive("pad", _pad),
    Primitive("round", _round),
    Primitive("integer_pow", _power),
    Primitive("sort", _sort),
    Primitive("top_k", _top),
    Primitive("dot_general", _dot),
    Primitive("conv_general_dilated", _convolution),
    *(
        Primitive(name, _windows(_reduce_window(name)))
        for name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
    ),
    Primitive("select_and_scatter_add", _windows(_pool_gradient)),
    Primitive("gather", _gather),
    Primitive("scatter-add", _taken_along),
    *(
        Primitive(name, _scatter(getattr(lax, name.replace("-", "_"))))
        for name in (
            "scatter",
            "scatter-add",
            "scatter-sub",
            "scatter-mul",
            "scatter-max",
            "scatter-min",
        )
    ),
    Primitive("dynamic_slice", _dynamic),
    Primitive("scan", _scan),
    Primitive("while", _while),
    Primitive("cond", _cond),
    Primitive("jit", _calls),
]


def _drawn(row: Primitive, data: st.DataObject) -> Sample:
    """Return a call of a row's function."""
    function, arguments = row.function(data)
    request = ProgramRequest.of(row.name, function, *arguments)
    return Sample(request, NumpyProgram(request), arguments, is_telling=True)


def _names(jaxpr: Any) -> set[str]:
    """Return the primitives of a jaxpr and of those inside it."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in jaxprs_in_params(equation.params):
            found |= _names(inner)
    return found


@pytest.mark.share(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@given(st.data())
@settings(max_examples=6, deadline=None)
def test_a_primitive_is_what_xla_computes(row, data):
    sample = _drawn(row, data)
    by_xla = jax.tree.leaves(jax.jit(sample.request.function)(*sample.arguments))
    assert difference(sample, [np.asarray(result) for result in by_xla]) is None


def test_every_rule_of_the_tape_has_a_row():
    seen: set[str] = set()

    @settings(max_examples=5, deadline=None, database=None)
    @given(st.data())
    def collect(data):
        for row in ROWS:
            function, arguments = row.function(data)
            seen.update(_names(jax.make_jaxpr(function)(*arguments).jaxpr))

    collect()
    of_later_releases = {"one_minus_square"} - {name.removesuffix("_p") for name in vars(lax)}
    assert tape.RULES.keys() - seen == of_later_releases


# Whole programs: the layers and losses of drawn problems.


def _with(arguments: tuple[Any, ...], value: float) -> tuple[Any, ...]:
    """Return a program's arguments with a value in the last one: a cotangent, or a loss's output.

    Of what pads the input of a convolution, kernels of XLA itself disagree whether it is multiplied
    by an infinite weight, so parameters stay as they are.
    """
    *others, last = arguments
    place = last if isinstance(last, np.ndarray) else others[0]
    changed = np.array(place)
    if changed.dtype.kind == "f":
        changed.reshape(-1)[::7] = value
    return (*others, changed) if place is last else (changed, *others[1:], last)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_programs_of_drawn_problems_are_what_xla_computes(seed, monkeypatch):
    kept = CompiledPrograms()
    monkeypatch.setattr(programs, "PROGRAMS", kept)
    samples: dict[Any, Sample] = {}

    def keep(request, program, arguments, *, is_telling):
        if is_telling:
            samples[request.key] = Sample(request, program, copied(arguments), is_telling)

    monkeypatch.setattr(kept._tapes, "keep_sample", keep)
    for case in draw_cases(cases(), examples=25, seed_value=seed):
        reference = Reference(generated_instance(case))
        if reference.instance.accumulable_spec is not None:
            assert reference.jax
    assert len(samples) > 20
    for sample in samples.values():
        for value in (None, np.nan, np.inf, -np.inf, 0.0):
            arguments = sample.arguments if value is None else _with(sample.arguments, value)
            by_xla = leaves(kept.run(sample.request, *arguments))
            found = difference(
                replace(sample, arguments=arguments), [np.asarray(result) for result in by_xla]
            )
            assert found is None, (sample.request.key, value)
