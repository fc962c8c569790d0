"""A traced loss as a flat list of equations, which can be evaluated in part.

Calls, and scans that add up a number, are written out, so that the walk from the loss down to its
items (`losses`) sees nothing but single operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from gradcheck_suite.auditing.places import is_users, shown_path

CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "jit",
        "pjit",
        "remat",
        "remat2",
    }
)
"""Primitives that call a program and do no more."""
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that such a program stands in."""
CUSTOM_VJP = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
MOST_UNROLLED = 64
"""Iterations of a scan inside of a loss that are written out, to read what it adds up."""


class Var:
    """A value of a program.

    Attributes:
        aval: its shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; empty for what has none."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def size(self) -> int:
        """The number of its elements."""
        # `np.prod` of no axes is the float 1.0, and of many large ones an int32 on some systems
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Python:
    """What stands in place of a primitive where an equation is no JAX equation.

    Attributes:
        name: of the operation.
        call: computes its one result.
    """

    name: str
    call: Callable[..., Any]


@dataclass(eq=False)
class Equation:
    """One operation.

    Attributes:
        primitive: of JAX, or a `Python`.
        params: of the primitive.
        ins: its operands.
        outs: its results.
        line: `file:line` of the user's frame, empty where there is none.
    """

    primitive: Any
    params: Mapping[str, Any]
    ins: Sequence[Var]
    outs: Sequence[Var]
    line: str

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.primitive.name)

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Return the results for some operands."""
        if isinstance(self.primitive, Python):
            return [self.primitive.call(*values)]
        return bind(self.primitive, self.params, values)


@dataclass(eq=False)
class Program:
    """A program without calls.

    Attributes:
        inputs: its arguments.
        constants: variable -> the value that was closed over.
        literals: variable -> a number that stands in the program. They are variables so that equal
            programs with other numbers, as those of an eager loop, are evaluated by one.
        equations: in their order.
        outputs: its results.
        producer: variable -> index of the equation that computes it.
    """

    inputs: list[Var] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    literals: dict[Var, Any] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)
    outputs: list[Var] = field(default_factory=list)
    producer: dict[Var, int] = field(default_factory=dict)

    def equation_of(self, var: Var) -> Equation | None:
        """Return the equation that computes a variable; None for an input."""
        index = self.producer.get(var)
        return None if index is None else self.equations[index]

    def add(self, equation: Equation) -> None:
        """Append an equation."""
        self.equations.append(equation)
        self.producer.update(dict.fromkeys(equation.outs, len(self.equations) - 1))

    def dependents(self, sources: set[Var]) -> set[Var]:
        """Return the variables that a gradient by some others reaches."""
        # equations stand in the order in which they are computed: one pass over them finds all
        found = set(sources)
        for equation in self.equations:
            if found.intersection(equation.ins) and equation.name != "stop_gradient":
                found.update(equation.outs)
        return found

    def affected(self, source: Var) -> set[Var]:
        """Return the variables whose values rest on that of another one."""
        found = {source}
        for equation in self.equations:
            if found.intersection(equation.ins):
                found.update(equation.outs)
        return found

    def evaluate(self, wanted: Sequence[Var], given: Mapping[Var, Any]) -> list[Any]:
        """Return the values of some variables.

        Only what they need is computed, and nothing that `given` has a value for.
        """
        return self.extend(wanted, dict(given))

    def extend(self, wanted: Sequence[Var], values: dict[Var, Any]) -> list[Any]:
        """Return the values of some variables, and keep them and those that they need in `values`."""
        # by index, an equation comes after those that compute its operands
        for index in sorted(self._needed(wanted, values)):
            equation = self.equations[index]
            results = equation.bind([self._read(one, values) for one in equation.ins])
            for var, result in zip(equation.outs, results, strict=True):
                values.setdefault(var, result)  # what was given in place of a result stays
        return [self._read(one, values) for one in wanted]

    def _needed(self, wanted: Sequence[Var], values: Mapping[Var, Any]) -> set[int]:
        needed = set[int]()
        stack = list(wanted)
        while stack:
            var = stack.pop()
            index = self.producer.get(var)
            # a variable that has a value already cuts off all that computes it: that is how a tail
            # of the loss is differentiated by its items
            if var in values or index is None or index in needed:
                continue
            needed.add(index)
            stack += self.equations[index].ins
        return needed

    def _read(self, var: Var, values: Mapping[Var, Any]) -> Any:
        if var in values:
            return values[var]
        return self.constants[var] if var in self.constants else self.literals[var]

    def signature(self) -> str:
        """Return a text that is the same for programs that compute the same of their inputs."""
        # variables are numbered by first use: they are other objects in each trace
        numbers: dict[Var, int] = {}

        def name(var: Var) -> str:
            return f"{numbers.setdefault(var, len(numbers))}:{var.aval}"

        lines = [" ".join(map(name, [*self.inputs, *self.constants, *self.literals]))]
        for one in self.equations:
            operands = " ".join(map(name, [*one.outs, *one.ins]))
            lines.append(f"{one.name} {dict(one.params)} {operands}")
        lines.append(" ".join(map(name, self.outputs)))
        return "\n".join(lines)


