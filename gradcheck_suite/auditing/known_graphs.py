"""Which graphs need not be walked: those of a place whose last ones were alike.

To walk a graph takes longer than all else in a pass. What it would find is known where the program
makes as many nodes from pass to pass as it did when the graph was walked, where as many parameters
require a gradient, where the program has no hook on any of them, and where the gradient arrives at
the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch

from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.terms import edge_of

ALIKE = 3
"""Walks in a row that have found the same, after which a graph of this place is known."""
WALKED_EVERY = 16
"""Passes of a place after which its graph is walked all the same."""
UNKNOWN = -1


@dataclass(frozen=True)
class Made:
    """What has been made for a pass, as far as it is known without a walk.

    Attributes:
        nodes: the number that autograd gives to the node which goes backward: it counts them.
        parameters: the number of those that are known and require a gradient.
        has_hooks: whether the program has a hook on one of them.
    """

    nodes: int
    parameters: int
    has_hooks: bool

    @staticmethod
    def of(roots: Iterable[Any], parameters: Iterable[torch.Tensor | None]) -> Made:
        """Return what has been made for what goes backward now."""
        numbers = [node._sequence_nr() for node, _ in map(edge_of, roots)]
        trained = [p for p in parameters if p is not None and p.requires_grad]
        has_hooks = any(map(_has_hooks, trained))
        return Made(max(numbers, default=UNKNOWN), len(trained), has_hooks)


def _has_hooks(parameter: torch.Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or (hooks is not None and len(hooks) > 1)


@dataclass
class _Graph:
    """What the graphs that go backward at one place have below them.

    Attributes:
        keys: of the parameters that they reach.
        last: the number of the node of the last pass.
        made: nodes between the passes, and parameters, when the graph was walked last.
        alike: walks in a row that have found the same.
        since: passes since the last walk.
    """

    keys: frozenset[int] = frozenset()
    last: int = UNKNOWN
    made: tuple[int, int] = (UNKNOWN, UNKNOWN)
    alike: int = 0
    since: int = 0


class KnownGraphs:
    """Tells which graphs need not be walked.

    Attributes:
        has_passed_by: whether a graph was not walked since `begin_window`.
    """

    def __init__(self) -> None:
        self.has_passed_by = False
        self._graphs: dict[Place, _Graph] = {}

    def knows(self, place: Place, made: Made) -> bool:
        """Return whether the graph of a pass need not be walked."""
        graph = self._graphs.setdefault(place, _Graph())
        now = made.nodes - graph.last, made.parameters
        graph.last = made.nodes
        graph.since += 1
        if made.has_hooks or now != graph.made:
            graph.made = now
            graph.alike = 0
        knows = graph.alike >= ALIKE and graph.since < WALKED_EVERY
        self.has_passed_by |= knows
        return knows

    def note(self, place: Place, keys: Iterable[int], *, is_plain: bool) -> None:
        """Note what a walk has found.

        Args:
            place: of the pass.
            keys: of the parameters that its graph reaches.
            is_plain: whether there is nothing below but the parameters.
        """
        graph = self._graphs.setdefault(place, _Graph())
        found = frozenset(keys)
        graph.alike = graph.alike + 1 if is_plain and found == graph.keys else 0
        graph.keys = found
        graph.since = 0

    def arrived(self, place: Place, keys: Set[int]) -> None:
        """Note at which parameters a gradient has arrived: a graph that reaches others is walked."""
        graph = self._graphs.get(place)
        if graph is not None and keys != graph.keys:
            graph.alike = 0

    def begin_window(self) -> None:
        """Note that a window begins."""
        self.has_passed_by = False

    def forget(self) -> None:
        """Forget every graph."""
        self._graphs.clear()
        self.has_passed_by = False
