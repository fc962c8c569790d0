"""The table of expected and observed weights on a console, with bars."""

from __future__ import annotations

import math
from collections.abc import Iterable

HEADER = "weight of each item, by micro-batch (index, {rank}count, expected, observed; # observed, | expected):"
WIDTH = 24
"""Characters of the longest bar."""
Row = tuple[str | int, int | None, float, float, float]
"""Index of the micro-batch, its rank where there are several, count, expected and observed weight of each item."""


def weight_lines(rows: Iterable[Row], most: int | None = None) -> list[str]:
    """Return the lines of a table of weights; none where there are none.

    Args:
        rows: of the micro-batches of a window.
        most: rows that are shown at most.
    """
    rows = list(rows)
    if not rows:
        return []
    top = max((abs(w) for *_, e, o in rows for w in (e, o) if math.isfinite(w)), default=0.0)
    shown = rows[:most]
    ranks = any(rank is not None for _, rank, *_ in rows)
    places = [f"{j:>3} {rank:>4}" if ranks else f"{j:>3}" for j, rank, *_ in shown]
    lines = [
        f"  {place} {n:>8.6g} {e:>12.6g} {o:>12.6g}  {_bar(e, o, top)}".rstrip()
        for place, (*_, n, e, o) in zip(places, shown, strict=True)
    ]
    more = [f"  and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [HEADER.format(rank="rank, " if ranks else ""), *lines, *more]


def _bar(expected: float, observed: float, top: float) -> str:
    """Return a bar as long as the observed weight, of `-` where it is negative, with a mark at the expected one."""
    if not top or not math.isfinite(expected) or not math.isfinite(observed):
        return ""
    bar = ("#" if observed > 0 else "-") * _length(observed, top)
    mark = _length(expected, top)
    return f"{bar[:mark]:<{mark}}|{bar[mark:]}"


def _length(weight: float, top: float) -> int:
    # rounding must not decide between two lengths
    return math.floor(round(WIDTH * abs(weight) / top, 6) + 0.5)