def bind(primitive: Any, params: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation of JAX."""
    given = primitive.get_bind_params(dict(params))
    # JAX before 0.11 gives the functions that a primitive calls apart from its parameters
    functions, own = given if isinstance(given, tuple) else ((), given)
    result = primitive.bind(*functions, *values, **own)
    return list(result) if primitive.multiple_results else [result]


def opened(program: Any) -> tuple[Any, list[Any]]:
    """Return a jaxpr and its constants, whether it is closed or not."""
    closed = hasattr(program, "consts")
    return (program.jaxpr, list(program.consts)) if closed else (program, [])


def called(equation: Any) -> Any:
    """Return the program of an equation of a jaxpr that is a plain call, or None."""
    if equation.primitive.name not in CALLS:
        return None
    return next((equation.params[name] for name in BODIES if name in equation.params), None)


def programs_in(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs in the parameters of an equation of a jaxpr."""
    for value in equation.params.values():
        # `cond` keeps its branches in a tuple; a program is a `Jaxpr`, with equations, or a
        # `ClosedJaxpr`, with a jaxpr and its constants
        parts = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield opened(part)[0]


@dataclass(frozen=True)
class ScanOperands:
    """How the operands of a scan are cut up.

    Attributes:
        fixed: the number of those that all iterations share.
        carried: the number of those that an iteration hands to the next one.
    """

    fixed: int
    carried: int

    @staticmethod
    def of(params: Mapping[str, Any]) -> ScanOperands:
        """Return those of a scan; JAX 0.11 tells by a tree of all operands."""
        if "ft_in" not in params:
            return ScanOperands(params["num_consts"], params["num_carry"])
        fixed, carried, _ = params["ft_in"].unpack()
        return ScanOperands(len(fixed), len(carried))

    def cut(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the operands of each kind; the last are those that are iterated over."""
        end = self.fixed + self.carried
        return values[: self.fixed], values[self.fixed : end], values[end:]


def users_line_of(equation: Any) -> str:
    """Return `file:line` of the innermost frame of the user's at which an equation was traced."""
    trace = equation.source_info.traceback
    frames = () if trace is None else trace.frames
    # JAX lists the innermost frame first
    line = ((f.file_name, f.line_num) for f in frames if is_users(f.file_name))
    found = next(line, None)
    return "" if found is None else f"{shown_path(found[0])}:{found[1]}"


def is_float(value: Any) -> bool:
    """Return whether something has a dtype of real numbers with a fraction."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _adds_up(equation: Any) -> bool:
    """Return whether a scan may add up a loss: a number of real numbers is carried."""
    carried = equation.outvars[: ScanOperands.of(equation.params).carried]
    # some scripts carry their loss as an array of one element
    numbers = [one.aval for one in carried if one.aval.shape in ((), (1,))]
    # a longer scan is left as it is, and a loss that is added up inside of it is said to be opaque
    return equation.params["length"] <= MOST_UNROLLED and any(map(is_float, numbers))


class _Flattener:
    """Writes a jaxpr out into a `Program`."""

    def __init__(self) -> None:
        self.program = Program()

    def walk(self, jaxpr: Any, constants: Sequence[Any], args: Sequence[Any], line: str) -> Any:
        """Write out a jaxpr for some arguments, and return its results."""
        values: dict[Any, Any] = {}
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            values[var] = Var(var.aval)
            self.program.constants[values[var]] = value
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(var: Any) -> Var:
            if not isinstance(var, jex.Literal):
                found: Var = values[var]
                return found
            # each use of a literal has a variable of its own, so that equal losses have equal
            # signatures
            number = Var(var.aval)
            self.program.literals[number] = var.val
            return number

        for equation in jaxpr.eqns:
            # what a library computes for the user stands at the line of the user's call
            here = users_line_of(equation) or line
            results = self._equation(equation, [read(one) for one in equation.invars], here)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(one) for one in jaxpr.outvars]

    def _equation(self, equation: Any, ins: list[Var], line: str) -> Sequence[Var]:
        body = called(equation)
        # `custom_jvp_call` is written out as well: the walk needs the operations inside of it, and
        # a function with one derivative in two forms has the same gradient either way
        if body is not None:
            return list(self.walk(*opened(body), ins, line))
        if equation.primitive.name == "scan" and _adds_up(equation):
            return self._unrolled(equation, ins, line)
        outs = [Var(one.aval) for one in equation.outvars]
        self.program.add(
            Equation(
                equation.primitive,
                equation.params,
                ins,
                outs,
                line,
            )
        )
        return outs

    def _python(
        self, name: str, call: Callable[..., Any], ins: list[Any], aval: Any, line: str
    ) -> Var:
        out = Var(aval)
        self.program.add(
            Equation(
                Python(name, call),
                {},
                ins,
                [out],
                line,
            )
        )
        return out

    def _unrolled(self, equation: Any, ins: list[Any], line: str) -> list[Any]:
        params = equation.params
        parts = ScanOperands.of(params)
        fixed, carry, iterated = parts.cut(ins)
        jaxpr, constants = opened(params["jaxpr"])
        row_avals = [one.aval for one in parts.cut(jaxpr.invars)[2]]
        order = list(range(params["length"]))
        if params["reverse"]:
            order.reverse()
        rows = dict[int, Sequence[Any]]()
        # rows are kept by their number, so that a reversed scan stacks them in the same order as
        # JAX does
        for t in order:
            given = [
                self._python("row", _row_reader(t), [x], aval, line)
                for x, aval in zip(iterated, row_avals, strict=True)
            ]
            results = self.walk(jaxpr, constants, [*fixed, *carry, *given], line)
            carry = results[: parts.carried]
            rows[t] = results[parts.carried :]
        stacked = [
            self._python("stack", _stack, [rows[t][i] for t in sorted(rows)], one.aval, line)
            for i, one in enumerate(equation.outvars[parts.carried :])
        ]
        return [*carry, *stacked]


def _row_reader(t: int) -> Callable[[Any], Any]:
    return lambda x: x[t]


def _stack(*rows: Any) -> Any:
    return jnp.stack(rows)


def flatten(closed: Any) -> Program:
    """Return a closed jaxpr with all plain calls written out."""
    flattener = _Flattener()
    program = flattener.program
    program.inputs = [Var(one.aval) for one in closed.jaxpr.invars]
    program.outputs = flattener.walk(closed.jaxpr, closed.consts, program.inputs, "")
    return program
