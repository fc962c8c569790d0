"""The campaign's cases, drawn in reproducible chunks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gradcheck_suite.generation.cases import cases
from gradcheck_suite.generation.drawing import draw_cases as draw_distinct
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import ASSUMPTIONS, EQUAL_MICRO_BATCHES, SUM_REDUCTION, WHOLE_WINDOWS
from gradcheck_suite.schema.plan import Plan

DRAWN_WITHIN = ((), (), (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), (SUM_REDUCTION,))
"""Assumptions that cases are drawn within, in turn: half of the cases are drawn freely, the others so that loops with
assumptions have cases too."""


@dataclass(frozen=True)
class Drawn:
    """A case, and the assumptions that hold in it."""

    case: Case
    within: frozenset[str]


def draw_cases(dtype: str, chunk: int, count: int, seed_value: int) -> list[Drawn]:
    """Draw one chunk of the campaign's cases; the same arguments and versions give the same cases.

    Args:
        dtype: of the cases.
        chunk: which chunk.
        count: how many cases.
        seed_value: of the campaign.
    """
    groups: list[list[Drawn]] = []
    for i, within in enumerate(DRAWN_WITHIN):
        share = count // len(DRAWN_WITHIN) + (i < count % len(DRAWN_WITHIN))
        if share:
            digest = hashlib.sha256(f"{seed_value}/{dtype}/{chunk}/{i}".encode()).digest()
            drawn = cases(dtype=dtype, assumes=within)
            found = draw_distinct(drawn, examples=share, seed_value=int.from_bytes(digest[:4]))
            shorter = [case.replace(plan=_first_and_last(case.plan)) for case in found]
            groups.append([Drawn(case, _holding(case, frozenset(within))) for case in shorter])
    longest = max(map(len, groups), default=0)
    # in turn, so that a chunk that is cut short has cases of every group
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _first_and_last(plan: Plan) -> Plan:
    """Return the plan of the first and the last window only, in one epoch.

    With parameters that do not change, every epoch has the same numbers. Two windows are enough to show a stale window,
    and only the last window may be short.
    """
    windows = plan.windows
    return plan.select((*windows[0], *(windows[-1] if len(windows) > 1 else ()))).replace(epochs=1)


def _holding(case: Case, within: frozenset[str]) -> frozenset[str]:
    """Return the assumptions that hold: those the case was drawn within and those its plan and loss satisfy."""
    assert case.spec is not None
    seen = set(within)
    if case.spec.loss.reduction == "sum":
        seen.add(SUM_REDUCTION)
    if not case.plan.has_short_window:
        seen.add(WHOLE_WINDOWS)
    assert seen <= ASSUMPTIONS.keys()
    return frozenset(seen)
