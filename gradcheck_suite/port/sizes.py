"""Other sizes of the inputs: which axes vary together, and how far.

Nobody says which axes of two inputs are one dimension, such as the length of tokens and of their
mask. Axes of equal size are varied together, those behind the first one together, and each by
itself; torch refuses what does not fit. The numbers that stand in both programs (limits, tables,
windows, chunks) are the sizes at which a port most often stops being the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from jax.extend import core as jex

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.jax_program import JaxProgram
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.torch_program import TorchProgram

LARGEST = 300
"""Size up to which the numbers of a program are looked at."""
SMALL = 16
"""Number up to which its double is tried, too: of chunks there have to be two."""
FAR = 8
"""Sizes beyond the given one that are tried because of numbers in the programs."""
SMALL_INPUT = 2000
GROWTH = 32
"""Elements up to which an input may grow by such a factor; a larger one grows by 4 at most."""

Axis = tuple[int, int]
"""Place of an array among inputs and targets, and its axis."""


@dataclass(frozen=True)
class Resize:
    """New sizes of some axes.

    Attributes:
        axes: that vary together.
        size: the new one.
        given: the size of each of them at the given inputs.
    """

    axes: tuple[Axis, ...]
    size: int
    given: int

    @property
    def of_array(self) -> dict[int, list[tuple[int, int]]]:
        """The place of an array -> (axis, new size) of each of its axes that varies."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place, axis in self.axes:
            found.setdefault(place, []).append((axis, self.size))
        return found


def is_sized(value: Any) -> bool:
    """Return whether an input is an array with axes."""
    return hasattr(value, "dtype") and np.ndim(value) > 0


def groups(base: Point) -> list[tuple[Axis, ...]]:
    """Return the axes that are varied together, the most usual ones first."""
    every: dict[int, list[Axis]] = {}
    for place, value in enumerate((*base.inputs, *base.targets)):
        for axis, size in enumerate(np.shape(value) if is_sized(value) else ()):
            every.setdefault(size, []).append((place, axis))
    found: list[tuple[Axis, ...]] = []
    for axes in every.values():
        rows = tuple(a for a in axes if a[1] == 0)
        rest = tuple(a for a in axes if a[1] > 0)
        found += [rows, rest, tuple(axes)]
    found += [(axis,) for axis in chain.from_iterable(every.values())]
    # the batch first, then what has the fewest axes in front of it
    ordered = sorted((g for g in dict.fromkeys(found) if g), key=lambda g: (g[0][1], -len(g)))
    return list(dict.fromkeys(ordered))


def resizes(base: Point, axes: tuple[Axis, ...], numbers: Iterable[int]) -> Iterator[Resize]:
    """Yield new sizes of some axes, those near the given one first.

    Args:
        base: the given input.
        axes: that vary together.
        numbers: of the programs.
    """
    arrays = (*base.inputs, *base.targets)
    first = np.shape(arrays[axes[0][0]])
    given = int(first[axes[0][1]])
    near = _sizes_of_interest(
        given,
        len(first),
        numbers,
        is_batch=not any(a for _, a in axes),
    )
    whole = max(prod(np.shape(a)) for a in arrays if is_sized(a))
    largest = whole * (GROWTH if whole <= SMALL_INPUT else 4)
    least = 2 if _is_shared(arrays, axes, given) else 0
    for size in dict.fromkeys(near):
        grown = [prod(np.shape(arrays[p])) / max(given, 1) * size for p, _ in axes]
        if size >= least and size != given and max(grown) <= largest:
            yield Resize(axes, size, given)


def _is_shared(arrays: Sequence[Any], axes: tuple[Axis, ...], given: int) -> bool:
    """Return whether another array has an axis of this size: beside it one of a single element
    would be broadcast, which is another program.
    """
    own = {place for place, _ in axes}
    others = [np.shape(a) for place, a in enumerate(arrays) if is_sized(a) and place not in own]
    return any(given in shape for shape in others)


def _sizes_of_interest(
    given: int, dimensions: int, numbers: Iterable[int], *, is_batch: bool
) -> list[int]:
    """Return sizes near a given one, and those of programs that are in reach."""
    # a program has few numbers that are about the batch
    most = 2 if is_batch else FAR
    reach = 8 * given + 8 if dimensions < 4 else 4 * given
    far = [n for n in numbers if given + 1 < n <= reach and n != 2 * given][:most]
    return [given + 1, given - 1, *far[:2], 2 * given, 1, *far[2:], given + 2, 0]


_LIMITING = frozenset(
    [
        *("clamp", "clamp_min", "clamp_max", "gt", "ge", "lt", "le", "eq", "ne", "remainder"),
        *("slice", "narrow", "tril", "triu", "fmod", "min", "max", "rem", "minimum", "maximum"),
    ]
)
"""Operations of torch and primitives of JAX whose whole numbers are limits or windows."""


