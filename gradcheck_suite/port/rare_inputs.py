"""Inputs at which something happens in the torch program that no usual input does: elements that
are sorted are equal, a row is padding from its start, a limit binds.

Only outputs are compared there. At ties and at limits a function has several gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from gradcheck_suite.port.changes import RAISED, CallArguments, Hypothesis
from gradcheck_suite.port.drawing import limited, resampled
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.sizes import is_sized
from gradcheck_suite.port.torch_program import (
    Change,
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    as_tensor,
)

ORDERING = ("topk", "sort", "kthvalue", "msort")
"""Operations that put elements in order."""
DRAWS = 24
"""Inputs with equal elements of which some may tie where torch sorts."""
MOST = 6
"""Rare inputs that both sides are asked about: each event is one."""
Event = tuple[int, str]
"""Index of a call, and what happens there."""


def rare_points(program: TorchProgram, base: Point, usual: list[Point]) -> Iterator[Point]:
    """Yield inputs at which something happens that does not at the usual ones.

    Args:
        program: of torch at the given input.
        base: the given input.
        usual: inputs that are compared anyway.
    """
    events = _watched(program)
    if not events:
        return
    seen = set[Event]()
    for point in (base, *(p for p in usual if p.shapes == base.shapes)):
        seen |= _events(program, events, point)
    yield from islice(_new(program, events, base, seen), MOST)


def _new(
    program: TorchProgram, watched: list[int], base: Point, seen: set[Event]
) -> Iterator[Point]:
    for point in (*_with_whole_rows(program, base), *_with_ties(program, base)):
        found = _events(program, watched, point)
        if not found <= seen:
            seen |= found
            yield point


def _watched(program: TorchProgram) -> list[int]:
    """Return the calls that sort, or that limit what depends on an input."""
    inputs = {ref for ref in program.readers if ref.kind == "input"}
    depends = set(inputs)
    found = []
    for index, call in enumerate(program.calls):
        if depends.isdisjoint(call.refs):
            continue
        depends |= {Ref(index, j) for j in range(len(call.op._schema.returns))}
        limits = call.name.rstrip("_").startswith("clamp")
        if index in program.needed and (limits or call.name in ORDERING):
            found.append(index)
    return found


def _events(program: TorchProgram, watched: list[int], point: Point) -> set[Event]:
    """Return what happens at some calls; nothing where torch refuses the input."""
    given = {("input", i): as_tensor(x) for i, x in enumerate(point.inputs)}
    leaves = program.leaves()
    try:
        run = program.run({}, leaves | {k: v for k, v in given.items() if k in leaves})
    except RAISED:
        return set()
    found = set[Event]()
    for index in watched:
        call = program.calls[index]
        if call.name in ORDERING:
            found |= {(index, words) for words in _ties(call, run)}
            continue
        value, limits = limited(call, run)
        for limit in limits:
            # both sides of a limit are events: what is never reached would hide a limit that is
            # another number
            if bool((value < limit).any()):
                found.add((index, f"below {limit}"))
            if bool((value > limit).any()):
                found.add((index, f"above {limit}"))
    return found


def _ties(call: OperationCall, run: TorchRun) -> Iterator[str]:
    """Yield which elements that a call puts in order are equal, in words."""
    named = dict(zip(call.names, call.args, strict=False)) | call.kwargs
    dim = named.get("dim", -1)
    falls = bool(named.get("largest", named.get("descending", False)))
    ordered = run.get(call.refs[0]).sort(dim, descending=falls or call.name == "topk").values
    equal = ordered.diff(dim=dim) == 0
    if bool(equal.any()):
        yield "ties"
    last = named.get("k", 0) - 1
    if 0 <= last < equal.shape[dim] and bool(equal.select(dim, last).any()):
        yield "ties of what is taken and what is not"


# Rows of one number, as of padding alone.


def _with_whole_rows(program: TorchProgram, base: Point) -> Iterator[Point]:
    """Yield inputs whose first row is padding, or masked, from its start."""
    together = list(base.inputs)
    for place, value in enumerate(base.inputs):
        if not is_sized(value) or np.ndim(value) < 2:
            continue
        for fill in _fills(program, place, np.asarray(value)):
            alone = list(base.inputs)
            alone[place] = together[place] = _with_first_row(np.asarray(value), fill)
            yield Point(tuple(alone), base.targets)
    if sum(new is not old for new, old in zip(together, base.inputs, strict=True)) > 1:
        yield Point(tuple(together), base.targets)


def _fills(program: TorchProgram, place: int, value: Any) -> list[int]:
    """Return the numbers that say of an element whether it counts: of a mask both, of ids those
    that torch compares them with.
    """
    if np.isin(value, (0, 1)).all():
        return [0, 1]
    if value.dtype.kind not in "iu":
        return []
    readers = program.readers.get(Ref("input", place), [])
    compared = [program.calls[i] for i in readers if program.calls[i].name in ("eq", "ne", "gt")]
    numbers = [c.args[1] for c in compared if isinstance(c.args[1], int)]
    # a negative number is no id that an embedding takes
    return [n for n in dict.fromkeys(numbers) if n >= 0]


def _with_first_row(value: Any, fill: int) -> Any:
    new = value.copy()
    new[0] = fill
    return new


# Equal elements.


def _with_ties(program: TorchProgram, base: Point) -> Iterator[Point]:
    """Yield inputs with equal elements along an axis, where the program sorts."""
    if not any(c.name in ORDERING for c in program.calls):
        return
    axes = max((np.ndim(x) for x in base.inputs if is_sized(x)), default=0)
    # the last axis first: it is the one that most programs sort along
    for number in range(DRAWS):
        rng = np.random.default_rng(number)
        axis = axes - 1 - number % max(axes, 1)
        width = 2 if number < DRAWS // 2 else 1000  # pairs, or all of them
        inputs = [_tied(resampled(x, rng), axis, width) for x in base.inputs]
        yield Point(tuple(inputs), base.targets)


def _tied(value: Any, axis: int, width: int) -> Any:
    """Return an array whose elements along an axis are equal in groups; a mask stays as it is."""
    if not is_sized(value) or np.ndim(value) <= axis or np.isin(value, (0, 1)).all():
        return value
    places = np.arange(np.shape(value)[axis])
    return np.take(value, places // width * width, axis)


# torch promises no order of equal elements, unless it sorts stably.


def other_orders(program: TorchProgram, run: TorchRun) -> Iterator[Hypothesis]:
    """Yield the other orders in which torch may return equal elements, each of all calls.

    Args:
        program: of torch at an input.
        run: there.
    """
    calls = program.calls
    free = [
        i
        for i in sorted(program.needed)
        if calls[i].name in ("topk", "sort")
        and not _is_stable(calls[i])
        and any(_ties(calls[i], run))
    ]
    if free:
        for order in (ordered(first=True), ordered(first=True, signed=True), ordered(first=False)):
            yield Hypothesis("", "", dict.fromkeys(free, order))


def _is_stable(call: OperationCall) -> bool:
    named = dict(zip(call.names, call.args, strict=False)) | call.kwargs
    return bool(named.get("stable"))


def ordered(*, first: bool, signed: bool = False) -> Change:
    """Return the change of a sort in which the first of equal elements comes first, or last.

    Args:
        first: whether it is the first.
        signed: whether -0 is less than 0, as `jax.lax.top_k` has it and torch has not.
    """

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        given = CallArguments(call, args, kwargs)
        value = given.self
        dim = given.dim
        falls = given.largest if call.name == "topk" else given.descending
        turned = value if first else value.flip(dim)
        if signed and value.is_floating_point():
            least = torch.full_like(turned, torch.finfo(value.dtype).smallest_normal)
            # zeros become the smallest numbers of their sign, which torch does put in order
            turned = torch.where(turned == 0, torch.copysign(least, turned), turned)
        index = torch.sort(turned, dim=dim, descending=bool(falls), stable=True).indices
        # the sort was of the flipped elements: places are counted from the other end
        if not first:
            index = value.shape[dim] - 1 - index
        count = given.k if call.name == "topk" else value.shape[dim]
        places = index.narrow(dim, 0, count)
        return [value.gather(dim, places), places]

    return change
