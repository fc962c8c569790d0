"""Other inputs than those given: resampled ones, and ones of other sizes that Hypothesis draws and
shrinks.

A drawn input keeps the structure of the given one: padding stays on its side, one-hot rows stay
one-hot, positions stay positions, symmetric matrices stay symmetric, whole numbers stay in their
range. Beyond that nobody knows what the author's code is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, errors, find, settings
from hypothesis import strategies as st

from gradcheck_suite.core.options import PortOptions
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.torch_program import LOSS, TorchProgram, TorchRun, as_tensor

KINDS = ("given", "other", "narrow", "wide", "ends")
"""What drawn numbers are: the given ones, others like them, close together, twice as large, or at the ends of their
range."""
SHOWN = 8
SHRINKS = 60
"""Inputs that are asked about to make one smaller."""
BINDING_DRAWS = 60
"""Inputs that are drawn to find some at which a hinge of the loss binds."""


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
        falls = bool((rows[:, :1] >= rows).all())
        low, high = int(rows.sum(1).min()), int(rows.sum(1).max())
        # no row is masked as a whole, or not at all, where none of the given ones is
        counts = rng.integers(min(low, 1), max(high, n - 1) + 1, (len(rows), 1))
        new = np.arange(n) < counts if falls else np.arange(n) >= n - counts
        return new.astype(value.dtype).reshape(value.shape)
    return rng.permutation(value.reshape(-1)).reshape(value.shape)


def resampled(value: Any, rng: np.random.Generator, kind: str = "other") -> Any:
    """Return another array of the same shape and of the same structure.

    Args:
        value: an array; anything else stays as it is.
        rng: of the draw.
        kind: of `KINDS`.
    """
    if not hasattr(value, "dtype") or kind == "given" or not np.asarray(value).size:
        return value
    old = np.asarray(value)
    if old.dtype.kind not in "biuf" or (old.dtype.kind == "f" and not np.isfinite(old).all()):
        return old
    if _is_symmetric(old) and np.isin(old, (0, 1)).all():
        order = rng.permutation(old.shape[-1])  # an adjacency matrix of the same graph
        return old[..., order, :][..., order]
    if old.dtype.kind == "b" or (np.isin(old, (0, 1)).all() and old.dtype.kind == "f"):
        return _mask(old, rng)
    whole = old.dtype.kind in "iu" or bool((old == np.round(old)).all() and old.size > 1)
    if whole:
        return _whole_numbers(old, rng, kind)
    return _real_numbers(old, rng, kind)


def _whole_numbers(old: Array, rng: np.random.Generator, kind: str) -> Array:
    rows = old.reshape(-1, old.shape[-1]) if old.ndim else old.reshape(1, 1)
    rises = rows.shape[1] > 1 and bool((np.diff(rows, axis=1) > 0).all())
    if (rises and rows.shape[1] > 2) or (old.ndim == 2 and np.isin(old, (0, 1)).all()):
        return old if rises else _mask(old, rng)
    low, high = old.min(), old.max()
    if low < 0:
        return rng.choice(old.reshape(-1), old.shape)
    kept = old != low
    is_padded = old.ndim > 1 and bool(kept.any()) and _is_one_sided(kept.reshape(rows.shape))
    least = (
        int(low) + is_padded
    )  # ids that are padded with the smallest one stay so, at the same end
    new = (
        rng.choice([least, int(high)], old.shape)
        if kind == "ends"
        else rng.integers(least, int(high) + 1, old.shape)
    )
    return (np.where(_mask(kept, rng), new, low) if is_padded else new).astype(old.dtype)


def _real_numbers(old: Array, rng: np.random.Generator, kind: str) -> Array:
    low, high, spread = float(old.min()), float(old.max()), float(old.std())
    factor = {"narrow": 0.05, "wide": 2.0}.get(kind, 1.0)
    if low >= 0:
        new = rng.uniform(low, low + factor * max(high - low, 1e-3 * max(high, 1e-3)), old.shape)
        new = np.minimum(new, high)
    else:
        new = old.mean() + factor * (spread or 1.0) * rng.normal(size=old.shape)
    rows = old.sum(-1) if old.ndim else old
    if low >= 0 and old.ndim and old.shape[-1] > 1 and np.allclose(rows, 1, atol=1e-5):
        new = new / new.sum(-1, keepdims=True)
    if old.ndim and old.shape[-1] > 2 and (np.diff(old, axis=-1) > 0).all():
        new = np.sort(new, -1)
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
        new = new / np.maximum(np.linalg.norm(new, axis=-1, keepdims=True), 1e-12)
    return np.asarray(new, old.dtype)


def _resized(value: Any, axis_of: Callable[[Array], list[tuple[int, int]]]) -> Any:
    if not hasattr(value, "dtype") or not np.ndim(value):
        return value
    old = np.asarray(value)
    for axis, size in axis_of(old):
        # a mask grows at its end, so that padding stays on its side
        place = np.arange(size)
        place = (
            np.minimum(place, old.shape[axis] - 1)
            if np.isin(old, (0, 1)).all()
            else place % old.shape[axis]
        )
        old = np.take(old, place, axis)
        if (
            np.asarray(value).dtype.kind in "iu"
            and (np.diff(np.asarray(value), axis=axis) == 1).all()
            and size > 1
        ):
            start = np.take(old, [0], axis)
            shape = [-1 if i == axis else 1 for i in range(old.ndim)]
            old = start + np.arange(size, dtype=old.dtype).reshape(
                shape
            )  # positions stay positions
    return old


def drawn_point(base: Point, rows: int, length: int, kind: str, number: int) -> Point:
    """Return another input; the smaller the numbers, the smaller it is.

    Args:
        base: the given one.
        rows: number of rows, or 0 for the given number.
        length: change of the second axis.
        kind: of `KINDS`.
        number: seed of the draw.
    """
    arrays = [
        np.asarray(x) for x in (*base.inputs, *base.targets) if hasattr(x, "dtype") and np.ndim(x)
    ]
    sizes = [a.shape[0] for a in arrays]
    given_rows = max(set(sizes), key=sizes.count) if sizes else 0
    lengths = [
        a.shape[1] for a in arrays if (a.dtype.kind in "iub" and a.ndim == 2) or (a.ndim == 3)
    ]
    given_length = max(set(lengths), key=lengths.count) if lengths else 0

    def axes(a: Array) -> list[tuple[int, int]]:
        found = [(0, rows)] if rows and a.shape[0] == given_rows else []
        if length and given_length:
            found += [
                (i, max(given_length + length, 1))
                for i in range(1, a.ndim)
                if a.shape[i] == given_length
            ]
        return found

    rng = np.random.default_rng(number)
    inputs = tuple(resampled(_resized(x, axes), rng, kind) for x in base.inputs)
    targets = tuple(
        resampled(_resized(x, axes), rng, "given" if kind == "given" else "other")
        for x in base.targets
    )
    return Point(inputs, targets)


def one_sided(program: TorchProgram, runs: Sequence[TorchRun]) -> list[int]:
    """Return the hinges of a loss, `max(x, 0)`, that are above zero at no element of any run, or at
    all of them.
    """
    found = []
    for index, call in enumerate(program.calls):
        is_limit = call.name in ("clamp", "clamp_min") and call.args[1:] == (0,)
        if index in program.needed and call.path == LOSS and (is_limit or call.name == "relu"):
            above = torch.cat([run.get(call.refs[0]).reshape(-1) > 0 for run in runs])
            if bool(above.all()) or not bool(above.any()):
                found.append(index)
    return found


def binding_points(
    base: Point, program: TorchProgram, others: Sequence[Point], seed: int
) -> list[Point]:
    """Return inputs that drive the hinges of a loss to the side on which none of the given inputs
    has them.
    """

    def run(point: Point) -> TorchRun:
        given = {("input", i): as_tensor(x) for i, x in enumerate(point.inputs)}
        given |= {("target", i): as_tensor(x) for i, x in enumerate(point.targets)}
        leaves = program.leaves()
        return program.run({}, leaves | {k: v for k, v in given.items() if k in leaves})

    runs, found, rng = [run(p) for p in (base, *others)], list[Point](), np.random.default_rng(seed)
    left = one_sided(program, runs)
    for number in range(BINDING_DRAWS if left else 0):
        point = _scaled(base, rng, number)
        runs.append(run(point))
        if len(still := one_sided(program, runs)) < len(left):
            found.append(point)
            left = still
        else:
            runs.pop()
        if not left:
            break
    return found


def _scaled(base: Point, rng: np.random.Generator, number: int) -> Point:
    """Return other inputs: those of one shape exchanged, and real numbers of another size and sign."""
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(base.inputs):
        kinds.setdefault((np.shape(x), str(getattr(x, "dtype", type(x)))), []).append(i)
    inputs = list(base.inputs)
    for places in kinds.values():
        for i, k in zip(places, rng.permutation(places), strict=True):
            inputs[i] = base.inputs[k]
    size = (1.0, -1.0, 0.1, 10.0, -10.0, 0.01)[number % 6]
    for i, x in enumerate(inputs):
        new = resampled(x, rng)
        is_real = (
            hasattr(x, "dtype") and np.asarray(x).dtype.kind == "f" and np.any(x != np.round(x))
        )
        inputs[i] = (size * new).astype(new.dtype) if is_real and np.any(np.asarray(x) < 0) else new
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


def smallest_difference(
    base: Point, differs: Callable[[Point], bool], draw: Any, options: PortOptions, budget: Budget
) -> Point | None:
    """Return the smallest input that Hypothesis finds on which the two sides differ, or None.

    Args:
        base: the given input.
        differs: the question; it decides which inputs cannot be asked about.
        draw: the author's strategy, or `draw(seed) -> inputs`, or None.
        options: number of inputs, and seed of the search.
        budget: of the judgement.
    """
    budget, last = budget.of(options.examples + SHRINKS), list[Point]()

    def asked(point: Point) -> bool:
        if not budget.spend() or not differs(point):
            return False
        last[:] = [point]
        return True

    rows = np.shape(base.inputs[0])[0] if base.inputs and np.ndim(base.inputs[0]) else 0
    points: Any = st.builds(
        drawn_point,
        st.just(base),
        rows=st.sampled_from([0, 1, rows + 1] if rows else [0]),
        length=st.sampled_from([0, -1, 2]),
        kind=st.sampled_from(KINDS),
        number=st.integers(0, 999),
    )
    if isinstance(draw, st.SearchStrategy):
        points = draw.map(lambda inputs: _split(base, inputs))
    elif draw is not None:
        points = st.integers(0, 10_000).map(lambda n: _split(base, draw(n)))
    phases = (Phase.generate, Phase.shrink)
    how = settings(max_examples=options.examples, database=None, deadline=None, phases=phases)
    # flaky where the budget was spent while Hypothesis shrank
    with suppress(errors.NoSuchExample, errors.Flaky):
        find(points, asked, settings=how, random=Random(options.seed))
    return Point(last[0].inputs, last[0].targets, described(last[0])) if last else None


def _split(base: Point, drawn: Any) -> Point:
    """Return a point of drawn inputs, which may have the targets behind them."""
    values: Sequence[Any] = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
    n = len(base.inputs)
    if len(values) == n + len(base.targets):
        return Point(tuple(values[:n]), tuple(values[n:]))
    return Point(tuple(values), base.targets)
