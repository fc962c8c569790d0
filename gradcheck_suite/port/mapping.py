"""Which element of torch's state each element of the JAX parameters comes from, found by value.

The author's code loads states of distinct values. An element of a leaf is then a * x[i] + b for one
element x[i] of the state, or a sum of two elements of tensors of one module; others are constant,
or of unknown origin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.pair import (
    Array,
    Draw,
    JaxModel,
    Port,
    State,
    built_again,
    call_user_code,
    distinct_values,
    drawn_state,
    is_float,
    is_statistic,
    may_be_moved,
    perturbable_names,
    perturbed,
    representable,
    shaped_as,
    state_of,
)
from gradcheck_suite.port.result import MapRow

DRAWS = 4
"""Number of states that are loaded: two fix a and b, the others confirm them."""
FITS = 2e-6
"""Relative error of a fit: parameters may be loaded in float32."""
CONSTANT = -1
UNKNOWN = -2


@dataclass
class Leaf:
    """The origin of one leaf, element by element, in C order.

    Attributes:
        path: of the leaf.
        shape: of the leaf.
        index: (n,) index into the flat state; `CONSTANT` or `UNKNOWN` for elements that have none.
        second: (n,) index of the second summand, or -1.
        factor: (n,) a.
        offset: (n,) b.
    """

    path: str
    shape: tuple[int, ...]
    index: Array
    second: Array
    factor: Array
    offset: Array

    @property
    def known(self) -> bool:
        """Whether the leaf can be computed from torch's state."""
        return bool((self.index != UNKNOWN).all())

    @property
    def is_constant(self) -> bool:
        """Whether no element comes from torch's state."""
        return bool((self.index == CONSTANT).all())

    @property
    def is_copy(self) -> bool:
        """Whether each element that comes from torch's state is a copy."""
        used = self.index >= 0
        return bool(
            (self.factor[used] == 1).all()
            and (self.offset[used] == 0).all()
            and (self.second < 0).all()
        )


