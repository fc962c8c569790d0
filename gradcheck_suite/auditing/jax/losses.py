"""The terms of a loss, read off its equations: which items are added up, and how much each weighs.

The walk goes from the loss back to the items. The operations between the two are linear, so the
gradient of that tail by the items *is* the weight of each of them, and JAX computes it in the
context of the run: masks, counts, loss scales, collectives and both modes of `shard_map` need no
rule of their own. No argument has to be guessed to be the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradcheck_suite.auditing.jax.equations import (
    CUSTOM_VJP,
    Equation,
    Program,
    ScanOperands,
    Var,
    bind,
    flatten,
    is_float,
    opened,
)

COLLECTIVES = frozenset(
    {
        "all_reduce",
        "copy_p",
        "pbroadcast",
        "pcast",
        "psum",
        "psum2",
        "psum_invariant",
        "pvary",
        "reduced_vary_cast",
    }
)
LINEAR = COLLECTIVES | {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "mesh_cast",
    "neg",
    "optimization_barrier",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}
"""Operations that are linear in their one operand."""
DECLARED = "audit_objective"
"""The primitive by which `objective` says what a loss is a mean of."""
SUMS = frozenset({"add", "add_any", "sub"})
WITH_PROGRAMS = frozenset({"cond", "scan", "shard_map", "while"}) | CUSTOM_VJP
"""Operations inside of which a loss may be added up, where the walk does not go."""


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One sum of a loss.

    Attributes:
        levels: the arrays whose elements it may be a sum over, the outermost one first.
        line: `file:line` of the sum, empty where it is not known.
        expression: the names of its operations, from the sum inwards.
        opaque: why it cannot be read as a sum over items; empty where it can.
        declared: what the user says it is a mean or a sum of, the equation of `objective`; None
            where nothing is said.
        of_parameters: whether it is a function of parameters alone, such as a penalty.
    """

    levels: tuple[Var, ...]
    line: str
    expression: tuple[str, ...]
    opaque: str = ""
    of_parameters: bool = False
    declared: Equation | None = None


class _Reader:
    """Walks from a loss down to its items.

    Args:
        program: the loss.
        trained: the inputs that it is differentiated by.
        data: its other inputs.
    """

    def __init__(self, program: Program, trained: Sequence[Var], data: Sequence[Var]) -> None:
        self._program = program
        self._by_parameters = program.dependents(set(trained))
        self._by_data = program.dependents({*data, *program.constants})
        self.found = list[LossTerm]()

    def _operands(self, equation: Equation) -> list[Var]:
        """Return the operands that a gradient goes back to."""
        return [one for one in equation.ins if one in self._by_parameters]

    def _is_scaled(self, equation: Equation) -> bool:
        """Return whether an operation multiplies its one operand by something constant."""
        operands = self._operands(equation)
        if len(operands) != 1:
            return False
        name = equation.name
        # `select_n` by a mask is a product with 0 or 1; a constant divided by a number is not
        # linear in it
        return name in ("mul", "select_n") or (name == "div" and operands[0] is equation.ins[0])

    def split(self, var: Var, line: str = "") -> None:
        """Find the terms of a number."""
        equation = self._program.equation_of(var)
        if equation is None:
            self.found.append(
                LossTerm(
                    (),
                    line,
                    ("input",),
                    "the loss is an input",
                )
            )
            return
        operands = self._operands(equation)
        name = equation.name
        line = equation.line or line
        if name == DECLARED:
            self.found.append(
                LossTerm(
                    (equation.ins[0],),
                    line,
                    (name,),
                    declared=equation,
                )
            )
        elif name == "reduce_sum":
            self.found.append(self._term(operands[0], line))
        # a sum of sums is several terms: each may be a mean over other items
        elif name in SUMS | LINEAR:
            for one in operands:
                self.split(one, line)
        elif self._is_scaled(equation):
            self.split(operands[0], line)
        # a dot product with something constant is a weighted sum
        elif name == "dot_general" and len(operands) == 1 and operands[0].size > 1:
            self.found.append(self._term(operands[0], line))
        # a root or a logarithm of a mean has no weight for its items: it depends on their values
        elif any(one.size == 1 and self._rests_on_sum(one) for one in operands):
            self.found.append(
                LossTerm(
                    (),
                    line,
                    (name,),
                    f"it is {name} of a sum over items",
                )
            )
        elif name in WITH_PROGRAMS:
            self.found.append(
                LossTerm(
                    (),
                    line,
                    (name,),
                    f"it is added up inside of `{name}`",
                )
            )
        else:
            self.found.append(self._term(var, line))

    def _rests_on_sum(self, var: Var) -> bool:
        """Return whether a number rests on a sum of several numbers through nothing but numbers."""
        equation = self._program.equation_of(var)
        if equation is None:
            return False
        if equation.name == "reduce_sum" and equation.ins[0].size > 1:
            return True
        below = self._operands(equation)
        return any(one.size == 1 and self._rests_on_sum(one) for one in below)

    def _term(self, var: Var, line: str) -> LossTerm:
        levels = [var]
        names = ["sum"]
        equation = self._program.equation_of(var)
        while equation is not None:
            operands = self._operands(equation)
            name = equation.name
            linear = name in LINEAR or name == "reduce_sum" or self._is_scaled(equation)
            if not linear or len(operands) != 1:
                names.append(name)
                break
            # copies of one number are no items: they are all the same one
            if name == "broadcast_in_dim" and operands[0].size != levels[-1].size:
                names.append("broadcast")
                break
            levels.append(operands[0])
            equation = self._program.equation_of(levels[-1])
        is_penalty = not any(one in self._by_data for one in levels)
        distinct = tuple(dict.fromkeys(levels))
        return LossTerm(
            distinct,
            line,
            tuple(names),
            of_parameters=is_penalty,
        )


