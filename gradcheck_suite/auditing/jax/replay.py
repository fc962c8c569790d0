"""Evaluates a traced program beside the user's call, and returns a summary of each mark in it.

Only operations with marks inside are entered. What no mark depends on, XLA removes. Effects, such
as `jax.debug.print`, are left out: they happen in the user's own call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from gradcheck_suite.auditing.jax.equations import ScanOperands, bind, called, opened, programs_in
from gradcheck_suite.auditing.jax.losses import UNMARKED, varying
from gradcheck_suite.auditing.jax.marks import (
    MappedAxis,
    Mark,
    UpdateMark,
    mark_p,
    summarized,
)

MOST_TURNS = 64
"""Turns of a `while` loop that are kept."""
MOST_STEPS = 40
"""Iterations of a scan with an optimizer's step in it that are looked at."""
CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback"})
MARK = "mark"
SCAN = "scan"
WHILE = "while"
BRANCHES = "branches"
SHARDS = "shards"
COPIES = "copies"
WITHOUT_NAME = ("_internal_pmap_axis_name", "<axis 0x")
"""What the axis of a `pmap` begins with that was given no name, in JAX 0.10 and 0.9.

Nothing can be added up over it, so that its devices train one model each, as the copies of a `vmap`
do.
"""


class CannotReplayError(Exception):
    """A program cannot be evaluated a second time."""


@dataclass(frozen=True, eq=False)
class KeptMarks:
    """A part of a program, with the marks in it.

    Attributes:
        kind: `mark`, `scan` (one more leading axis), `while`, `branches`, `shards`, or `copies`,
            which are shards that have nothing to do with each other.
        about: an `AboutMark`, an `AboutScan` or an `AboutShards`; None for others.
        data: the summary of a mark, the turns of a loop, the index of a branch.
        parts: what is inside; of `branches` a list for each.
        size: the number of iterations, or of devices.
    """

    kind: str
    about: Any
    data: Any
    parts: list[Any]
    size: int = 0


jax.tree_util.register_dataclass(
    KeptMarks, data_fields=["data", "parts"], meta_fields=["kind", "about", "size"]
)


@dataclass(frozen=True)
class AboutMark:
    """What is known of a mark without its values.

    Attributes:
        mark: the mark.
        copies: whether one of several copies under a `vmap` was looked at.
    """

    mark: Mark
    copies: bool


@dataclass(frozen=True)
class AboutScan:
    """What is known of a scan without its values.

    Attributes:
        reverse: whether it runs backwards.
        length: the number of its iterations, of which the first ones may have been looked at alone.
        steps: optimizer steps of an iteration; 0 where that is not known.
    """

    reverse: bool
    length: int
    steps: int


@dataclass(frozen=True)
class AboutShards:
    """What is known of devices without values.

    Attributes:
        are_devices: whether they are devices, of a `pmap` with a name or a `shard_map`: who names
            an axis trains one model over it. Copies under a named `vmap` may be an ensemble.
    """

    are_devices: bool


@dataclass
class ProgramContents:
    """Finds the marks and the callbacks of programs, each of which is looked through once."""

    _marks: dict[int, list[Mark]] = field(default_factory=dict)
    _effects: dict[int, bool] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def marks(self, jaxpr: Any) -> list[Mark]:
        """Return the marks of a program."""
        if id(jaxpr) not in self._marks:
            self._alive.append(jaxpr)  # an id is one as long as its object is alive
            found = list[Mark]()
            for equation in jaxpr.eqns:
                if equation.primitive is mark_p:
                    found.append(equation.params["mark"])
                else:
                    found += self.marks_inside(equation)
            self._marks[id(jaxpr)] = found
        return self._marks[id(jaxpr)]

    def without_effect(self, jaxpr: Any) -> set[int]:
        """Return the ids of marks of updates that no result of a program depends on."""
        updates = [one for one in self.marks(jaxpr) if isinstance(one, UpdateMark)]
        if not updates:
            return set()
        # JAX's own dead code elimination says what no result depends on; effects of a mark are none
        needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        kept = {id(one) for one in self.marks(needed)}
        return {id(one) for one in updates} - kept

    def marks_inside(self, equation: Any) -> list[Mark]:
        """Return the marks of the programs in an equation."""
        found = list[Mark]()
        for jaxpr in programs_in(equation):
            found += self.marks(jaxpr)
        return found

    def has_callbacks(self, jaxpr: Any) -> bool:
        """Return whether a program calls back into Python."""
        if id(jaxpr) not in self._effects:
            self._alive.append(jaxpr)
            self._effects[id(jaxpr)] = any(
                equation.primitive.name in CALLBACKS or self.callbacks_inside(equation)
                for equation in jaxpr.eqns
            )
        return self._effects[id(jaxpr)]

    def callbacks_inside(self, equation: Any) -> bool:
        """Return whether a program in an equation calls back into Python."""
        return any(map(self.has_callbacks, programs_in(equation)))