class StateMap:
    """The map from torch's state to the leaves of the JAX parameters.

    Attributes:
        base: the module's state as the author gave it.
        names: of its float entries.
        offsets: name -> index of its first element in the flat state; tied names have the same.
        size: number of elements of the flat state.
        leaves: origin of each leaf; None for a leaf that is no float array.
        movable: names of what may have other values than those given; other entries may be tables
            that a port computes.
    """

    def __init__(self, pair: Port, model: JaxModel) -> None:
        self.pair = pair
        self.model = model
        self.base = state_of(pair.module)
        self.names = [n for n, v in self.base.items() if v.dtype.kind == "f" and v.size]
        self.offsets: dict[str, int] = {}
        first: dict[int, int] = {}
        size = 0
        for name in self.names:
            key = id(self.base[name])  # tied names have one array
            if key not in first:
                first[key] = size
                size += self.base[name].size
            self.offsets[name] = first[key]
        self.size = size
        self.movable = perturbable_names(pair.module)
        self._drawn_by_author = pair.load is not None or pair.rebuild is not None
        self.leaves: list[Leaf | None] = (
            self._by_values() if self._drawn_by_author else _by_given_values(self)
        )
        if pair.load is None and self._drawn_by_author:
            self._take_given_values()
        if not any(leaf is not None and not leaf.is_constant for leaf in self.leaves):
            raise UsageError(
                "no parameter in common: no element of params has a value of the module's state"
            )
        self.movable -= self._computed_tables()
        buffers = self._loaded_buffers() if pair.load is not None else set()
        self.moves_buffers = bool(buffers)
        self.movable |= buffers

    def _take_given_values(self) -> None:
        """Map by the given values where the author's function returns what was made before, or
        copies the module.
        """
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        none = not any(map(_comes_from_torch, leaves))
        if none or not all(leaf.known for leaf in leaves):
            given = _by_given_values(self)
            if sum(map(_comes_from_torch, given)) > sum(map(_comes_from_torch, self.leaves)):
                self.leaves = given
                self._drawn_by_author = False

    def _computed_tables(self) -> set[str]:
        """Return the frozen parameters that no leaf comes from: tables that the port computes, as a
        buffer may be.
        """
        used = self.used()
        own = dict(self.pair.module.named_parameters(remove_duplicate=False))
        frozen = [n for n in self.names if n in own and not own[n].requires_grad]
        return {n for n in frozen if not used[self.part(n)].any()}

    def _loaded_buffers(self) -> set[str]:
        """Return the buffers that the port loads and that may have other values.

        Those of a module are moved together or not at all: a port that loads one of two tables may
        compute the other from it.
        """
        used = self.used()
        parameters = {n for n, _ in self.pair.module.named_parameters(remove_duplicate=False)}
        modules: dict[str, list[str]] = {}
        for name in self.names:
            if name not in parameters and not is_statistic(name):
                modules.setdefault(name.rpartition(".")[0], []).append(name)
        found = set[str]()
        for names in modules.values():
            is_loaded = all((used[self.part(n)] > 0).all() for n in names)
            if is_loaded and all(may_be_moved(self.base[n]) for n in names):
                found.update(names)
        return found

    def keep_buffers(self) -> None:
        """Leave buffers at the values that the author gave: at others torch gives no numbers."""
        self.movable -= self._loaded_buffers()
        self.moves_buffers = False

    def flat(self, state: State) -> Array:
        """Return the flat state, (size,)."""
        out = np.zeros(self.size)
        for name in self.names:
            out[self.part(name)] = state[name].reshape(-1)
        return out

    def part(self, name: str) -> slice:
        """Return a tensor's elements in the flat state."""
        return slice(self.offsets[name], self.offsets[name] + self.base[name].size)

    def _drawn(self, draw: Draw, names: set[str]) -> tuple[State, list[Any] | None]:
        """Return a state and the leaves that the author's code loads from it, if it can be called
        again.
        """
        draw = representable(draw, self.model.leaves)
        if self.pair.load is not None:
            state = drawn_state(self.base, names, draw)
            return state, self._loaded(state)
        if self._drawn_by_author:
            again, state = built_again(self.pair, draw)
            return state, self.model.loaded(
                again.params if again.params is not None else again.apply
            )
        return drawn_state(self.base, names, draw), None

    def _loaded(self, state: State) -> list[Any]:
        """Return the leaves that the author's code loads from a state."""
        own = self.pair.module.state_dict()
        load = self.pair.load
        assert load is not None
        # copies: an author's `load` may write into what it is given
        given = {n: shaped_as(v, own[n]).numpy().copy() for n, v in state.items()}
        names = ", ".join(list(given)[:4]) + (", ..." if len(given) > 4 else "")
        hint = f"its state has numpy arrays by the names of state_dict(): {names}"
        return self.model.loaded(call_user_code("load", lambda: load(given), hint))

    def moved(self, seed: int, much: float = 1.0) -> tuple[State, list[Any]]:
        """Return a state away from the initial one, and the leaves of the JAX parameters in
        float64.
        """
        state, loaded = self._drawn(perturbed(np.random.default_rng(seed), much), self.movable)
        return state, self.params(state, loaded)

    def params(self, state: State, loaded: list[Any] | None = None) -> list[Any]:
        """Return the leaves of a state: by the map where it is exact, otherwise as the author's
        code loads them.
        """
        if loaded is None and self.pair.load is not None and not self.exact:
            loaded = self._loaded(state)
        vector = self.flat(state)
        found = []
        for i, (leaf, fixed) in enumerate(zip(self.leaves, self.model.leaves, strict=True)):
            given = fixed if loaded is None else loaded[i]
            if leaf is None or (loaded is not None and not (leaf.known and _is_exact(leaf))):
                found.append(jnp.asarray(given, jnp.float64) if is_float(given) else given)
            else:
                found.append(jnp.asarray(self.computed(leaf, vector)))
        return found

    def computed(self, leaf: Leaf, vector: Array) -> Array:
        """Return a leaf of a flat state."""
        value = leaf.offset.copy()
        for where in (leaf.index, leaf.second):
            used = where >= 0
            value[used] += leaf.factor[used] * vector[where[used]]
        return value.reshape(leaf.shape)

    @property
    def complete(self) -> bool:
        """Whether every leaf is known as a function of torch's state."""
        return all(leaf is None or leaf.known for leaf in self.leaves)

    @property
    def exact(self) -> bool:
        """Whether every leaf is computed exactly from torch's state."""
        return all(leaf is None or (leaf.known and _is_exact(leaf)) for leaf in self.leaves)

    def pull(self, gradients: Sequence[Any]) -> Array:
        """Return the gradient by the flat state of a function whose gradients by the leaves are
        given, (size,).
        """
        out = np.zeros(self.size)
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            if leaf is not None:
                for where in (leaf.index, leaf.second):
                    used = where >= 0
                    # not `+=`, which counts an element once that reaches several places
                    np.add.at(
                        out, where[used], (leaf.factor * np.asarray(gradient).reshape(-1))[used]
                    )
        return out

    def push(self, vector: Array) -> list[Array]:
        """Return a gradient by the flat state as gradients by the leaves.

        Elements without a source get zero.
        """
        found = []
        for leaf, fixed in zip(self.leaves, self.model.leaves, strict=True):
            if leaf is None:
                found.append(np.zeros(np.shape(fixed)) if hasattr(fixed, "shape") else fixed)
                continue
            value = np.zeros(leaf.index.shape)
            used = leaf.index >= 0
            # a leaf that is twice the tensor has half of its gradient
            value[used] = vector[leaf.index[used]] / leaf.factor[used]
            found.append(value.reshape(leaf.shape))
        return found

    def used(self) -> Array:
        """Return how many elements of the leaves each element of the state reaches, (size,)."""
        count = np.zeros(self.size, int)
        for leaf in self.leaves:
            if leaf is not None:
                for where in (leaf.index, leaf.second):
                    np.add.at(count, where[where >= 0], 1)
        if not self.complete:
            count += self._reaches_unknown()
        return count

    def _reaches_unknown(self) -> Array:
        """Return 1 for tensors that move a leaf of unknown origin, (size,)."""
        reached = np.zeros(self.size, int)
        if self.pair.load is None:
            return reached + 1
        before = [np.asarray(x, np.float64) for x in self.params(self.base) if is_float(x)]
        for name in self.names:
            part = self.base[name]
            step = {
                # other steps for neighbours, so that a difference of two elements changes as well
                n: v + 0.01 * (1 + np.arange(v.size).reshape(v.shape) % 3) if v is part else v
                for n, v in self.base.items()
            }
            after = [np.asarray(x, np.float64) for x in self.params(step) if is_float(x)]
            if any((a != b).any() for a, b in zip(after, before, strict=True)):
                reached[self.part(name)] = 1
        return reached

    def sources(self, leaf: Leaf) -> list[str]:
        """Return the names of the tensors that a leaf has elements of."""
        seen = np.unique(np.concatenate([leaf.index, leaf.second]))
        seen = seen[seen >= 0]
        starts = [(self.offsets[n], self.offsets[n] + self.base[n].size) for n in self.names]
        return [
            n
            for n, (low, high) in zip(self.names, starts, strict=True)
            if np.searchsorted(seen, low) < len(seen) and seen[np.searchsorted(seen, low)] < high
        ]

    def rows(self) -> tuple[MapRow, ...]:
        """Return the map as it is printed."""
        known = [(leaf, self.sources(leaf)) for leaf in self.leaves if leaf is not None]
        return tuple(
            MapRow(leaf.path, tuple(names), self._how(leaf, names)) for leaf, names in known
        )

    def _how(self, leaf: Leaf, names: list[str]) -> str:
        if leaf.is_constant:
            return "constant"
        if not leaf.known:
            return "unknown"
        if not leaf.is_copy:
            return "linear"
        distinct_names = list({self.offsets[n]: n for n in names}.values())
        if len(distinct_names) > 1:
            return "stacked"
        source = self.base[distinct_names[0]]
        here = leaf.index - self.offsets[distinct_names[0]]
        if len(here) != source.size:
            return "sliced"
        if np.array_equal(here, np.arange(source.size)):
            return "same" if leaf.shape == source.shape else "reshaped"
        turned = (
            np.arange(source.size).reshape(source.shape).transpose(a)
            for a in permutations(range(source.ndim))
        )
        return (
            "transposed" if any(np.array_equal(here, t.reshape(-1)) for t in turned) else "permuted"
        )

    # fitting

    def _by_values(self) -> list[Leaf | None]:
        states = []
        drawn = []
        for draw in range(DRAWS):
            state, leaves = self._drawn(
                distinct_values(np.random.default_rng(draw), draw % 2 == 1), set(self.names)
            )
            assert leaves is not None
            states.append(self.flat(state))
            drawn.append(leaves)
        x = np.stack(states)
        first, second = self._pairs()
        both = np.concatenate([x, x[:, first] + x[:, second]], axis=1)
        lookup = _Lookup(both)
        found = list[Leaf | None]()
        for i, path in enumerate(self.model.paths):
            values = [leaves[i] for leaves in drawn]
            # a leaf whose shape depends on the values is computed, not loaded
            if not is_float(values[0]) or len({np.shape(v) for v in values}) > 1:
                found.append(None)
                continue
            where, factor, offset = lookup.find(
                np.stack([np.asarray(v, np.float64).reshape(-1) for v in values])
            )
            other = np.full(where.shape, -1)
            double = where >= self.size
            other[double] = second[where[double] - self.size]
            where[double] = first[where[double] - self.size]
            found.append(
                Leaf(
                    path,
                    np.shape(values[0]),
                    where,
                    other,
                    factor,
                    offset,
                )
            )
        return found

    def _pairs(self) -> tuple[Array, Array]:
        """Return aligned elements of tensors of one shape in one module, which a port may add up."""
        groups: dict[Any, list[str]] = {}
        for name in self.names:
            if self.base[name].size <= 100_000:
                groups.setdefault((name.rpartition(".")[0], self.base[name].shape), []).append(name)
        first = [np.zeros(0, int)]
        second = [np.zeros(0, int)]
        for names in groups.values():
            # each pair is a column of every drawn state: eight tensors have 28
            for a, b in combinations(names[:8], 2):
                first.append(self.offsets[a] + np.arange(self.base[a].size))
                second.append(self.offsets[b] + np.arange(self.base[a].size))
        return np.concatenate(first), np.concatenate(second)


