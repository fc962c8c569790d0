"""Communication of a run: how many collectives, of which kind and of how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.execution.batches import leaves
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.loops.ranks.counting import is_counted

Traffic = Counter[tuple[str, int]]
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations of `_c10d_functional` that end or wrap a collective, which was counted at its start."""


@dataclass
class TrafficCount:
    """The collectives that one rank has entered.

    Attributes:
        collectives: (name of the collective, bytes that this rank gives) -> how often.
    """

    collectives: Traffic = field(default_factory=Counter)

    def noted(self, outcome: Outcome) -> Outcome:
        """Return an outcome with these collectives."""
        return replace(outcome, collectives=dict(self.collectives))


class _Counting(TorchDispatchMode):
    """Counts the operations of `c10d`, through which Python and torch's own reducers start collectives."""

    def __init__(self, count: TrafficCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted() and func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.rpartition("::")[2]
            if name in NO_COLLECTIVES:
                return func(*args, **(kwargs or {}))
            given = args[1] if name.startswith(("_allgather_base", "_reduce_scatter_base")) else args[0]
            size = sum(t.numel() * t.element_size() for t in leaves(given))
            self._count.collectives[name, size] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_traffic(wanted: bool) -> Iterator[TrafficCount]:
    """Count the collectives of the block where this is wanted; nothing is counted otherwise."""
    count = TrafficCount()
    if not wanted:
        yield count
        return
    with _Counting(count):
        yield count
