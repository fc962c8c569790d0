"""Communication of a loop on several ranks: how many collectives, and of how many bytes, each window takes.

A loop that adds up gradients once per window communicates as much for every number of accumulation steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.core.case import Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.ranks import is_counted
from gradcheck_suite.run.instance import Instance, leaves
from gradcheck_suite.run.ranks import run_ranks

OF_ACTIVATIONS = "all-reduce of activations"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST = "all-reduce", "all-gather", "reduce-scatter", "broadcast"
Kinds = dict[str, tuple[float, float]]
"""Name of a collective -> how often a window takes it, and the bytes that a rank gives to all of these."""
STEPS = (1, 4)
"""The numbers of accumulation steps that are compared."""
FEW, MANY = 4, 6
"""Numbers of windows: their difference leaves out what a run communicates once, which takes up to three windows."""
NAMES = {
    "allreduce_": ALL_REDUCE,
    "all_reduce": OF_ACTIVATIONS,
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "broadcast_": BROADCAST,
}
"""Operation of `c10d`, or of `_c10d_functional` as split layers use it -> the collective's name."""
ENDS = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations of `_c10d_functional` that end or wrap a collective, which was counted at its start."""
ITEMS = 2
"""Items of each micro-batch."""
WHY_IT_GROWS = {
    frozenset({ALL_GATHER}): "every micro-batch gathers the sharded parameters, and each window adds up gradients once",
    frozenset({OF_ACTIVATIONS}): "every micro-batch adds up activations over the ranks that share the model",
}
"""Collectives that a window takes more of with more micro-batches -> why, where that is the wrapper's way."""
PLAIN = ProblemSpec(Input("vector", size=4), (Layer("linear", bias=True, features=1),), Loss("mse", reduction="mean"))
"""A model of two parameters that every micro-batch reaches."""


Collectives = Counter[tuple[str, int]]
"""(operation, bytes that this rank gives to it) -> how often the rank has entered it."""


class _Counting(TorchDispatchMode):
    """Counts the operations of `c10d`, through which Python and torch's own reducers start collectives."""

    def __init__(self, found: Collectives) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if is_counted() and func.namespace in ("c10d", "_c10d_functional") and name not in ENDS:
            # these two are called with the output first
            given = args[1] if name.startswith(("_allgather_base", "_reduce_scatter_base")) else args[0]
            self._found[name, sum(t.numel() * t.element_size() for t in leaves(given))] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_collectives(wanted: bool) -> Iterator[Collectives]:
    """Count the collectives of the block where this is wanted; nothing is counted otherwise."""
    found: Collectives = Counter()
    if not wanted:
        yield found
        return
    with _Counting(found):
        yield found


@dataclass(frozen=True)
class Traffic:
    """What rank 0 communicates in each window.

    Attributes:
        accumulation_steps: K of the windows.
        kinds: name of each collective that it enters -> how often, and the bytes that it gives to all of these.
    """

    accumulation_steps: int
    kinds: Mapping[str, tuple[float, float]]

    @property
    def collectives(self) -> float:
        """Number of collectives."""
        return sum(number for number, _ in self.kinds.values())

    @property
    def bytes(self) -> float:
        """Bytes that the rank gives to them."""
        return sum(size for _, size in self.kinds.values())

    @property
    def text(self) -> str:
        """The two numbers in words."""
        return f"{self.collectives:g} collectives of {self.bytes:g} bytes"


def traffic_text(found: tuple[Traffic, ...]) -> str:
    """Return a sentence about the communication of each window, and whether it grows with the accumulation steps."""
    first, last = found[0], found[-1]
    sentence = f"each window takes {first.text} on every rank"
    grown = {kind for kind in {**first.kinds, **last.kinds} if first.kinds.get(kind) != last.kinds.get(kind)}
    if not grown:
        return f"{sentence}, whatever its number of micro-batches"
    why = WHY_IT_GROWS.get(
        frozenset(grown), "the loop communicates at every micro-batch; once per window is enough, such as under no_sync"
    )
    return (
        f"{sentence} with accumulation_steps = {first.accumulation_steps}, and {last.text} with "
        f"{last.accumulation_steps}: {why}"
    )


def traffic_per_window(
    loop: Loop, instance_of_plan: Callable[[Plan], Instance], ranks: int, time_limit_s: float | None
) -> tuple[Traffic, ...]:
    """Return the communication of a window, for each of `STEPS`; empty where the loop fails.

    Args:
        loop: the subject.
        instance_of_plan: returns what it trains under a plan.
        ranks: number of ranks.
        time_limit_s: seconds after which the loop is stopped.
    """
    found = []
    for k in STEPS:
        totals = [_totals(loop, instance_of_plan(plan_of_windows(k, n, ranks)), time_limit_s) for n in (FEW, MANY)]
        if totals[0] is None or totals[1] is None:
            return ()
        found.append(Traffic(k, _per_window(totals[0], totals[1])))
    return tuple(found)


def plan_of_windows(k: int, windows: int, ranks: int) -> Plan:
    """Return a plan of full windows of k micro-batches on each rank, `ITEMS` items each."""
    return Plan((ITEMS,) * (k * windows * ranks), k, ranks=(k * windows,) * ranks)


def _per_window(few: Kinds, many: Kinds) -> Kinds:
    """Return what each window adds, from the totals of two runs."""
    found = {}
    for kind, totals in many.items():
        number, size = ((more - less) / (MANY - FEW) for less, more in zip(few.get(kind, (0, 0)), totals, strict=True))
        if number:
            found[kind] = (number, size)
    return found


def _totals(loop: Loop, instance: Instance, time_limit_s: float | None) -> Kinds | None:
    """Return the collectives of a run by kind, of rank 0; None where a rank fails."""
    outcomes = run_ranks(loop, instance, time_limit_s=time_limit_s, count_traffic=True)
    if any(outcome.raised is not None for outcome in outcomes):
        return None
    found: dict[str, tuple[float, float]] = {}
    for (operation, size), times in sorted(outcomes[0].collectives.items()):
        kind = NAMES.get(operation, operation)
        number, total = found.get(kind, (0, 0))
        found[kind] = (number + times, total + size * times)
    return found
