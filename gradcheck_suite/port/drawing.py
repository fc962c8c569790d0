"""Other inputs than those given: resampled ones, and ones of other sizes that Hypothesis draws and
shrinks.

A drawn input keeps the structure of the given one: padding stays on its side, one-hot rows stay
one-hot, positions stay positions, symmetric matrices stay symmetric, whole numbers stay in their
range. Beyond that nobody knows what the author's code is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, errors, find, settings
from hypothesis import strategies as st

from gradcheck_suite.port.changes import RAISED
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.sizes import Resize, is_sized
from gradcheck_suite.port.torch_program import (
    LOSS,
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    as_tensor,
)

KINDS = ("given", "other", "narrow", "wide", "ends")
"""What drawn numbers are: the given ones, others like them, close together, twice as large, or at the ends of their
range."""
SHOWN = 8
BINDING_DRAWS = 60
"""Inputs that are drawn to find some at which a limit of the torch program binds."""


@dataclass(frozen=True)
class Span:
    """The whole numbers that an input may have, as the torch program indexes a table by them.

    Attributes:
        low: the first.
        high: the last.
        is_marked: whether the program compares the input with the first one, as with a padding
            token: it then stands at the end of rows alone.
    """

    low: int
    high: int
    is_marked: bool = False


Spans = Mapping[int, Span]
"""Place of an array among inputs and targets -> its span."""


def _is_symmetric(value: Array) -> bool:
    square = value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1
    return bool(square and np.array_equal(value, value.swapaxes(-1, -2)))


def _is_one_sided(rows: Array) -> bool:
    """Return whether all rows of a mask are padded at their ends, or all at their starts."""
    steps = np.diff(rows.astype(int), axis=1)
    return bool((steps <= 0).all() or (steps >= 0).all())


def _mask(value: Array, rng: np.random.Generator) -> Array:
    """Return another mask: of rows that are padded on one side, on that side, with at least one
    element as before.
    """
    flat = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
    rows = flat.astype(np.float64)
    n = rows.shape[1]
    if n > 1 and (rows.sum(1) == 1).all() and value.dtype.kind != "b":
        return np.stack([rng.permutation(row) for row in flat]).reshape(value.shape)  # one-hot
    if value.ndim >= 2 and n > 1 and _is_one_sided(rows):
        # padded at the end, a row begins with what is kept
        falls = bool((rows[:, :1] >= rows).all())
        low = int(rows.sum(1).min())
        high = int(rows.sum(1).max())
        # no row is masked as a whole, or not at all, where none of the given ones is
        counts = rng.integers(min(low, 1), max(high, n - 1) + 1, (len(rows), 1))
        new = np.arange(n) < counts if falls else np.arange(n) >= n - counts
        return new.astype(value.dtype).reshape(value.shape)
    return rng.permutation(value.reshape(-1)).reshape(value.shape)


def resampled(
    value: Any, rng: np.random.Generator, kind: str = "other", span: Span | None = None
) -> Any:
    """Return another array of the same shape and of the same structure.

    Args:
        value: an array; anything else stays as it is.
        rng: of the draw.
        kind: of `KINDS`.
        span: of whole numbers; None for that of the array itself.
    """
    if not hasattr(value, "dtype") or kind == "given" or not np.asarray(value).size:
        return value
    old = np.asarray(value)
    kind_of = old.dtype.kind
    # an additive mask of minus infinity has its structure in its numbers
    if kind_of not in "biuf" or (kind_of == "f" and not np.isfinite(old).all()):
        return old
    is_binary = bool(np.isin(old, (0, 1)).all())
    if is_binary and _is_symmetric(old):
        order = rng.permutation(old.shape[-1])  # an adjacency matrix of the same graph
        return old[..., order, :][..., order]
    if span is not None and kind_of in "iu":
        return _ids(old, rng, kind, span)
    if is_binary and kind_of in "bf":
        return _mask(old, rng)
    return _whole_numbers(old, rng, kind) if _is_whole(old) else _real_numbers(old, rng, kind)


def _is_whole(value: Array) -> bool:
    """Return whether numbers are whole, of whatever dtype; a single float says nothing."""
    if value.dtype.kind in "iu":
        return True
    return bool(value.size > 1 and (value == np.round(value)).all())


def _whole_numbers(old: Array, rng: np.random.Generator, kind: str) -> Array:
    rows = old.reshape(-1, old.shape[-1]) if old.ndim else old.reshape(1, 1)
    rises = rows.shape[1] > 1 and bool((np.diff(rows, axis=1) > 0).all())
    # rising whole numbers are offsets or positions, which other numbers would take apart
    if (rises and rows.shape[1] > 2) or (old.ndim == 2 and np.isin(old, (0, 1)).all()):
        return old if rises else _mask(old, rng)
    low = old.min()
    high = old.max()
    # a negative label marks what a loss ignores: no other number below 0 is a label
    if low < 0:
        return rng.choice(old.reshape(-1), old.shape)
    kept = old != low
    is_padded = old.ndim > 1 and bool(kept.any()) and _is_one_sided(kept.reshape(rows.shape))
    # ids that are padded with the smallest one stay so, at the same end
    least = int(low) + is_padded
    new = (
        rng.choice([least, int(high)], old.shape)
        if kind == "ends"
        else rng.integers(least, int(high) + 1, old.shape)
    )
    if _is_sorted(rows):
        new.sort(-1)
    return (np.where(_mask(kept, rng), new, low) if is_padded else new).astype(old.dtype)


def _is_sorted(rows: Array) -> bool:
    """Return whether rows rise, as the segments do that a port may count on to be sorted."""
    return rows.shape[1] > 2 and bool((np.diff(rows, axis=1) >= 0).all()) and np.ptp(rows) > 0


def _ids(old: Array, rng: np.random.Generator, kind: str, span: Span) -> Array:
    """Return ids over the whole of a table. Rows that are padded at one end stay so."""
    rows = old.reshape(-1, old.shape[-1]) if old.ndim else old.reshape(1, 1)
    kept = old != old.min()
    is_padded = old.ndim > 1 and bool(kept.any()) and _is_one_sided(kept.reshape(rows.shape))
    # positions stay positions: whoever counts them has no gaps
    if rows.shape[1] > 2 and bool((np.diff(rows, axis=1) == 1).all()):
        return old
    # the mark of padding stands where rows are padded, and nowhere else
    low = int(old.min()) + 1 if is_padded else span.low + span.is_marked
    low = min(low, span.high)
    ends = rng.choice([low, span.high], old.shape)
    new = ends if kind == "ends" else rng.integers(low, span.high + 1, old.shape)
    if _is_sorted(rows):
        new.sort(-1)
    if is_padded:
        new = np.where(_mask(kept, rng), new, old.min())
    # the given rows are not padded, and torch asks for the mark: some draws pad them
    elif span.is_marked and kind == "narrow" and rows.shape[1] > 1:
        lengths = rng.integers(1, rows.shape[1] + 1, (len(rows), 1))
        seen = (np.arange(rows.shape[1]) < lengths).reshape(old.shape)
        new = np.where(seen, new, span.low)
    return new.astype(old.dtype)


def _real_numbers(old: Array, rng: np.random.Generator, kind: str) -> Array:
    low = float(old.min())
    high = float(old.max())
    spread = float(old.std()) or 1.0
    factor = {"narrow": 0.05, "wide": 2.0}.get(kind, 1.0)
    # numbers that are never negative may be under a root or in a logarithm
    if low >= 0:
        # a constant array has no width of its own
        width = max(high - low, 1e-3 * max(high, 1e-3))
        new = np.minimum(rng.uniform(low, low + factor * width, old.shape), high)
    else:
        new = old.mean() + factor * spread * rng.normal(size=old.shape)
    # rows that add up to 1 are probabilities, as a divergence counts on
    rows = old.sum(-1) if old.ndim else old
    if low >= 0 and old.ndim and old.shape[-1] > 1 and np.allclose(rows, 1, atol=1e-5):
        new = new / new.sum(-1, keepdims=True)
    # rising numbers are times, or the edges of bins that `searchsorted` counts on
    if old.ndim and old.shape[-1] > 2 and (np.diff(old, axis=-1) > 0).all():
        new = np.sort(new, -1)
    # distances or a kernel: the diagonal is that of each element with itself
    if _is_symmetric(old):
        new = (new + new.swapaxes(-1, -2)) / 2
        new[..., np.arange(old.shape[-1]), np.arange(old.shape[-1])] = np.diagonal(
            old, axis1=-2, axis2=-1
        )
    elif (
        old.ndim
        and old.shape[-1] > 1
        and np.allclose(np.linalg.norm(old.astype(float), axis=-1), 1, atol=1e-5)
    ):
        # rows of length 1 are directions
        new = new / np.maximum(np.linalg.norm(new, axis=-1, keepdims=True), 1e-12)
    return np.asarray(new, old.dtype)


def _resized(value: Any, axes: Sequence[tuple[int, int]]) -> Any:
    """Return an array with other sizes of some axes, given as (axis, size)."""
    if not is_sized(value):
        return value
    old = np.asarray(value)
    for axis, size in axes:
        # there is nothing to repeat
        if not old.shape[axis]:
            return old
        # a mask grows at its end, so that padding stays on its side
        place = np.arange(size)
        place = (
            np.minimum(place, old.shape[axis] - 1)
            if np.isin(old, (0, 1)).all()
            else place % old.shape[axis]
        )
        steps = np.diff(old, axis=axis)
        counts = old.dtype.kind in "iu" and bool((steps == 1).all()) and size > 1
        old = np.take(old, place, axis)
        if counts:
            start = np.take(old, [0], axis)
            shape = [-1 if i == axis else 1 for i in range(old.ndim)]
            # positions stay positions
            old = start + np.arange(size, dtype=old.dtype).reshape(shape)
    return old


def drawn_point(
    base: Point, resizes: Sequence[Resize], kind: str, number: int, spans: Spans | None = None
) -> Point:
    """Return another input.

    Args:
        base: the given one.
        resizes: other sizes, one after the other.
        kind: of `KINDS`.
        number: seed of the draw.
        spans: of whole numbers.
    """
    rng = np.random.default_rng(number)
    spans = spans or {}
    arrays = [*base.inputs, *base.targets]
    for resize in resizes:
        for place, axes in resize.of_array.items():
            arrays[place] = _resized(arrays[place], axes)
    count = len(base.inputs)
    inputs = [resampled(x, rng, kind, spans.get(i)) for i, x in enumerate(arrays[:count])]
    # a loss has a domain of its own: targets are not made larger with the inputs
    of_target = "given" if kind == "given" else "other"
    targets = [
        resampled(x, rng, of_target, spans.get(count + i)) for i, x in enumerate(arrays[count:])
    ]
    return Point(tuple(inputs), tuple(targets))


# What the torch program indexes by an input.

_MOVES = frozenset(
    [
        *("view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute"),
        *("transpose", "t", "slice", "select", "flatten", "clone", "alias", "detach"),
        *("_to_copy", "contiguous", "unbind", "split", "chunk"),
    ]
)
_INDEXING = {
    "embedding": ("indices", "weight"),
    "index_select": ("index", "self"),
    "gather": ("index", "self"),
    "take_along_dim": ("indices", "self"),
    "nll_loss_forward": ("target", "self"),
    "nll_loss2d_forward": ("target", "self"),
}
"""Operations that index a table: the arguments that are the index and the table."""


def spans_of(program: TorchProgram, base: Point) -> dict[int, Span]:
    """Return which whole numbers each input may have: those of the tables that torch indexes by it.

    Args:
        program: of torch at the given input.
        base: the given input.
    """
    run = program.run({}, program.leaves())
    found = dict[int, Span]()
    for place, value in enumerate((*base.inputs, *base.targets)):
        if not is_sized(value) or np.asarray(value).dtype.kind not in "iu" or not np.size(value):
            continue
        count = len(base.inputs)
        own = Ref("input", place) if place < count else Ref("target", place - count)
        uses = _uses_of(program, run, own)
        low = int(np.min(value))
        high = int(np.max(value))
        # what indexes several tables must fit the smallest of them
        if uses.rows and low >= 0 and high < min(uses.rows):
            # a token that the given rows do not have, and that torch asks for, is a padding
            found[place] = Span(0, min(uses.rows) - 1, low > 0 and 0 in uses.compared)
    return found


@dataclass
class _Uses:
    """What a program does with whole numbers: the sizes of tables that it indexes by them, and the
    numbers that it compares them with.
    """

    rows: list[int] = field(default_factory=list)
    compared: set[int] = field(default_factory=set)


def _uses_of(program: TorchProgram, run: TorchRun, own: Ref) -> _Uses:
    known = {own}
    found = _Uses()
    for index, call in enumerate(program.calls):
        if known.isdisjoint(call.refs):
            continue
        if call.name in _MOVES:
            known |= {Ref(index, j) for j in range(len(run.values[index]))}
        found.rows += _rows_of_table(call, known, run)
        if call.name in ("eq", "ne", "gt", "lt", "ge", "le"):
            found.compared.update(n for n in call.args[1:2] if isinstance(n, int))
    return found


def _rows_of_table(call: OperationCall, known: set[Ref], run: TorchRun) -> Iterator[int]:
    """Yield the number of rows of a table that a call indexes by a known tensor."""
    given = dict(zip(call.names, call.args, strict=False)) | call.kwargs
    if call.name == "index":
        table = run.get(given["self"])
        for axis, index in enumerate(given["indices"]):
            if isinstance(index, Ref) and index in known:
                yield table.shape[axis]
    elif call.name in _INDEXING:
        index, name = _INDEXING[call.name]
        table = run.get(given[name])
        is_loss = call.name.startswith("nll_loss")
        # the classes are axis 1 of a batch, and the only axis of a single item
        axis = given.get("dim", min(1, table.dim() - 1) if is_loss else 0)
        if given.get(index) in known:
            yield table.shape[axis]


# Limits that bind.

_LIMITS = {
    "clamp": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "hardtanh": ("min_val", "max_val"),
    "gt": ("other",),
    "ge": ("other",),
    "lt": ("other",),
    "le": ("other",),
}
"""Operations with a limit, and the arguments that are it."""
_FIXED = {"hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, 3.0), "relu6": (0.0, 6.0)}
_OF_LOSSES = {"smooth_l1_loss": "beta", "huber_loss": "delta"}


def limited(call: OperationCall, run: TorchRun) -> tuple[Any, list[float]]:
    """Return the numbers that a call limits, and its limits."""
    name = call.name.rstrip("_")
    given = {a.name: a.default_value for a in call.op._schema.arguments}
    given |= dict(zip(call.names, call.args, strict=False)) | call.kwargs
    if name in _OF_LOSSES:
        pair = [run.get(given[n]) for n in ("self", "target")]
        return (pair[0] - pair[1]).abs(), [float(given[_OF_LOSSES[name]])]
    # in a loss it is a hinge of few numbers; in a model it has numbers on both sides by itself
    if name == "relu" and call.path == LOSS:
        return run.get(call.refs[0]), [0.0]
    limits = [given.get(argument) for argument in _LIMITS.get(name, ())]
    numbers = [float(n) for n in limits if isinstance(n, int | float) and np.isfinite(n)]
    numbers += _FIXED.get(name, ())
    return (run.get(call.refs[0]) if numbers and call.refs else None), numbers


def one_sided(program: TorchProgram, runs: Sequence[TorchRun]) -> list[tuple[int, float]]:
    """Return the limits that bind at no element of any run, or at all of them.

    These are of hinges, `max(x, 0)`, and other limits of real numbers: each as the index of a call
    and a number.
    """
    found = []
    for index in sorted(program.needed):
        call = program.calls[index]
        first, limits = limited(call, runs[0])
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            continue
        values = torch.cat([limited(call, run)[0].reshape(-1) for run in runs])
        for limit in limits:
            above = values > limit
            if bool(above.all()) or not bool(above.any()):
                found.append((index, limit))
    return found


def binding_points(
    base: Point, program: TorchProgram, others: Sequence[Point], seed: int
) -> list[Point]:
    """Return inputs that drive the limits of the program to the side on which none of the given
    inputs has them.
    """

    def run(point: Point) -> TorchRun | None:
        given = {("input", i): as_tensor(x) for i, x in enumerate(point.inputs)}
        given |= {("target", i): as_tensor(x) for i, x in enumerate(point.targets)}
        leaves = program.leaves()
        try:
            found = program.run({}, leaves | {k: v for k, v in given.items() if k in leaves})
        except RAISED:  # the inputs are out of torch's domain
            return None
        numbers = [o for o in found.outs if o.is_floating_point()]
        return None if any(bool(torch.isnan(o).any()) for o in numbers) else found

    alike = [p for p in (base, *others) if p.shapes == base.shapes]
    runs = [r for r in map(run, alike) if r is not None]
    found = list[Point]()
    rng = np.random.default_rng(seed)
    left = one_sided(program, runs) if runs else []
    for number in range(BINDING_DRAWS if left else 0):
        point = _scaled(base, rng, number)
        if (ran := run(point)) is None:
            continue
        still = one_sided(program, [*runs, ran])
        if len(still) < len(left):
            found.append(point)
            runs.append(ran)
            left = still
        if not left:
            break
    return found


SCALES = (1.0, -1.0, 3.0, -3.0, 0.1, 10.0, -10.0, 0.01, 30.0, -30.0)
"""Factors of real numbers: a limit is reached by the smallest of them that reaches it."""


def _scaled(base: Point, rng: np.random.Generator, number: int) -> Point:
    """Return other inputs: those of one shape exchanged, and real numbers of another size and sign."""
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(base.inputs):
        kinds.setdefault((np.shape(x), str(getattr(x, "dtype", type(x)))), []).append(i)
    inputs = list(base.inputs)
    for places in kinds.values():
        for i, k in zip(places, rng.permutation(places), strict=True):
            inputs[i] = base.inputs[k]
    size = SCALES[number % len(SCALES)]
    for i, x in enumerate(inputs):
        new = resampled(x, rng)
        is_real = (
            hasattr(x, "dtype") and np.asarray(x).dtype.kind == "f" and np.any(x != np.round(x))
        )
        if is_real and np.any(np.asarray(x) < 0):
            new = (size * new).astype(new.dtype)
        elif is_real and np.asarray(x).max() > 1:  # numbers between 0 and 1 may be probabilities
            new = (abs(size) * new).astype(new.dtype)
        inputs[i] = new
    return Point(tuple(inputs), tuple(resampled(x, rng) for x in base.targets))


def described(point: Point) -> tuple[str, ...]:
    """Return inputs in words, one line each."""
    lines = []
    for name, values in (("input", point.inputs), ("target", point.targets)):
        for i, value in enumerate(values):
            shape = getattr(value, "shape", None)
            if shape is None:
                lines.append(f"{name} {i}: {value!r}"[:120])
                continue
            flat = np.asarray(value).reshape(-1)
            shown = ", ".join(
                f"{x:.6g}" if flat.dtype.kind == "f" else str(x) for x in flat[:SHOWN]
            )
            more = ", ..." if flat.size > SHOWN else ""
            lines.append(f"{name} {i}: {flat.dtype} {tuple(shape)}: {shown}{more}")
    return tuple(lines)


# What the author draws.


def author_strategy(base: Point, draw: Any) -> Any:
    """Return a strategy of points of what an author draws.

    Args:
        base: the given input.
        draw: a strategy of inputs, or `draw(seed) -> inputs`.
    """
    if isinstance(draw, st.SearchStrategy):
        return draw.map(lambda inputs: _split(base, inputs))
    return st.integers(0, 10_000).map(lambda n: _split(base, draw(n)))


def author_points(base: Point, draw: Any, count: int, seed: int) -> list[Point]:
    """Return some inputs that an author draws, of the shapes of the given one."""
    found = list[Point]()

    def enough(point: Point) -> bool:
        if point.shapes == base.shapes:
            found.append(point)
        return len(found) >= count

    how = settings(
        max_examples=10 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
    )
    # `enough` counts, so that it says otherwise of an input that Hypothesis asks about again
    with suppress(errors.NoSuchExample, errors.Flaky):
        find(
            author_strategy(base, draw),
            enough,
            settings=how,
            random=Random(seed),
        )
    return found[:count]


def _split(base: Point, drawn: Any) -> Point:
    """Return a point of drawn inputs, which may have the targets behind them."""
    values: Sequence[Any] = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
    n = len(base.inputs)
    if len(values) == n + len(base.targets):
        return Point(tuple(values[:n]), tuple(values[n:]))
    return Point(tuple(values), base.targets)