def kept_mark(mark: Mark, axes: Sequence[MappedAxis], summary: Any) -> KeptMarks:
    """Return what is kept of a mark, whose named axes stand for devices.

    Args:
        mark: the mark.
        axes: that are mapped around it.
        summary: of the mark.
    """
    about = AboutMark(mark, any(axis.name is None for axis in axes))
    node = KeptMarks(
        MARK,
        about,
        summary,
        [],
    )
    for axis in axes:
        if axis.name is not None:
            node = KeptMarks(
                SHARDS,
                AboutShards(are_devices=False),
                None,
                [node],
                axis.size,
            )
    return node


@dataclass
class MarkedEvaluation:
    """Evaluates a program and keeps its marks.

    Attributes:
        contents: what is in programs.
        notes: what was not looked at, and why.
    """

    contents: ProgramContents
    notes: dict[str, None] = field(default_factory=dict)

    def run(
        self, jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]
    ) -> tuple[list[Any], list[KeptMarks]]:
        """Return the results of a program, and what is kept of its marks.

        Raises:
            CannotReplayError: a part of it cannot be evaluated a second time.
        """
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, jex.Literal) else values[var]

        kept = list[KeptMarks]()
        for equation in jaxpr.eqns:
            results, found = self._equation(equation, [read(one) for one in equation.invars])
            kept += found
            values.update(zip(equation.outvars, results, strict=True))
        return [read(one) for one in jaxpr.outvars], kept

    def _equation(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[KeptMarks]]:
        name = equation.primitive.name
        params = equation.params
        if equation.primitive is mark_p:
            axes = params["axes"]
            found = summarized(params["mark"], axes, values)
            return values[: params["through"]], [kept_mark(params["mark"], axes, found)]
        if name in CALLBACKS:
            # a callback that only prints is left out: the user's own call prints
            if equation.outvars:
                raise CannotReplayError(
                    f"it calls back into Python (`{name}`) for a result, which a second program"
                    " must not do"
                )
            return [], []
        marks = self.contents.marks_inside(equation)
        if not marks and not self.contents.callbacks_inside(equation):
            return bind(equation.primitive, params, values), []
        body = called(equation)
        if body is not None:
            return self.run(*opened(body), values)
        if name == "scan":
            return self._scan(params, values, marks)
        if name == "while":
            return self._while(params, values)
        if name == "cond":
            return self._cond(params, values)
        if name == "shard_map":
            return self._shard_map(params, values)
        if not marks:
            raise CannotReplayError(f"it calls back into Python inside of `{name}`")
        self.notes[f"gradients are computed inside of `{name}`, which is not looked into"] = None
        return bind(equation.primitive, params, values), []

    def _scan(
        self, params: Any, values: list[Any], marks: Sequence[Mark]
    ) -> tuple[list[Any], list[KeptMarks]]:
        parts = ScanOperands.of(params)
        length = params["length"]
        reverse = params["reverse"]
        fixed, carry, iterated = parts.cut(values)
        updates = [one for one in marks if isinstance(one, UpdateMark) and not one.depth]
        steps = bool(updates)
        # a whole training may be one scan: the first steps say what the others do
        short = min(length, MOST_STEPS) if steps else length
        if short < length:
            iterated = [x[-short:] if reverse else x[:short] for x in iterated]

        def body(state: Any, row: Any) -> Any:
            results, kept = self.run(*opened(params["jaxpr"]), [*fixed, *state, *row])
            return results[: parts.carried], (results[parts.carried :], kept)

        end, (stacked, kept) = jax.lax.scan(
            body, list(carry), list(iterated), length=short, reverse=reverse
        )
        if short < length:  # what is lacking has the right shape, and no mark depends on it
            stacked = [jnp.concatenate([y, *[y[-1:]] * (length - short)]) for y in stacked]
        # how often `MultiSteps` steps is not known of iterations that are not looked at
        per_turn = 0 if any(one.multi for one in updates) else len(updates)
        about = AboutScan(reverse=reverse, length=length, steps=per_turn)
        return [*end, *stacked], [
            KeptMarks(
                SCAN,
                about,
                None,
                kept,
                short,
            )
        ]

    def _while(self, params: Any, values: list[Any]) -> tuple[list[Any], list[KeptMarks]]:
        tested = params["cond_nconsts"]
        first = tested + params["body_nconsts"]
        for_test = values[:tested]
        for_body = values[tested:first]
        carry = values[first:]
        jaxpr, constants = opened(params["body_jaxpr"])
        test, test_constants = opened(params["cond_jaxpr"])

        def kept_of(*state: Any) -> Any:
            return self.run(jaxpr, constants, [*for_body, *state])[1]

        # a `while` returns its last state alone: what its turns keep is written into room that is
        # carried along, and turns beyond that room are dropped
        shapes = jax.eval_shape(kept_of, *carry)
        room = jax.tree.map(lambda one: _room(one, (MOST_TURNS, *one.shape)), shapes)

        def body(state: Any) -> Any:
            turn, now, kept = state
            results, found = self.run(jaxpr, constants, [*for_body, *now])
            kept = jax.tree.map(lambda all_, one: all_.at[turn].set(one, mode="drop"), kept, found)
            return turn + 1, results, kept

        def goes_on(state: Any) -> Any:
            return self.run(test, test_constants, [*for_test, *state[1]])[0][0]

        start = (jnp.int32(0), list(carry), room)
        turns, results, kept = jax.lax.while_loop(goes_on, body, start)
        return list(results), [
            KeptMarks(
                WHILE,
                None,
                turns,
                kept,
            )
        ]

    def _cond(self, params: Any, values: list[Any]) -> tuple[list[Any], list[KeptMarks]]:
        index, *args = values
        branches = [opened(one) for one in params["branches"]]
        shapes = [
            jax.eval_shape(lambda *some, of=of: self.run(of[0], of[1], some)[1], *args)
            for of in branches
        ]

        def branch(number: int) -> Any:
            def run(*some: Any) -> Any:
                jaxpr, constants = branches[number]
                results, kept = self.run(jaxpr, constants, some)
                # all branches of a `switch` return the same structure: zeros stand for the marks of
                # those that are not taken
                every = jax.tree.map(lambda one: _room(one, one.shape), shapes)
                every[number] = kept
                return results, every

            return run

        functions = [branch(number) for number in range(len(branches))]
        results, kept = jax.lax.switch(index, functions, *args)
        which = jnp.asarray(index, jnp.int32)
        return list(results), [
            KeptMarks(
                BRANCHES,
                None,
                which,
                kept,
            )
        ]

    def _shard_map(self, params: Any, values: list[Any]) -> tuple[list[Any], list[KeptMarks]]:
        mesh = params["mesh"]
        made = {}
        # the name of the parameter depends on the version of JAX
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        axes = tuple(axis for axis in mesh.axis_names if axis in manual)

        def body(*args: Any) -> Any:
            results, kept = self.run(params["jaxpr"], (), args)
            leaves, made["tree"] = jax.tree.flatten(kept)
            # the new first axis is the one along which `out_specs` joins what the devices return
            return results, [_varies(one, axes)[None] for one in leaves]

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )
        results, leaves = mapped(*values)
        kept = jax.tree.unflatten(made["tree"], leaves)
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        is_without_name = len(axes) == 1 and str(axes[0]).startswith(WITHOUT_NAME)
        kind = COPIES if is_without_name else SHARDS
        about = AboutShards(are_devices=True)
        return list(results), [
            KeptMarks(
                kind,
                about,
                None,
                kept,
                size,
            )
        ]


