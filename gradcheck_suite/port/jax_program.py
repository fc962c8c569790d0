"""A JAX function as equations: outputs, gradients and every intermediate value, each from one
compiled program.

Equations are evaluated in float64 whatever dtype they name: a port that casts to float32 is judged
as the function that it means. What it computed in float32 before it was traced, such as a table of
sines, stays rounded; `shift` moves such numbers by about their rounding, so that its effect can be
measured.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters.partial_eval import dce_jaxpr

from gradcheck_suite.core.jax_equations import scan_parts
from gradcheck_suite.port.pair import LOWER, Array, first_of_author, is_float, is_number
from gradcheck_suite.reference.evaluation import ProgramRequest
from gradcheck_suite.reference.programs import PROGRAMS

CAST = "convert_element_type"
LOW = tuple(jnp.dtype(name) for name in LOWER)
DTYPES = ("new_dtype", "preferred_element_type", "dtype")
INLINE = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_lin",
    ]
)
CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])
RANDOM = frozenset(
    ["random_bits", "threefry2x32", "random_seed", "random_split", "rng_bit_generator"]
)
TABLE_MARGIN = 16.0
"""Units roundoff by which a number of a table may be off that was computed in float32."""
DIGITS = 6
"""Significant digits up to which a float32 number is taken for the decimal that its author wrote."""


@dataclass(frozen=True)
class FloatEquation:
    """One equation with a float result: its primitive, and `file:line` in the author's code."""

    primitive: str
    where: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EquationResult:
    """One float result of an equation.

    Attributes:
        value: the number or array.
        equation: that returns it.
    """

    value: Any
    equation: FloatEquation = field(metadata={"static": True})


def _open(jaxpr: Any) -> tuple[Any, list[Any]]:
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _inside(eqn: Any, custom: bool) -> Any:
    """Return the jaxpr of an equation that is a call, or None."""
    if eqn.primitive.name in INLINE or (custom and eqn.primitive.name in CUSTOM):
        return next(
            (eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None
        )
    return None


def _is_low(value: Any) -> bool:
    return getattr(value, "dtype", None) in LOW


def in_float64(value: Any) -> Any:
    """Return an array of float64 or complex numbers in place of one of a lower dtype.

    Anything else as it is.
    """
    if getattr(value, "dtype", None) == np.dtype("complex64"):
        return value.astype(np.complex128)
    return value.astype(np.float64) if _is_low(value) else value


def undo_float32_rounding(value: Array) -> tuple[Array, Array]:
    """Return float32 numbers as the decimals that were meant, and which of them are none and thus
    rounded.

    Args:
        value: any shape, of a float dtype lower than float64.
    """
    wide = value.astype(np.float64)
    with np.errstate(all="ignore"):
        power = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.where(wide == 0, 1, np.abs(wide)))))
        short = np.round(wide * power) / power
    # the decimal that gives exactly this number in the lower dtype is the one that was written
    plain = np.isfinite(short) & (short.astype(value.dtype) == value)
    return np.where(plain, short, wide), ~plain & np.isfinite(wide)


def rounding_table(value: Any) -> tuple[Array, Array | None]:
    """Return the numbers of a float32 table, also of one that is kept in float64, as they were
    meant, and a move.

    The move of each number, with a random sign, is as many units roundoff as its rounding may have
    cost, times the largest number: sines of rounded positions are off by more than one, and by the
    more the larger the position is. The move is None where nothing is rounded.
    """
    wide = np.asarray(value)
    low = wide if _is_low(wide) else wide.astype(np.float32)
    # a float64 table all of whose numbers are float32's was computed there; of one number that is
    # chance
    if not _is_low(wide) and not (wide.ndim and np.array_equal(low, wide)):
        return wide, None
    number, rounded = undo_float32_rounding(low)
    if not rounded.any():
        return number if _is_low(wide) else wide, None
    largest = np.abs(number[rounded]).max()
    units = np.full(number.shape, TABLE_MARGIN)
    if number.ndim and largest <= 1:
        # positions lie along the longest axis of a table of sines, whose numbers are at most 1
        axis = int(np.argmax(number.shape))
        units += 2 * np.arange(number.shape[axis]).reshape(
            [-1 if d == axis else 1 for d in range(number.ndim)]
        )
    # seeded by the size, so that each trace of a program has the same numbers and finds its
    # compiled file
    sign = np.where(np.random.default_rng(number.size).random(number.shape) < 0.5, -1.0, 1.0)
    return number, units * largest * sign * rounded


