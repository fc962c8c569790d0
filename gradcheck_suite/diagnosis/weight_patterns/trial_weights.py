"""The weights that known faults without a free number give, to be tried on a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.weights import Array, Weights


def trial_weights(w: Weights) -> Iterator[Array]:
    """Yield (B,) weights of micro-batches that a known fault gives in a step, `w` being of that step."""
    right = {i: _of_window(w, i) for i in range(len(w.windows))}
    index = w.index or 0
    own = right[index]
    for i, other in right.items():
        if i != index:
            yield other
    # left over from the step before, from all before, or from the next
    steps = [right[i] for _ in range(w.epoch) for i in right] + [right[i] for i in range(index)]
    if steps:
        yield own + steps[-1]
        yield own + np.sum(steps, axis=0)
    yield own + right[(index + 1) % len(right)]
    k, size = w.accumulation_steps, len(w.window)
    for factor in {float(n) for n in (k, size, w.window_count, w.world_size)} - {1.0}:
        yield own * factor
        yield own / factor
    yield -own
    counts = np.array([n or 1.0 for n in w.counts])
    means = np.where(own != 0, 1 / counts, 0.0)
    for base in (own, *(share * means for share in {1.0, 1 / k, 1 / size})):
        if base is not own:
            yield base
        for j in w.inside if size > 1 else ():
            alone = np.zeros_like(base)
            alone[j] = base[j]
            yield alone
            yield base - alone
    for rank in set(w.owners):
        yield np.where(np.array(w.owners) == rank, own, 0.0)
    if w.owners and w.reduction == "mean":
        of_ranks = np.array([w.count_of_rank(rank) or 1.0 for rank in w.owners])
        yield np.where(own != 0, 1 / of_ranks, 0.0)
        yield np.where(own != 0, 1 / of_ranks, 0.0) / w.world_size
    for j in w.inside if size > 1 else ():
        alone = np.zeros_like(own)
        alone[j] = own[j]
        yield own + alone
        yield size * alone


def _of_window(w: Weights, window: int) -> Array:
    members = [j for j in w.windows[window] if w.counts[j]]
    values = np.zeros(len(w.counts))
    values[members] = 1.0 if w.reduction == "sum" else 1.0 / w.count_of(members)
    return values