def terms_of(program: Program, trained: Sequence[Var], data: Sequence[Var]) -> list[LossTerm]:
    """Return the terms of a loss, which is the first output of a program.

    Args:
        program: the loss.
        trained: the inputs that it is differentiated by.
        data: its other inputs.
    """
    reader = _Reader(program, trained, data)
    reader.split(program.outputs[0])
    return reader.found


def adds_up_over_devices(program: Program, trained: Sequence[Var]) -> bool:
    """Return whether a loss is a sum over devices, so that its gradient is multiplied by them.

    That is so without `check_vma` and under `pmap`: the transpose of a sum is a sum there.
    https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    reached = program.dependents(set(trained))
    return any(
        equation.name in ("psum", "psum2") and reached.intersection(equation.outs)
        for equation in program.equations
    )


# What is computed of a term. All of it is traced into the program beside the user's call.


def varying(aval: Any) -> frozenset[str]:
    """Return the axes of `shard_map` that a value differs over.

    JAX 0.10 moved them from `aval.vma` to `aval.mat`, which a `ShapeDtypeStruct` calls
    `manual_axis_type`.
    """
    of_type = getattr(aval, "mat", None) or getattr(aval, "manual_axis_type", None)
    known = getattr(of_type, "varying", None)
    return frozenset((getattr(aval, "vma", None) if known is None else known) or ())


def _zeros(aval: Any) -> Any:
    """Return zeros that vary over devices as a value does: `shard_map` sums gradients by that."""
    axes = tuple(varying(aval))
    zeros = jnp.zeros(aval.shape, aval.dtype)
    spec = getattr(getattr(aval, "sharding", None), "spec", None) or ()
    if any(part is not None for part in spec):  # cut up over explicit axes of a mesh
        return jax.sharding.reshard(zeros, aval.sharding)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


LEAST, LARGEST, NUMBER, TOTAL, ROWS = range(5)
"""What is kept of the weights of a level: the smallest and the largest magnitude of those that are not 0, how many
these are, the sum of all, and how many rows of the first axis have one that is not 0."""


def weights_of(program: Program, term: LossTerm, given: Mapping[Var, Any]) -> list[Any]:
    """Return for each level of a term what is kept of its weights, (5,) float32.

    Args:
        program: the loss.
        term: of it.
        given: the values of its inputs and constants.
    """
    if term.declared is not None:
        return [_declared_weights(program, term.declared, given)]
    rows = []
    for level in term.levels:

        def tail(items: Any, level: Var = level) -> Any:
            return program.evaluate(program.outputs[:1], {**given, level: items})[0].reshape(())

        # the tail is linear, so that its gradient is the same at zeros as at the items: they need
        # not be computed for it
        weights = UNMARKED.grad(tail)(_zeros(level.aval)).astype(jnp.float32)
        size = jnp.abs(weights)
        # an item that a mask leaves out has weight 0, and counts for nothing
        is_item = size > 0
        least = jnp.min(jnp.where(is_item, size, jnp.inf))
        number = jnp.sum(is_item).astype(jnp.float32)
        of_rows = is_item.reshape(weights.shape[0] if weights.ndim else 1, -1).any(1)
        row_number = jnp.sum(of_rows).astype(jnp.float32)
        rows.append(jnp.stack([least, jnp.max(size), number, jnp.sum(weights), row_number]))
    return rows


def _declared_weights(program: Program, declared: Equation, given: Mapping[Var, Any]) -> Any:
    """Return what is kept of the weights of a loss whose user says what it counts."""
    loss, number = declared.ins
    out = declared.outs[0]

    def tail(value: Any) -> Any:
        return program.evaluate(program.outputs[:1], {**given, out: value})[0].reshape(())

    of_loss = UNMARKED.grad(tail)(_zeros(loss.aval)).astype(jnp.float32).reshape(())
    count = program.evaluate([number], given)[0].astype(jnp.float32).reshape(())
    is_mean = declared.params["reduction"] == "mean"
    weight = of_loss / count if is_mean else of_loss
    return jnp.stack([jnp.abs(weight), jnp.abs(weight), count, weight * count, count])


@dataclass(frozen=True)
class Unmarked:
    """The functions of JAX as they were before the audit replaced them."""

    grad: Any = jax.grad
    value_and_grad: Any = jax.value_and_grad
    vjp: Any = jax.vjp
    jit: Any = jax.jit
    pmap: Any = jax.pmap


UNMARKED = Unmarked()


def _rows_of(items: Var, data: Sequence[Var]) -> int | None:
    """Return the number of rows of the batch that items belong to; None where it is not clear."""
    arrays = [one for one in data if one.shape and one.shape[0] > 1]
    leading = [one.shape[0] for one in arrays if items.shape[0] % one.shape[0] == 0]
    if not leading:
        return None
    # the number of rows that fits exactly, else the one that most inputs have
    rows = max(set(leading), key=lambda n: (n == items.shape[0], leading.count(n)))
    second = {one.shape[1] for one in arrays if len(one.shape) > 1 and one.shape[0] == rows}
    # items may be all tokens of all rows in one axis: rows times the second axis of an input
    is_batch = rows > 2 and items.shape[0] // rows in second | {1}
    return rows if is_batch else None


MOST_ROW_INPUTS = 4
"""Inputs of a loss whose rows are replaced."""


def row_inputs(term: LossTerm, data: Sequence[Var]) -> list[Var]:
    """Return the inputs of a loss that may have a row for each row of a term's items.

    A matrix of weights may have as many rows: which of them are batches, their values tell.
    """
    items = _items_of(term)
    rows = None if items is None else _rows_of(items, data)
    if rows is None:
        return []
    found = [one for one in data if one.shape and one.shape[0] == rows and not _is_key(one.aval)]
    return found[:MOST_ROW_INPUTS]


def _items_of(term: LossTerm) -> Var | None:
    """Return the outermost items of a term that may belong to rows, None where there are none."""
    if term.of_parameters or term.opaque or term.declared is not None:
        return None
    return next((one for one in term.levels if one.shape and one.shape[0] > 1), None)


def mixing_of(program: Program, term: LossTerm, replaced: Var, values: dict[Var, Any]) -> Any:
    """Return by how much items change when a row of an input that they do not belong to does.

    The first row becomes the last one; items of other rows should stay as they are. Relative to the
    largest item. Where the first axis may be time, as of a recurrent network, rows of the second one
    may be the batch: the axis along which items depend less is.

    Args:
        program: the loss.
        term: of it.
        replaced: one of its `row_inputs`.
        values: of its inputs and constants, and of what was computed of them so far.
    """
    items = _items_of(term)
    assert items is not None
    array = jnp.asarray(values[replaced])
    before = program.extend([items], values)[0].astype(jnp.float32)
    # what does not depend on the replaced input was computed already, and is not computed again
    affected = program.affected(replaced)
    others = {var: value for var, value in values.items() if var not in affected}
    largest = jnp.max(jnp.abs(before))

    def items_for(changed: Any) -> Any:
        found = program.evaluate([items], {**others, replaced: changed})
        return found[0].astype(jnp.float32)

    def change(axis: int, after: Any) -> Any:
        block = items.shape[axis] // array.shape[axis]
        of_others = jnp.moveaxis(before - after, axis, 0)[block:]
        # `where` in place of a branch: the value is a tracer
        return jnp.max(jnp.abs(of_others)) / jnp.where(largest == 0, 1, largest)

    has_time = items.shape[:2] == array.shape[:2] and len(array.shape) > 1 and array.shape[1] > 1
    if not has_time:
        return change(0, items_for(_with_other_row(array, 0)))
    both = jnp.stack([_with_other_row(array, axis) for axis in (0, 1)])
    after = jax.lax.map(items_for, both)  # compiled once for both
    return jnp.minimum(change(0, after[0]), change(1, after[1]))


def _with_other_row(array: Any, axis: int) -> Any:
    """Return an array whose first row along an axis is its last one."""
    rows = jnp.moveaxis(array, axis, 0)
    return jnp.moveaxis(rows.at[0].set(rows[-1]), 0, axis)


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.extended))


# A function with a derivative of its own (`jax.custom_vjp`), against what JAX makes of its forward.


@dataclass(frozen=True, eq=False)
class LastIteration:
    """The last iteration of a scan, as a program of its own.

    Attributes:
        equation: the scan.
        body: what an iteration does.
    """

    equation: Equation
    body: Program

    def given(self, values: Sequence[Any]) -> dict[Var, Any]:
        """Return the values of the body's inputs in that iteration.

        Args:
            values: the operands of the scan.
        """
        params = self.equation.params
        parts = ScanOperands.of(params)
        fixed, carry, iterated = parts.cut(values)
        before = slice(1, None) if params["reverse"] else slice(None, -1)
        last = 0 if params["reverse"] else -1
        jaxpr, constants = opened(params["jaxpr"])

        def step(state: Any, row: Any) -> Any:
            results = jax.core.eval_jaxpr(jaxpr, constants, *fixed, *state, *row)
            return results[: parts.carried], None

        rows = [jnp.asarray(one)[before] for one in iterated]
        # the first iteration would not do: what is carried into it is often all zeros
        length = params["length"] - 1
        carry, _ = jax.lax.scan(
            step,
            list(carry),
            rows,
            length=length,
            reverse=params["reverse"],
        )
        operands = [*fixed, *carry, *(jnp.asarray(one)[last] for one in iterated)]
        return dict(zip(self.body.inputs, operands, strict=True))


@dataclass(frozen=True, eq=False)
class CondBranch:
    """A branch of a `cond`, as a program of its own.

    Attributes:
        equation: the `cond`.
        number: of the branch.
        body: what it does.
    """

    equation: Equation
    number: int
    body: Program

    def given(self, values: Sequence[Any]) -> dict[Var, Any]:
        """Return the values of the body's inputs.

        Args:
            values: the operands of the `cond`.
        """
        return dict(zip(self.body.inputs, values[1:], strict=True))

    def is_taken(self, values: Sequence[Any]) -> Any:
        """Return whether the branch is taken; traceable."""
        last = len(self.equation.params["branches"]) - 1
        # JAX clamps the index in the same way
        return jnp.clip(jnp.asarray(values[0], jnp.int32), 0, last) == self.number


@dataclass(frozen=True, eq=False)
class CustomRule:
    """A call of a function with a backward of its own.

    Attributes:
        equation: the call.
        name: of the function.
        line: of the call.
        trained: the operands that a gradient goes back to: of others, such as a mask, a rule may
            return zeros.
        inside: the scans and branches that it stands in, the outermost first.
    """

    equation: Equation
    name: str
    line: str
    trained: tuple[int, ...]
    inside: tuple[LastIteration | CondBranch, ...] = ()


MOST_ALIKE = 2
"""Calls of one function at one line, with inputs of the same shapes, that are checked: the last ones."""


def custom_rules(program: Program, trained: Sequence[Var]) -> list[CustomRule]:
    """Return the calls of such functions that the gradient of a loss goes through."""
    several: dict[tuple[str, ...], list[CustomRule]] = {}
    for rule in _all_rules(program, set(trained), ()):
        avals = (str(one.aval) for one in rule.equation.ins)
        several.setdefault((rule.name, rule.line, *avals), []).append(rule)
    last = (alike[-MOST_ALIKE:] for alike in several.values())
    return list(itertools.chain.from_iterable(last))


def _all_rules(
    program: Program, trained: set[Var], inside: tuple[LastIteration | CondBranch, ...]
) -> list[CustomRule]:
    reached = program.dependents(trained)
    found = list[CustomRule]()
    for equation in program.equations:
        if not reached.intersection(equation.outs):
            continue
        if equation.name in CUSTOM_VJP:
            name = str(equation.params.get("name") or _name_of(equation))
            own = tuple(i for i, one in enumerate(equation.ins) if one in reached)
            found.append(
                CustomRule(
                    equation,
                    name,
                    equation.line,
                    own,
                    inside,
                )
            )
        # a `while` is not entered: JAX has no gradient of one in reverse mode, so that no backward
        # of a loss goes through it
        elif equation.name == "scan" and equation.params["length"]:
            turn = LastIteration(equation, flatten(equation.params["jaxpr"]))
            found += _all_rules(turn.body, _reached_inside(turn, reached), (*inside, turn))
        elif equation.name == "cond":
            for number, one in enumerate(equation.params["branches"]):
                branch = CondBranch(equation, number, flatten(one))
                pairs = zip(equation.ins[1:], branch.body.inputs, strict=True)
                of_branch = {inner for outer, inner in pairs if outer in reached}
                found += _all_rules(branch.body, of_branch, (*inside, branch))
    return found


def _reached_inside(turn: LastIteration, reached: set[Var]) -> set[Var]:
    """Return the inputs of an iteration that a gradient goes back to.

    What is carried may be reached through an earlier iteration alone.
    """
    parts = ScanOperands.of(turn.equation.params)
    pairs = zip(turn.equation.ins, turn.body.inputs, strict=True)
    found = {inner for outer, inner in pairs if outer in reached}
    carried = parts.cut(turn.body.inputs)[1]
    while True:
        after = turn.body.dependents(found)
        results = zip(carried, turn.body.outputs[: parts.carried], strict=True)
        more = {before for before, result in results if result in after}
        if more <= found:
            return found
        found |= more


def _name_of(equation: Equation) -> str:
    jaxpr = equation.params.get("call_jaxpr", equation.params.get("fun_jaxpr"))
    info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
    return str(getattr(info, "func_name", "") or "a custom_vjp").partition(" ")[0]


OWN, ENTERED, DIFFERENCE, IDENTITY = range(4)
"""What is kept of the check of a rule: the norm of its gradient, that of JAX's own, that of their difference, and by
how much the function's result differs from its first input of the same shape."""