class Interpreter:
    """Evaluates a jaxpr.

    Args:
        custom: whether functions with a rule for their derivative are entered; the rule is then not
            used.
        shift: unit roundoff by which rounded numbers are moved.
        cast_at: `file:line` of the casts to a lower precision that round, as they are written.
    """

    def __init__(self, *, custom: bool, shift: Any = 0.0, cast_at: str = "") -> None:
        self._custom = custom
        self._shift = shift
        self._cast_at = cast_at
        self.rounded = False

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], eps: Any = None
    ) -> tuple[list[Any], Any]:
        """Return the results and, for each equation, what is inside and its `EquationResult`s.

        Those of `eps` are added.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        env |= dict(zip(jaxpr.invars, map(in_float64, args), strict=True))

        def read(var: Any) -> Any:
            return self._constant(var.val) if isinstance(var, jex.Literal) else env[var]

        records = []
        for i, eqn in enumerate(jaxpr.eqns):
            mine = None if eps is None else eps[i]
            outs, inside = self._equation(
                eqn, [read(v) for v in eqn.invars], None if mine is None else mine[0]
            )
            kept: list[EquationResult] = []
            for j, out in enumerate(outs):
                if jnp.issubdtype(jnp.result_type(out), jnp.inexact):
                    outs[j] = out if mine is None else out + mine[1][len(kept)].value
                    kept.append(
                        EquationResult(outs[j], FloatEquation(eqn.primitive.name, line_of(eqn)))
                    )
            records.append([inside, kept])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars], records

    def _constant(self, value: Any) -> Any:
        is_plain = not hasattr(value, "dtype") or isinstance(value, jax.core.Tracer)
        if is_plain or not (_is_low(value) or value.dtype == np.float64):
            return in_float64(value)
        number, move = rounding_table(value)
        if move is None:
            return number if np.ndim(number) else np.float64(number)
        self.rounded = True
        return number + self._shift * move

    def _equation(self, eqn: Any, values: list[Any], eps: Any) -> tuple[list[Any], Any]:
        name = eqn.primitive.name
        inner = _inside(eqn, self._custom)
        low = any(_is_low(v.aval) for v in eqn.invars)
        if inner is None and low and name == "custom_jvp_call":
            inner = eqn.params["call_jaxpr"]  # its rule is for float32
        if inner is not None:
            jaxpr, consts = _open(inner)
            outs, inside = self.run(
                jaxpr, consts, values, eps if _inside(eqn, self._custom) is not None else None
            )
            return list(outs), inside if _inside(eqn, self._custom) is not None else []
        if name == "scan":
            return self._scan(eqn, values, eps)
        if name == "while":
            return self._while(eqn, values), []
        if name == "cond":
            return self._cond(eqn, values, eps)
        return self._bind(eqn, values), []

    def _bind(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = dict(eqn.params)
        name = eqn.primitive.name
        # its whole purpose is to round to fewer bits
        if name == "reduce_precision":
            return values[:1]
        if self._cast_at and name == CAST and line_of(eqn) == self._cast_at:
            values = [jnp.asarray(v).astype(params["new_dtype"]) for v in values]
        if name in CUSTOM or any(map(_is_jaxpr, params.values())):
            # a rule of the author's, or a jaxpr that is not entered, was traced for its own dtypes
            self.rounded |= any(_is_low(v.aval) for v in eqn.invars)
            values = [_cast(v, var.aval) for v, var in zip(values, eqn.invars, strict=True)]
        # the bits of a float32 are not those of a float64: what reads bits gets its own dtype
        elif name != "bitcast_convert_type":
            params |= {key: np.dtype("float64") for key in DTYPES if _names_low(params.get(key))}
            values = [in_float64(v) for v in values]
        return [in_float64(o) for o in _bound(eqn, params, values)]

    def _scan(self, eqn: Any, values: list[Any], eps: Any) -> tuple[list[Any], Any]:
        p = eqn.params
        jaxpr, consts = _open(p["jaxpr"])
        parts = scan_parts(p)
        fixed, carry, xs = _cut(values, parts.constants, parts.carried)

        def body(state: Any, x: Any) -> Any:
            given, off = x
            outs, inside = self.run(jaxpr, consts, [*fixed, *state, *given], off)
            return outs[: len(carry)], (outs[len(carry) :], inside)

        # a typed key of `jax.random.key` has a dtype that is none of numpy's
        start = [c if _is_key(c) else in_float64(jnp.asarray(c)) for c in carry]
        end, (ys, inside) = jax.lax.scan(
            body, start, (xs, eps), length=p["length"], reverse=p["reverse"]
        )
        return [*end, *ys], inside

    def _while(self, eqn: Any, values: list[Any]) -> list[Any]:
        p = eqn.params
        test = _open(p["cond_jaxpr"])
        body = _open(p["body_jaxpr"])
        for_test, for_body, carry = _cut(values, p["cond_nconsts"], p["body_nconsts"])
        return list(
            jax.lax.while_loop(
                lambda c: self.run(*test, [*for_test, *c])[0][0],
                lambda c: self.run(*body, [*for_body, *c])[0],
                [in_float64(c) for c in carry],
            )
        )

    def _cond(self, eqn: Any, values: list[Any], eps: Any) -> tuple[list[Any], Any]:
        index, *args = values
        # all of them run, and one is selected: what is inside of each is evidence
        runs = []
        for i, branch in enumerate(eqn.params["branches"]):
            runs.append(self.run(*_open(branch), args, None if eps is None else eps[i]))
        # `lax.cond` and `lax.switch` clamp the index as well
        index = jnp.clip(jnp.asarray(index, np.int32), 0, len(runs) - 1)
        each = zip(*[outs for outs, _ in runs], strict=True)
        outs = [jax.lax.select_n(index, *o) if len(o) > 1 else o[0] for o in each]
        return outs, [inside for _, inside in runs]


def _bound(eqn: Any, params: dict[str, Any], values: list[Any]) -> list[Any]:
    """Return the results of an equation's primitive with other parameters and values."""
    given = eqn.primitive.get_bind_params(params)
    functions: list[Any] = []
    # JAX 0.9 gives the functions that come before the values apart from the parameters, later ones
    # among them
    if isinstance(given, tuple):
        functions, given = given
    out = eqn.primitive.bind(*functions, *values, **given)
    return list(out) if eqn.primitive.multiple_results else [out]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def _names_low(dtype: Any) -> bool:
    return dtype is not None and jnp.dtype(dtype) in LOW


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and not is_number(value)


