"""The patterns of means that are weighted by the count of another micro-batch of the window."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.patterns import SHARES, Pattern
from gradcheck_suite.diagnosis.weight_patterns.presence import more_than_two
from gradcheck_suite.diagnosis.weight_patterns.weights import Weights


def _by_count_of(w: Weights, away: int) -> bool:
    """Whether means are weighted by the counts of the micro-batches so many places away, over the window's count.

    The window's first or last micro-batch, which has none there, may have any weight.
    """
    if w.foreign or w.reduction == "sum" or len(w.inside) != len(w.window) or len(w.window) < 2:
        return False
    counts = np.roll([w.counts[j] for j in w.window], away) / w.window_count
    kept = slice(away, None) if away > 0 else slice(None, away)
    return w.close(w.per_mean[kept], counts[kept])


NEIGHBOURS = tuple(
    Pattern(
        "weighted-by-count",
        lambda w, away=away: _by_count_of(w, away),  # type: ignore[misc]
        lambda w, wrong, where=where: (  # type: ignore[misc]
            f"each micro-batch's mean is weighted by the count of the micro-batch {where} it: {SHARES}"
        ),
        informs=lambda w: more_than_two(w) and len({w.counts[j] for j in w.inside}) > 1,
    )
    for away, where in ((1, "before"), (-1, "after"))
)
"""One for the count of the micro-batch before, as of a variable that is updated late, and one for that of the next."""
