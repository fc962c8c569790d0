"""Which graphs need not be walked: those of a place whose last ones were alike.

To walk a graph takes longer than all else in a pass. What it would find is known where the program
makes as many nodes from pass to pass as it did when the graph was walked, where as many parameters
require a gradient and optimizers list as many, where the program has no hook on any of them, where
the first one below is the same, and where the gradient arrives at the same ones. Another copy of a
model makes as many nodes, and is told by that first parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.terms import edge_of, is_leaf

ALIKE = 3
"""Walks in a row that have found the same, after which a graph of this place is known."""
LONGEST_WAY = 64
"""Nodes from the loss on, of which one may be the node of a parameter."""
WALKED_EVERY = 16
"""Passes of a place after which its graph is walked all the same."""
UNKNOWN = -1


@dataclass(frozen=True)
class Made:
    """What has been made for a pass, as far as it is known without a walk.

    Attributes:
        nodes: the number that autograd gives to the node which goes backward: it counts them.
        parameters: the number of those that are known and require a gradient, and of those that
            optimizers list, to which the program may have added some.
        has_hooks: whether the program has a hook on one of them.
        first: the parameter that is met first on the way down; None where that is long.
    """

    nodes: int
    parameters: int
    has_hooks: bool
    first: torch.Tensor | None = None

    @staticmethod
    def of(
        roots: Iterable[Any], parameters: Iterable[torch.Tensor | None], optimizers: Iterable[Any]
    ) -> Made:
        """Return what has been made for what goes backward now."""
        nodes = [node for node, _ in map(edge_of, roots)]
        numbers = [node._sequence_nr() for node in nodes]
        trained = [p for p in parameters if p is not None and p.requires_grad]
        has_hooks = any(map(_has_hooks, trained))
        first = _first_parameter(nodes[0]) if nodes else None
        groups = chain.from_iterable(one.param_groups for one in optimizers)
        return Made(
            max(numbers, default=UNKNOWN),
            len(trained) + sum(len(group["params"]) for group in groups),
            has_hooks,
            first,
        )


def _first_parameter(node: Any) -> torch.Tensor | None:
    """Return the parameter of the first node on the way down that has one; None on a long way."""
    for _ in range(LONGEST_WAY):
        below = [one for one, _ in node.next_functions if one is not None]
        for one in below:
            if is_leaf(one):
                found: torch.Tensor = one.variable
                return found
        if not below:
            return None
        node = below[0]
    return None


def _has_hooks(parameter: torch.Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or (hooks is not None and len(hooks) > 1)


@dataclass(frozen=True)
class Uses:
    """The nodes of a graph that use a parameter.

    Attributes:
        first: the number of the first one; autograd counts nodes as the program makes them.
        last: that of the last one.
    """

    first: int
    last: int


def uses_below(nodes: Iterable[Any]) -> dict[int, Uses]:
    """Return the id of each leaf below -> the nodes that use it."""
    stack = [node for node in nodes if node is not None]
    seen = set[Any]()
    found = dict[int, Uses]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions if one is not None]
        stack += [one for one in below if not is_leaf(one)]
        number = node._sequence_nr()
        for leaf in (id(one.variable) for one in below if is_leaf(one)):
            known = found.get(leaf, Uses(number, number))
            found[leaf] = Uses(min(known.first, number), max(known.last, number))
    return found


@dataclass
class _Graph:
    """What the graphs that go backward at one place have below them.

    Attributes:
        keys: of the parameters that they reach.
        last: the number of the node of the last pass.
        made: nodes between the passes, and parameters, when the graph was walked last.
        alike: walks in a row that have found the same.
        since: passes since the last walk.
        first: a reference to the parameter that was met first.
        uses: key of a parameter -> the nodes that used it when the graph was walked last.
    """

    keys: frozenset[int] = frozenset()
    last: int = UNKNOWN
    made: tuple[int, int] = (UNKNOWN, UNKNOWN)
    alike: int = 0
    since: int = 0
    first: weakref.ref[torch.Tensor] | None = None
    uses: Mapping[int, Uses] = field(default_factory=dict)

    def is_same_first(self, first: torch.Tensor | None) -> bool:
        """Return whether a parameter is the one that was met first in the last pass."""
        last = None if self.first is None else self.first()
        return first is last and (self.first is None or last is not None)


class KnownGraphs:
    """Tells which graphs need not be walked.

    Attributes:
        has_passed_by: whether a graph of the window that ends was not walked; several optimizers may
            step on it.
    """

    def __init__(self) -> None:
        self.has_passed_by = False
        self._has_ended = False
        self._graphs: dict[Place, _Graph] = {}

    def knows(self, place: Place, made: Made) -> bool:
        """Return whether the graph of a pass need not be walked."""
        if self._has_ended:
            self.has_passed_by = False
            self._has_ended = False
        graph = self._graphs.setdefault(place, _Graph())
        now = made.nodes - graph.last, made.parameters
        graph.last = made.nodes
        graph.since += 1
        if made.has_hooks or now != graph.made or not graph.is_same_first(made.first):
            graph.made = now
            graph.alike = 0
            graph.first = None if made.first is None else weakref.ref(made.first)
        knows = graph.alike >= ALIKE and graph.since < WALKED_EVERY
        self.has_passed_by |= knows
        return knows

    def uses_at(self, place: Place) -> Mapping[int, Uses]:
        """Return by which nodes the last graph of a place that was walked uses parameters."""
        graph = self._graphs.get(place)
        return {} if graph is None else graph.uses

    def note(
        self,
        place: Place,
        keys: Iterable[int],
        uses: Mapping[int, Uses],
        *,
        is_plain: bool,
    ) -> None:
        """Note what a walk has found.

        Args:
            place: of the pass.
            keys: of the parameters that its graph reaches.
            uses: key of a parameter -> the nodes that use it.
            is_plain: whether there is nothing below but the parameters.
        """
        graph = self._graphs.setdefault(place, _Graph())
        found = frozenset(keys)
        graph.alike = graph.alike + 1 if is_plain and found == graph.keys else 0
        graph.keys = found
        graph.uses = uses
        graph.since = 0

    def arrived(self, place: Place, keys: Set[int]) -> None:
        """Note at which parameters a gradient has arrived: a graph that reaches others is walked."""
        graph = self._graphs.get(place)
        if graph is not None and keys != graph.keys:
            graph.alike = 0

    def end_window(self) -> None:
        """Note that a window has ended: an optimizer steps on it."""
        self._has_ended = True

    def forget(self) -> None:
        """Forget every graph."""
        self._graphs.clear()