def _cut(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]


def _cast(value: Any, aval: Any) -> Any:
    return (
        jnp.asarray(value).astype(aval.dtype)
        if getattr(value, "dtype", None) != aval.dtype
        else value
    )


def _whole_as(value: Any, aval: Any) -> Any:
    """Return whole numbers in the dtype in which a program was traced: without x64 it has 32 bits."""
    given = getattr(value, "dtype", None)
    is_whole = given is not None and jnp.issubdtype(given, jnp.integer)
    return value.astype(aval.dtype) if is_whole and given != aval.dtype else value


def _traced(function: Callable[..., Any], example: Any) -> Any:
    """Return the equations of a function, and the shapes of its results.

    It is traced with float64 arguments. Code that names float32, such as the state of a recurrent
    cell that starts as `zeros(n, float32)`, may then have a carry of two dtypes, which JAX refuses.
    It is traced as its author runs it: with float32 arguments, and last without x64, so that what
    has the default dtype is float32 as well.
    """

    def low(x: Any) -> Any:
        return np.asarray(x, np.float32) if is_float(x) else x

    trace = jax.make_jaxpr(function, return_shape=True)
    try:
        return trace(*example)
    except TypeError:
        narrow = jax.tree.map(low, example)
    try:
        return trace(*narrow)
    except TypeError:
        with jax.enable_x64(False):
            return trace(*narrow)


def line_of(eqn: Any) -> str:
    """Return `file:line` of the innermost frame of the author's code that made an equation."""
    trace = eqn.source_info.traceback
    frames = trace.frames if trace is not None else ()
    return first_of_author((frame.file_name, frame.line_num) for frame in frames)


