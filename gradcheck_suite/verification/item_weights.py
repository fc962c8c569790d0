"""What weight a mean gives each item's loss, read from losses alone: a mean over tokens gives long rows more.

A batch's loss that is sum(w_i l_i) / sum(w_i) has, for two items, a value between theirs that tells the quotient of
their weights; the quotients must then explain every other batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

TOLERANCE = 1e-5
"""Relative to the largest loss. A model may hold islands of float32, which round at 1e-7."""
LARGEST_COUNT = 64
"""Up to which weights are shown as whole numbers, where they are in the proportion of some."""


def weights_of_items(loss: Callable[[Sequence[int]], float], items: int) -> list[float] | None:
    """Return the weights, that of the first item 1, or None where the loss is no such mean or all weigh the same.

    Args:
        loss: of a batch of items, given by their indices.
        items: how many there are; from three on, a loss that is no such mean is told from one that is.
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
    """Return weights above 0 as `5 : 3 : 4`: in whole numbers where small ones fit."""
    for count in range(1, LARGEST_COUNT + 1):
        scaled = [count * weight / weights[0] for weight in weights]
        if all(math.isclose(x, round(x), rel_tol=1e-3 / count) for x in scaled):
            return " : ".join(str(round(x)) for x in scaled)
    return " : ".join(f"{weight / weights[0]:.3g}" for weight in weights)
