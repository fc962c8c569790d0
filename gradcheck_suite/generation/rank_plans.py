"""Fixed plans dealt to several ranks, within what a loop assumes."""

from __future__ import annotations

from collections.abc import Collection

from gradcheck_suite.schema.contract import BUSY_RANKS, EQUAL_MICRO_BATCHES, EVEN_RANKS
from gradcheck_suite.schema.plan import Plan

FACTORS = (1, 3, 4, 8)
"""How many times as many items as rank 0 each rank has: together 4, 8 and 16 times as many, powers of two."""


def over_ranks(plan: Plan, ranks: int, assumes: Collection[str], *, uneven: bool = False) -> Plan:
    """Return a plan in which every rank has micro-batches like those of a plan of one rank, but of other sizes.

    Args:
        plan: of one rank, within the assumptions.
        ranks: number of ranks.
        assumes: what the loop assumes.
        uneven: whether the last rank has fewer micro-batches in the last window, or none, as the assumptions allow.
    """
    if ranks == 1:
        return plan
    count = len(plan.micro_batches)
    shares = [count] * ranks
    if uneven and EVEN_RANKS not in assumes:
        last = plan.windows[-1]
        shares[-1] -= min(len(last) - (BUSY_RANKS in assumes), count - 1)
    factors = (1,) * ranks if EQUAL_MICRO_BATCHES in assumes else FACTORS
    owners = Plan((1,) * sum(shares), plan.accumulation_steps, ranks=tuple(shares)).owners
    own = [iter([n * factor for n in plan.micro_batches]) for factor in factors]
    return plan.replace(micro_batches=tuple(next(own[rank]) for rank in owners), ranks=tuple(shares))