def _room(aval: Any, shape: Sequence[int]) -> Any:
    """Return zeros of some shape that vary over devices as a value does."""
    axes = tuple(varying(aval))
    zeros = jnp.zeros(shape, aval.dtype)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _varies(value: Any, axes: Sequence[str]) -> Any:
    """Return a value that varies over all axes, as what each device returns does."""
    missing = tuple(axis for axis in axes if axis not in varying(jax.typeof(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


# What was kept, in the order in which it happened.


@dataclass(frozen=True, eq=False)
class MarkEvent:
    """A mark that was passed.

    Attributes:
        mark: the mark.
        values: its summary, as arrays; with one row for each device where there are several.
        devices: their number; 0 for one that is no shard.
        copies: whether one of several copies under a `vmap` was looked at.
        are_devices: whether several are devices, and no copies under a `vmap` with a name.
    """

    mark: Mark
    values: Any
    devices: int
    copies: bool
    are_devices: bool = False


@dataclass(frozen=True)
class UnreadMarks:
    """Marks that were not looked at come here: what was added up before is not known.

    Attributes:
        steps: optimizer steps among them; 0 where their number is not known.
    """

    steps: int = 0


Event = MarkEvent | UnreadMarks


@dataclass(frozen=True)
class Around:
    """What is around a mark.

    Attributes:
        at: the iterations of the loops around it.
        devices: the number of devices, whose axis then is the first one; 0 where there are none.
        are_devices: whether anything at all is added up over them.
        copies: whether it is one of several copies.
    """

    at: tuple[int, ...] = ()
    devices: int = 0
    are_devices: bool = False
    copies: bool = False

    def here(self, tree: Any) -> Any:
        """Return what was kept in these iterations."""
        # kept values of several devices have these on the first axis
        index = (slice(None), *self.at) if self.devices else self.at
        return jax.tree.map(lambda x: x[index], tree)

    def turn(self, t: int) -> Around:
        """Return what is around a mark in an iteration."""
        return replace(self, at=(*self.at, t))

    def number(self, data: Any) -> int:
        """Return a number that is the same on all devices."""
        return int(np.ravel(self.here(data))[0])


def events_of(kept: Sequence[KeptMarks], around: Around = Around()) -> Iterator[Event]:
    """Yield the marks of a program in the order in which they were passed.

    Args:
        kept: what was kept, as arrays.
        around: what is around them.
    """
    for node in kept:
        if node.kind == MARK:
            about = node.about
            copies = about.copies or around.copies
            values = around.here(node.data)
            yield MarkEvent(about.mark, values, around.devices, copies, around.are_devices)
        elif node.kind == SCAN:
            order = range(node.size)
            if node.about.reverse:
                order = order[::-1]
            for t in order:
                yield from events_of(node.parts, around.turn(t))
            if node.about.length > node.size:
                yield UnreadMarks(node.about.steps * (node.about.length - node.size))
        elif node.kind == WHILE:
            turns = around.number(node.data)
            for t in range(min(turns, MOST_TURNS)):
                yield from events_of(node.parts, around.turn(t))
            if turns > MOST_TURNS:
                yield UnreadMarks()
        elif node.kind == BRANCHES:
            which = around.number(node.data)
            # JAX clamps the index of a `cond` in the same way
            branch = node.parts[min(max(which, 0), len(node.parts) - 1)]
            yield from events_of(branch, around)
        else:
            yield from _events_of_devices(node, around)


def _events_of_devices(node: KeptMarks, around: Around) -> Iterator[Event]:
    if around.devices:
        raise CannotReplayError("devices inside of devices are not told apart")
    axis = len(around.at)  # that of the devices stands after those of the loops around it
    if node.kind == COPIES:
        first = jax.tree.map(lambda x: np.take(x, 0, axis), node.parts)
        yield from events_of(first, replace(around, copies=True))
    else:
        parts = jax.tree.map(lambda x: np.moveaxis(x, axis, 0), node.parts)
        are_devices = node.about.are_devices
        yield from events_of(parts, replace(around, devices=node.size, are_devices=are_devices))


def replay_program(closed: Any, contents: ProgramContents) -> tuple[Any, MarkedEvaluation]:
    """Return a function, compiled at its first call, that evaluates a program and returns its
    marks.
    """
    replay = MarkedEvaluation(contents)

    def run(*args: Any) -> Any:
        return replay.run(closed.jaxpr, closed.consts, args)[1]

    return UNMARKED.jit(run), replay