def numbers_in(torch_program: TorchProgram, jax_program: JaxProgram) -> list[int]:
    """Return sizes just beyond the whole numbers that stand in two programs: limits, windows and
    tables first, then those of shapes and of whatever else.

    Args:
        torch_program: of the given input.
        jax_program: likewise.
    """
    limits = set[int]()
    others = set[int]()
    for call in torch_program.calls:
        found = limits if call.name.rstrip("_") in _LIMITING else others
        found.update(_whole((call.args, call.kwargs)))
        if call.name == "embedding" and call.args[0].kind == "state":
            limits.update(torch_program.state[call.args[0].index].shape[:1])
    for value in (*torch_program.state.values(), *torch_program.given.values()):
        others.update(value.shape)
    for equation in jax_program.all_equations:
        found = limits if equation.primitive.name in _LIMITING else others
        found.update(_whole([v.val for v in equation.invars if isinstance(v, jex.Literal)]))
        found.update(_whole(list(equation.params.values())))
    for constant in jax_program.constants:
        others.update(np.shape(constant))
    return list(dict.fromkeys([*_beyond(limits), *_beyond(others)]))


def _beyond(numbers: Iterable[int]) -> list[int]:
    wanted = {n for n in numbers if 2 <= n <= LARGEST}
    beyond = {n + 1 for n in wanted} | {n + 2 for n in wanted}
    return sorted(beyond | {2 * n + 1 for n in wanted if n <= SMALL})


def _whole(value: Any) -> Iterator[int]:
    """Yield the sizes of the whole numbers in arguments, also those in lists."""
    if isinstance(value, bool | str):  # True is 1 to Python
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _whole(part)
    elif isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer()):
        yield abs(int(value))
    elif isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf":
        yield from _whole(value.item())


# What the author says.


def expect_sizes(sizes: Any) -> None:
    """Check the key `sizes` of a pair.

    Raises:
        UsageError: it is of a wrong kind.
    """
    if sizes is None or sizes == "given" or callable(sizes):
        return
    if isinstance(sizes, Mapping) and all(map(_is_axis, sizes)):
        return
    raise UsageError(
        "sizes: expected 'given', a function of the inputs, or a dict of axes of the first input,"
        f" or (input, axis), such as {{1: range(1, 65)}}, got {sizes!r}"[:300]
    )


def _is_axis(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (0, key)
    return len(parts) == 2 and all(isinstance(p, int) for p in parts)


def is_made_for(sizes: Any, base: Point, point: Point) -> bool:
    """Return whether a pair is made for the sizes of an input.

    Args:
        sizes: the key of the pair.
        base: the given input.
        point: another one.
    """
    if sizes is None:
        return True
    if isinstance(sizes, str):
        return point.shapes == base.shapes
    if callable(sizes):
        return bool(sizes(*point.inputs))
    for key, allowed in sizes.items():
        place, axis = key if isinstance(key, tuple) else (0, key)
        size = np.shape(point.inputs[place])[axis]
        if size not in ([allowed] if isinstance(allowed, int) else allowed):
            return False
    return True


# The verdict says what was varied.

_NAMES = {
    (1, True): ("length",),
    (2, True): ("batch", "length"),
    (1, False): ("batch",),
    (2, False): ("batch", "features"),
    (3, False): ("batch", "length", "features"),
    (4, False): ("batch", "channels", "height", "width"),
    (5, False): ("batch", "channels", "depth", "height", "width"),
}
"""Number of axes, and whether the numbers are whole -> what the axes usually are."""


def axis_name(value: Array, axis: int) -> str:
    """Return what an axis of an input usually is."""
    names = _NAMES.get((value.ndim, value.dtype.kind in "iub"), ())
    return names[axis] if axis < len(names) else f"axis {axis}"


def varied(points: Sequence[Point]) -> str:
    """Return in words which sizes and whole numbers some inputs had."""
    if not points:
        return ""
    spans: dict[str, list[str]] = {}
    sized = [place for place, value in enumerate(points[0].inputs) if is_sized(value)]
    for place in sized:
        first = points[0].inputs[place]
        same = [p.inputs[place] for p in points if np.ndim(p.inputs[place]) == np.ndim(first)]
        for words in _spans_of(np.asarray(first), same):
            spans.setdefault(words, []).append(str(place))
    return ", ".join(
        span if len(places) == len(sized) else f"{span} of input {' and '.join(places)}"
        for span, places in spans.items()
    )


def _spans_of(first: Array, same: Sequence[Any]) -> Iterator[str]:
    """Yield in words which sizes and whole numbers an input had."""
    for axis in range(first.ndim):
        sizes = [np.shape(a)[axis] for a in same]
        if min(sizes) != max(sizes):
            yield f"{axis_name(first, axis)} {min(sizes)} to {max(sizes)}"
    if first.dtype.kind in "iu":
        full = [a for a in same if np.size(a)]
        low = min((int(np.min(a)) for a in full), default=0)
        high = max((int(np.max(a)) for a in full), default=0)
        yield f"ids {low} to {high}"
