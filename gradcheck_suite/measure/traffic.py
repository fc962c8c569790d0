"""Communication of a loop on several ranks: how many collectives, and of how many bytes, each window takes.

A loop that adds up gradients once per window communicates as much for every number of accumulation steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.ranks.run import run_ranks
from gradcheck_suite.schema.contract import Loop
from gradcheck_suite.schema.plan import Plan

STEPS = (1, 4)
"""The numbers of accumulation steps that are compared."""
FEW, MANY = 2, 4
"""Numbers of windows: their difference leaves out what a run or an epoch communicates once."""


@dataclass(frozen=True)
class Traffic:
    """What rank 0 communicates in each window.

    Attributes:
        accumulation_steps: K of the windows.
        collectives: number of collectives that it enters.
        bytes: bytes that it gives to them.
    """

    accumulation_steps: int
    collectives: float
    bytes: float

    @property
    def text(self) -> str:
        """The two numbers in words."""
        return f"{self.collectives:g} collectives of {self.bytes:g} bytes"


def traffic_text(found: tuple[Traffic, ...]) -> str:
    """Return a sentence about the communication of each window, and whether it grows with the accumulation steps."""
    first, last = found[0], found[-1]
    said = f"each window takes {first.text} on every rank"
    if (first.collectives, first.bytes) == (last.collectives, last.bytes):
        return f"{said}, whatever its number of micro-batches"
    return (
        f"{said} with accumulation_steps = {first.accumulation_steps}, and {last.text} with "
        f"{last.accumulation_steps}: the loop communicates at every micro-batch; once per window is enough, such as "
        "under no_sync"
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
        totals = [_totals(loop, instance_of_plan(_plan(k, n, ranks)), time_limit_s) for n in (FEW, MANY)]
        if None in totals:
            return ()
        collectives, size = ((more - less) / (MANY - FEW) for less, more in zip(*totals, strict=True))
        found.append(Traffic(k, collectives, size))
    return tuple(found)


def _plan(k: int, windows: int, ranks: int) -> Plan:
    return Plan((2,) * (k * windows * ranks), k, ranks=(k * windows,) * ranks)


def _totals(loop: Loop, instance: Instance, time_limit_s: float | None) -> Any:
    """Return the number of collectives of a run and their bytes, of rank 0; None where a rank fails."""
    outcomes = run_ranks(loop, instance, time_limit_s=time_limit_s, count_traffic=True)
    if any(outcome.raised is not None for outcome in outcomes):
        return None
    counts = outcomes[0].collectives
    return sum(counts.values()), sum(size * times for (_, size), times in counts.items())
