"""Reads the weights of items in a weighted mean from losses alone; in a mean over tokens, long rows weigh more.

If a batch's loss is sum(w_i l_i) / sum(w_i), the loss of two items lies between their own losses and determines the
quotient of their weights. The quotients must then explain the losses of all other batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

TOLERANCE = 1e-5
"""Tolerance relative to the largest loss. A model may have float32 parts, which round at 1e-7."""
LARGEST_COUNT = 64
"""Largest whole number in a proportion of weights that is printed in whole numbers."""


def weights_of_items(loss: Callable[[Sequence[int]], float], items: int) -> list[float] | None:
    """Return the weights relative to the first item's, or None if the loss is no weighted mean or all are equal.

    Args:
        loss: indices of items -> the loss of their batch.
        items: number of items; at least three are needed to recognise a loss that is no weighted mean.
    """
    alone = [loss([i]) for i in range(items)]
    scale = max(map(abs, alone))
    weights = [1.0]
    for j in range(1, items):
        together = loss([0, j])
        if abs(together - alone[j]) <= TOLERANCE * scale:
            return None
        weights.append((alone[0] - together) / (together - alone[j]))
    if min(weights) <= 0 or max(weights) - min(weights) <= TOLERANCE:
        return None
    for batch in [*itertools.combinations(range(items), 2), tuple(range(items))]:
        expected = sum(weights[i] * alone[i] for i in batch) / sum(weights[i] for i in batch)
        if not abs(loss(batch) - expected) <= TOLERANCE * scale:
            return None
    return weights


def proportion(weights: Sequence[float]) -> str:
    """Return positive weights as `5 : 3 : 4`, in whole numbers if small ones fit."""
    for count in range(1, LARGEST_COUNT + 1):
        scaled = [count * weight / weights[0] for weight in weights]
        if all(math.isclose(x, round(x), rel_tol=1e-3 / count) for x in scaled):
            return " : ".join(str(round(x)) for x in scaled)
    return " : ".join(f"{weight / weights[0]:.3g}" for weight in weights)