def _with_inner(closed: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a jaxpr and those inside of its equations, each with its constants."""
    jaxpr, consts = _open(closed)
    yield jaxpr, consts
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            parts = value if isinstance(value, tuple | list) else (value,)
            for part in parts:
                # a jaxpr, or one that is closed over its constants
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from _with_inner(part)


def equations_in(jaxpr: Any) -> list[Any]:
    """Return all equations, also those inside of others."""
    return list(chain.from_iterable(inner.eqns for inner, _ in _with_inner(jaxpr)))


def digest(closed: Any) -> str:
    """Return a name of what a jaxpr computes, the same in every process: its text and its
    constants.
    """
    # addresses of functions, and places in files, are others in each process
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+|\bat \S+>", "", str(closed)).encode())
    for jaxpr, consts in _with_inner(closed):
        # the text of a jaxpr abbreviates arrays
        read = chain.from_iterable(e.invars for e in jaxpr.eqns)
        arrays = [v.val for v in read if isinstance(v, jex.Literal) and np.ndim(v.val)]
        for value in (*consts, *arrays):
            if is_number(value):
                digest.update(np.ascontiguousarray(np.asarray(value)).tobytes())
    return digest.hexdigest()


class Stored:
    """A function of trees of arrays, compiled once and kept on disk under what it computes.

    Args:
        function: returns a tree of arrays.
        arguments: with the shapes of those that it is called with.
        store: whether it is kept on disk.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, store: bool = True) -> None:
        flat, tree = jax.tree.flatten(arguments)
        arrays = tuple(np.asarray(a) for a in flat)
        trace = jax.make_jaxpr(lambda *a: function(*jax.tree.unflatten(tree, a)), return_shape=True)
        closed, shape = trace(*arrays)
        run = jex.jaxpr_as_fun(closed)
        self._request = ProgramRequest.of(
            ("port", digest(closed)), lambda *a: tuple(run(*a)), *arrays
        )
        self._structure = jax.tree.structure(shape)
        self._store = store

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns, in numpy arrays."""
        arrays = [np.asarray(a) for a in jax.tree.leaves(arguments)]
        out = PROGRAMS.run(
            self._request,
            *arrays,
            store=self._store,
            few=True,
        )
        return jax.tree.unflatten(self._structure, [np.asarray(o) for o in out])


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of trees of arrays that computes in float64 whatever dtype it names."""

    def double(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outs, _ = Interpreter(custom=False).run(
            closed.jaxpr, closed.consts, jax.tree.leaves(arguments)
        )
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return double


@dataclass
class JaxRun:
    """What one evaluation gives.

    Attributes:
        outs: the outputs.
        extras: what the model updates in training.
        loss: the loss.
        gradients: gradient of the loss by each leaf, zeros for leaves that are no float arrays.
        input_gradients: place of an input that is a float array -> gradient of the loss by it.
    """

    outs: list[Array]
    extras: list[Array]
    loss: float
    gradients: list[Array]
    input_gradients: dict[int, Array] = field(default_factory=dict)


class JaxProgram:
    """A function of (leaves, inputs, targets) that returns (outputs, extras, loss), traced once.

    Args:
        function: with lists of arrays as arguments and as its first two results.
        leaves: of the parameters; what is no array of numbers stays fixed.
        inputs: of the model.
        targets: of the loss.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        inputs: Sequence[Any],
        targets: Sequence[Any],
    ) -> None:
        self._fixed = list(leaves)
        self._numbers = [i for i, leaf in enumerate(leaves) if is_number(leaf)]
        closed, shape = _traced(
            lambda p, *rest: function(self._whole(p), *rest),
            self._arguments(leaves, inputs, targets),
        )
        # a value that nothing depends on is no evidence: a port may compute torch's value and not
        # use it
        self.jaxpr, _ = dce_jaxpr(
            closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
        )
        self._consts = list(closed.consts)
        self.outs = len(shape[0])
        self._extras = len(shape[1])
        self.all_equations = equations_in(self.jaxpr)
        self.primitives = {e.primitive.name for e in self.all_equations}
        made = chain.from_iterable(e.outvars for e in self.all_equations)
        avals = [v.aval for v in made]
        self.is_low = any(getattr(a, "dtype", None) in LOW for a in avals)
        self.rounded = False
        self._made: dict[str, Any] = {}

    def _whole(self, numbers: Sequence[Any]) -> list[Any]:
        leaves = list(self._fixed)
        for i, value in zip(self._numbers, numbers, strict=True):
            leaves[i] = value
        return leaves

    def _arguments(
        self, leaves: Sequence[Any], inputs: Sequence[Any], targets: Sequence[Any]
    ) -> Any:
        return [jnp.asarray(leaves[i]) for i in self._numbers], list(inputs), list(targets)

    @property
    def random(self) -> bool:
        """Whether the function draws random numbers."""
        return bool(self.primitives & RANDOM)

    @cached_property
    def constants(self) -> list[Array]:
        """Arrays that the function closes over."""
        return [in_float64(np.asarray(c)) for c in self._consts if is_number(c)]

    def _evaluate(self, jaxpr_args: Any, *, custom: bool, shift: Any = 0.0, eps: Any = None) -> Any:
        interpreter = Interpreter(custom=custom, shift=shift)
        flat = [
            _whole_as(value, var.aval)
            for value, var in zip(jax.tree.leaves(jaxpr_args), self.jaxpr.invars, strict=True)
        ]
        outs, records = interpreter.run(self.jaxpr, self._consts, flat, eps)
        self.rounded |= interpreter.rounded
        return outs, records

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name not in self._made:
            # a callback is a function of this process, which no file can hold
            self._made[name] = Stored(
                function, *arguments, store="callback" not in "".join(self.primitives)
            )
        return self._made[name](*arguments)

    def run(self, leaves: Any, inputs: Any, targets: Any, shift: float = 0.0) -> JaxRun:
        """Return outputs, loss and gradients, by the author's own rules for derivatives."""
        arguments = self._arguments(leaves, inputs, targets)
        # whole numbers and keys are arguments, too, and have no gradient
        floats = [k for k, leaf in enumerate(arguments[0]) if is_float(leaf)]
        real = [k for k, value in enumerate(arguments[1]) if is_float(value)]

        def main(given: Any, moved: Any) -> Any:
            def loss(values: Any, own_inputs: Any) -> Any:
                whole = list(given[0])
                read = list(given[1])
                for k, value in zip(floats, values, strict=True):
                    whole[k] = value
                for k, value in zip(real, own_inputs, strict=True):
                    read[k] = value
                outs = self._evaluate((whole, read, given[2]), custom=False, shift=moved)[0]
                return outs[-1], outs[:-1]

            start = [given[0][k] for k in floats], [given[1][k] for k in real]
            value_and_derivatives = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (total, rest), derivatives = value_and_derivatives(*start)
            return rest, total, derivatives

        rest, total, derivatives = self._call("main", main, arguments, np.float64(shift))
        gradients: list[Any] = [
            np.zeros(np.shape(leaf)) if is_number(leaf) else None for leaf in leaves
        ]
        for k, slope in zip(floats, derivatives[0], strict=True):
            gradients[self._numbers[k]] = slope
        by_input = dict(zip(real, derivatives[1], strict=True))
        return JaxRun(
            rest[: self.outs],
            rest[self.outs :],
            float(total),
            gradients,
            by_input,
        )

    def ends(self, leaves: Any, inputs: Any, targets: Any) -> tuple[list[Array], float]:
        """Return the outputs and the loss."""
        outs = self._call(
            "ends",
            lambda a: self._evaluate(a, custom=True)[0],
            self._arguments(leaves, inputs, targets),
        )
        return outs[: self.outs], float(outs[-1])

    def forward(
        self, leaves: Any, inputs: Any, targets: Any
    ) -> tuple[list[Array], float, list[EquationResult]]:
        """Return the outputs, the loss, and the results of all equations."""
        arguments = self._arguments(leaves, inputs, targets)
        # entered, so that the results inside of an author's own functions are evidence as well
        outs, records = self._call("forward", lambda a: self._evaluate(a, custom=True), arguments)
        results = jax.tree.leaves(records, is_leaf=lambda part: isinstance(part, EquationResult))
        return outs[: self.outs], float(outs[-1]), results

    def cotangents(self, leaves: Any, inputs: Any, targets: Any) -> list[Array]:
        """Return the gradient of the loss by the results of all equations."""
        arguments = self._arguments(leaves, inputs, targets)
        # not entered: the author's own rules decide the gradient
        shape = jax.eval_shape(lambda a: self._evaluate(a, custom=False)[1], arguments)

        def cotangents_of(given: Any) -> Any:
            # zeros are added to every value: the gradient by them is that by the value
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
            return jax.grad(lambda eps: self._evaluate(given, custom=False, eps=eps)[0][-1])(zeros)

        return [
            c
            for c in jax.tree.leaves(self._call("cotangents", cotangents_of, arguments))
            if c.dtype.kind == "f"
        ]

    def with_cast(self, line: str, arguments: Any) -> list[Array]:
        """Return the outputs in float64, but for what is cast at a line as its author wrote it.

        Args:
            line: `file:line`.
            arguments: leaves, inputs and targets.
        """
        one = Interpreter(custom=False, cast_at=line)
        given = jax.tree.leaves(self._arguments(*arguments))
        return [np.asarray(o) for o in one.run(self.jaxpr, self._consts, given)[0][: self.outs]]

    def as_written(self, leaves: Any, inputs: Any, targets: Any) -> list[Array]:
        """Return the outputs in the dtypes that the author chose."""

        def plain(given: Any) -> Any:
            # the author's dtypes: the arguments are float64 as every other run has them
            own = [
                _cast(v, var.aval)
                for v, var in zip(jax.tree.leaves(given), self.jaxpr.invars, strict=True)
            ]
            return jax.core.eval_jaxpr(self.jaxpr, self._consts, *own)[: self.outs]

        found: list[Array] = self._call(
            "as-written", plain, self._arguments(leaves, inputs, targets)
        )
        return found
