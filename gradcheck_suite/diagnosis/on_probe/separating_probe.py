"""A second weight probe on which faults that look alike under a small plan differ.

Its windows have three or more micro-batches of other K, with different, with partly equal and with equal sizes, no two
windows count the same, the last window is short, and there are two epochs: all within what the loop assumes.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle, islice

import numpy as np

from gradcheck_suite.diagnosis.on_probe.probe_weights import WeightProbe
from gradcheck_suite.diagnosis.weight_patterns.weights import Weights
from gradcheck_suite.generation.rank_plans import over_ranks
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.contract import EQUAL_BATCHES, EQUAL_MICRO_BATCHES, ONE_EPOCH, WHOLE_WINDOWS
from gradcheck_suite.schema.plan import Plan

UNEQUAL = ((1, 2, 4), (2, 2, 1), (3,), (4, 2))
EQUAL = ((2,), (1,), (4,), (3,))
"""Sizes of the micro-batches of three windows and a short one, repeated as often as a window is long."""


def separating_probe(probe: WeightProbe, assumes: Collection[str]) -> WeightProbe:
    """Return the probe that separates what looks alike on another one.

    Args:
        probe: the other one.
        assumes: what the loop assumes.
    """
    k = max(3, probe.plan.accumulation_steps + 1)
    lengths = [k, k, k] if WHOLE_WINDOWS in assumes else [k, k, k, k - 1]
    equal = EQUAL_MICRO_BATCHES in assumes or EQUAL_BATCHES in assumes
    shapes = UNEQUAL if not equal else EQUAL if EQUAL_BATCHES not in assumes else ((2,),) * len(lengths)
    sizes = [n for shape, length in zip(shapes, lengths, strict=False) for n in islice(cycle(shape), length)]
    plan = Plan(tuple(sizes), k, 1 if ONE_EPOCH in assumes else max(2, probe.plan.epochs))
    plan = over_ranks(plan, probe.plan.world_size, assumes)
    if probe.count is None or equal:
        return WeightProbe(plan, probe.reduction, dtype=probe.dtype)
    empty = {i for window in plan.windows for i in plan.items(window[1])} if 0 in probe.counts else set()
    unit = 1.0 if all(float(n).is_integer() for n in probe.counts) else 0.375

    def count(items: list[int]) -> float:
        return unit * sum(1 + i % 3 for i in items if i not in empty)

    return WeightProbe(plan, probe.reduction, count, probe.dtype)


def readings(probe: WeightProbe, steps: list[Vector], *, alike: bool) -> list[Weights] | None:
    """Return the weights of every step of a run on a probe.

    Args:
        probe: the probe.
        steps: for each step the weight of each item, (total items,).
        alike: whether all of several ranks have these weights.

    Returns:
        None where the number of steps is wrong, or items of one micro-batch differ.
    """
    plan = probe.plan
    observed = [per_micro_batch(probe, items) for items in steps]
    if len(steps) != plan.steps or any(values is None for values in observed):
        return None
    return [reading(probe, step, values, alike=alike) for step, values in enumerate(observed) if values is not None]


def reading(probe: WeightProbe, step: int, observed: Vector, *, alike: bool) -> Weights:
    """Return the weights of one step, given those of micro-batches, and whether all of several ranks have them."""
    plan = probe.plan
    epoch, window = divmod(step, len(plan.windows))
    return Weights(
        observed=observed,
        counts=probe.counts,
        window=plan.windows[window],
        accumulation_steps=plan.accumulation_steps,
        epoch=epoch,
        reduction=probe.reduction,
        items=plan.micro_batches,
        windows=plan.windows,
        tolerance=probe.tolerance,
        owners=plan.owners if plan.ranks else (),
        alike=alike,
    )


def per_micro_batch(probe: WeightProbe, items: Vector) -> Vector | None:
    """Return the weight of each micro-batch's items, or None where they differ within one."""
    first = items[list(probe.plan.starts)]
    with np.errstate(invalid="ignore"):
        spread = abs(items - first.repeat(probe.plan.micro_batches)).max(initial=0.0)
    return None if spread > probe.tolerance * abs(items).max(initial=0.0) else first