def check_rule(program: Program, rule: CustomRule, known: dict[Var, Any]) -> Any:
    """Return how the gradient of a rule compares with that of the function's forward, (4,) float32.

    Both are taken at the inputs of the run, for one random cotangent.

    Args:
        program: the loss.
        rule: a call in it.
        known: the values of its inputs and constants, and of what was computed of them so far.
    """
    is_called: Any = True
    for part in rule.inside:
        operands = program.extend(part.equation.ins, known)
        if isinstance(part, CondBranch):
            is_called &= part.is_taken(operands)
        known = part.given(operands)
        program = part.body
    equation = rule.equation
    values = program.extend(equation.ins, known)
    moved = [i for i in rule.trained if is_float(jnp.asarray(values[i]))]
    body = equation.params.get("call_jaxpr", equation.params.get("fun_jaxpr"))
    jaxpr, constants = opened(body)

    def whole(some: Sequence[Any]) -> list[Any]:
        operands = list(values)
        for i, value in zip(moved, some, strict=True):
            operands[i] = value
        return operands

    def by_rule(*some: Any) -> list[Any]:
        return bind(equation.primitive, equation.params, whole(some))

    def by_forward(*some: Any) -> list[Any]:
        return list(jax.core.eval_jaxpr(jaxpr, constants, *whole(some)))

    inputs = [jnp.asarray(values[i]) for i in moved]
    gradients = []
    for function in (by_rule, by_forward):
        results, back = UNMARKED.vjp(
            lambda *xs, f=function: [y for y in f(*xs) if is_float(y)], *inputs
        )
        cotangents = [_cotangent(i, one) for i, one in enumerate(results)]
        gradients.append(_flattened(back(cotangents)))
    own, entered = gradients
    # where the shapes differ, the function is no identity, which NaN says: it equals nothing
    distance = jnp.float32(jnp.nan)
    if results and inputs[0].shape == results[0].shape:
        distance = _norm_of(_flattened(inputs[:1]) - _flattened(results[:1]))
    found = jnp.stack([_norm_of(own), _norm_of(entered), _norm_of(own - entered), distance])
    # NaN is greater than nothing: a rule that was not called is not judged
    return jnp.where(is_called, found, jnp.nan)


def _cotangent(index: int, result: Any) -> Any:
    # fixed keys, so that one run has one verdict; a cotangent of ones would hide what sums to 0
    cotangent = jax.random.normal(jax.random.key(index), result.shape).astype(result.dtype)
    axes = tuple(varying(jax.typeof(result)))
    return jax.lax.pcast(cotangent, axes, to="varying") if axes else cotangent


def _flattened(arrays: Sequence[Any]) -> Any:
    return jnp.concatenate([one.astype(jnp.float32).reshape(-1) for one in arrays])


def _norm_of(flat: Any) -> Any:
    return jnp.sqrt(jnp.sum(flat * flat))