def _comes_from_torch(leaf: Leaf | None) -> bool:
    return leaf is None or (leaf.known and not leaf.is_constant)


def _is_exact(leaf: Leaf) -> bool:
    return bool(
        (np.abs(leaf.factor) == 1).all() and (leaf.offset == np.round(leaf.offset, 3)).all()
    )


class _Lookup:
    """Finds the element of x, (draws, n), of which elements of y, (draws, m), are linear functions."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self._weights = np.array([0.731, 0.211, 0.517, 0.341])
        keys = self._weights @ x
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        ratios = _ratio(x)
        self._by_ratio = np.argsort(ratios, kind="stable")
        self._ratios = ratios[self._by_ratio]

    def find(self, y: Array) -> tuple[Array, Array, Array]:
        """Return index, factor and offset of each element of y."""
        where = np.full(y.shape[1], UNKNOWN)
        factor = np.ones(y.shape[1])
        offset = np.zeros(y.shape[1])
        constant = np.abs(y - y[0]).max(0, initial=0.0) <= 1e-12 * np.abs(y[0])
        where[constant] = CONSTANT
        offset[constant] = y[0][constant]
        left = np.flatnonzero(~constant)
        for keys, order, wanted, linear in (
            (self._keys, self._order, self._weights @ y, False),
            (self._ratios, self._by_ratio, _ratio(y), True),
        ):
            place = np.searchsorted(keys, wanted)
            for shift in (0, -1, 1, -2, 2, -3):
                if not len(left) or not len(order):
                    break
                candidate = order[np.clip(place[left] + shift, 0, len(order) - 1)]
                good, a, b = self._fits(candidate, y[:, left], linear)
                hit = left[good]
                where[hit] = candidate[good]
                factor[hit] = a[good]
                offset[hit] = b[good]
                left = left[~good]
        return where, factor, offset

    def _fits(self, candidate: Array, v: Array, linear: bool) -> tuple[Array, Array, Array]:
        x = self._x[:, candidate]
        a = np.ones(len(candidate))
        b = np.zeros(len(candidate))
        if linear:
            with np.errstate(all="ignore"):
                a = (v[1] - v[0]) / (x[1] - x[0])
                # a factor of 0.9999999 is 1, of which rounding was in the states: a copy is to be
                # exact
                a = np.where(np.abs(a - np.round(a)) < FITS, np.round(a), a)
                b = (v - a * x).mean(0)
            b = np.where(np.abs(b - np.round(b, 3)) < FITS, np.round(b, 3), b)
        good = (np.abs(a * x + b - v) <= FITS * (np.abs(v) + np.abs(b))).all(0) & (a != 0)
        return good, a, b


def _ratio(y: Array) -> Array:
    with np.errstate(all="ignore"):
        found: Array = np.nan_to_num((y[2] - y[0]) / (y[1] - y[0]))
    return found


# Without the author's code: by the values that the two sides have now.


def _by_given_values(state_map: StateMap) -> list[Leaf | None]:
    """Return the origin of each leaf by its values.

    Shapes and names decide between tensors of equal values.
    """
    vector = state_map.flat(state_map.base)
    order = np.argsort(vector, kind="stable")
    ordered = vector[order]
    taken = set[str]()
    found = list[Leaf | None]()
    late: list[Leaf] = []
    for path, value in zip(state_map.model.paths, state_map.model.leaves, strict=True):
        if not is_float(value):
            found.append(None)
            continue
        y = np.asarray(value, np.float64).reshape(-1)
        leaf = Leaf(
            path,
            np.shape(value),
            np.full(y.shape, CONSTANT),
            np.full(y.shape, -1),
            np.ones(len(y)),
            y.copy(),
        )
        found.append(leaf)
        place = np.clip(np.searchsorted(ordered, y - FITS * np.abs(y)), 0, max(len(ordered) - 1, 0))
        hit = np.abs(ordered[place] - y) <= FITS * np.abs(y)
        # few different values, as of zeros and ones, fit any tensor of such
        if len(np.unique(y)) > max(1, len(y) // 2) and hit.all():
            leaf.index = order[place]
            leaf.offset = np.zeros(len(y))
            taken.update(state_map.sources(leaf))
        elif y.size:
            late.append(leaf)
    for leaf in late:
        if name := _nearest_name(state_map, leaf, taken, found):
            taken.add(name)
            leaf.index = state_map.offsets[name] + np.arange(len(leaf.index))
            leaf.offset = np.zeros(len(leaf.index))
    return found


def _nearest_name(
    state_map: StateMap, leaf: Leaf, taken: set[str], known: Sequence[Leaf | None]
) -> str | None:
    """Return the tensor of the same size and values whose name is nearest to a leaf's path."""
    wanted = leaf.offset
    options = [
        n
        for n in state_map.names
        if n not in taken
        and state_map.base[n].size == len(wanted)
        and np.array_equal(np.sort(state_map.base[n].reshape(-1)), np.sort(wanted))
    ]
    if not options:
        return None
    beside = leaf.path.rpartition(".")[0]
    leaves = [other for other in known if other is not None]
    near = [other for other in leaves if other.path.rpartition(".")[0] == beside]
    sources = chain.from_iterable(map(state_map.sources, near))
    modules = {source.rpartition(".")[0] for source in sources}
    words = {_ALIKE.get(w, w) for w in re.findall(r"[a-z]+|\d+", leaf.path.lower())}

    def score(name: str) -> tuple[bool, int]:
        own = {_ALIKE.get(w, w) for w in re.findall(r"[a-z]+|\d+", name.lower())}
        return name.rpartition(".")[0] in modules, len(words & own)

    return max(options, key=score)


_ALIKE = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running",
    "var": "running",
}
