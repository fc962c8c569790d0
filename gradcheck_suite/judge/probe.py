"""Weight probes: the weights they show, probes that tell causes apart, and the pattern of the
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, cycle, islice

import numpy as np
import torch

from gradcheck_suite.core.case import (
    PARAMETER,
    Case,
    Plan,
    Reduction,
    probe_case,
    slopes_of,
    slopes_text,
    unit_of,
)
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    ONE_EPOCH,
    WHOLE_WINDOWS,
    dealt_to_ranks,
)
from gradcheck_suite.core.results import Weight
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.judge.weights import Weights, first_of
from gradcheck_suite.run.instance import Instance, Items, generated_instance, recounted, scaled_loss
from gradcheck_suite.run.runner import Outcome

Count = Callable[[list[int]], float]
"""What the mean over some items, given by their indices, divides by."""
# the probe's gradients are single weights in float64: a few operations round each, and none adds up
EXACT = 1e-13
COARSE = 1e-5
"""Relative tolerances of weights that are read off in float64 and in coarser dtypes."""
MOST_ROWS = 12
"""Micro-batches that a table has a row each for; where there are more, a row stands for a run of equal ones."""


@dataclass(frozen=True)
class WeightProbe:
    """A probe: how its items are cut up and what its mean divides by.

    Attributes:
        plan: the plan of the run.
        reduction: the reduction of the probe's loss.
        count: what the mean over some items divides by, if not their number.
        dtype: the parameter's dtype.
    """

    plan: Plan
    reduction: Reduction
    count: Count | None = None
    dtype: str = "float64"

    @property
    def tolerance(self) -> float:
        """The relative error of its weights that rounding explains."""
        return EXACT if self.dtype == "float64" else COARSE

    @property
    def counts(self) -> tuple[float, ...]:
        """What the mean over each micro-batch divides by."""
        if self.count is None:
            return self.plan.micro_batches
        return tuple(self.count(list(items)) for items in self.plan.cuts)

    def right_weights(self, window: int) -> Vector:
        """Return (total items,): the weight of each item in a window's gradient, 0 in those without
        valid targets.
        """
        right = np.zeros(self.plan.total_items)
        counts = self.counts
        members = self.plan.windows[window]
        share = 1.0 if self.reduction == "sum" else 1.0 / sum(counts[j] for j in members)
        for j in members:
            right[self.plan.items(j).start : self.plan.items(j).stop] = share if counts[j] else 0.0
        return right

    def instance(self, *, scale: float = 1.0, slopes: Sequence[float] = ()) -> Instance:
        """Return the probe, ready to run."""
        case = probe_case(
            self.plan,
            self.reduction,
            dtype=self.dtype,
            slopes=slopes_text(slopes),
        )
        instance = generated_instance(case)
        if self.count is not None:
            instance = recounted(instance, self.count)
        return scaled_loss(instance, scale)

    def run(
        self, runner: LoopRunner, *, scale: float = 1.0, slopes: Sequence[float] = ()
    ) -> Outcome | None:
        """Run the loop on the probe; None where it raised or no run is left.

        Args:
            runner: runs the loop again.
            scale: the factor that the probe's loss is multiplied by.
            slopes: the derivative of each item's loss, 1 each if empty.
        """
        outcome = runner.run(self.instance(scale=scale, slopes=slopes))
        # what a loop did before it raised says nothing about a loop that does not
        return None if outcome is None or outcome.raised is not None else outcome

    def observed(self, runner: LoopRunner, *, scale: float = 1.0) -> ProbeRun | None:
        """Run the loop on the probe and return the weights it gave the items; None as for `run`."""
        outcome = self.run(runner, scale=scale)
        steps = [] if outcome is None else [seen / scale for seen in gradients_of_steps(outcome)]
        return None if outcome is None else ProbeRun(self, steps, runner.alike)


@dataclass(frozen=True)
class ProbeRun:
    """A run of a loop on a weight probe.

    Attributes:
        probe: the probe.
        steps: for each step the weight of each item, (total items,).
        alike: whether all of several ranks have these weights.
    """

    probe: WeightProbe
    steps: Sequence[Vector]
    alike: bool

    def weights(self, step: int) -> Weights | None:
        """Return the weights of the micro-batches in a step; None where they differ within one."""
        probe = self.probe
        plan = self.probe.plan
        items = self.steps[step]
        observed = items[list(plan.starts)]
        # infinity less infinity is NaN, which numpy warns of, and which the comparison below
        # refuses
        with np.errstate(invalid="ignore"):
            spread = abs(items - observed.repeat(plan.micro_batches)).max(initial=0.0)
        if spread > probe.tolerance * abs(items).max(initial=0.0):
            return None
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
            alike=self.alike,
        )

    def unequal_text(self, step: int) -> str:
        """Say what the items of a micro-batch weigh that do not weigh the same, of the step's
        window if it has one.
        """
        probe = self.probe
        items = self.steps[step]
        window = step % len(self.probe.plan.windows)
        order = (*probe.plan.windows[window], *range(len(probe.plan.micro_batches)))
        parts = ((j, items[list(probe.plan.items(j))]) for j in order)
        j, own = next(
            (j, own) for j, own in parts if np.ptp(own) > probe.tolerance * abs(items).max()
        )
        weights = first_of([f"{weight:.6g}" for weight in own], 4)
        due = probe.right_weights(window)
        return (
            "items of one and the same micro-batch have different weights: those of micro-batch"
            f" {j} weigh {weights}, expected {due[probe.plan.items(j).start]:.6g} each"
        )

    @cached_property
    def all_weights(self) -> list[Weights]:
        """The weights of every step.

        None where the number of steps is wrong, or items of one micro-batch differ.
        """
        # with a step too many or too few, it is not known which window each step belongs to
        if len(self.steps) != self.probe.plan.steps:
            return []
        read = [w for w in map(self.weights, range(len(self.steps))) if w is not None]
        return read if len(read) == len(self.steps) else []

    def others(self, step: int) -> list[Weights]:
        """Return the weights of the other steps, where they are finite."""
        return [
            w for i, w in enumerate(self.all_weights) if i != step and np.isfinite(w.observed).all()
        ]


def gradients_of_steps(outcome: Outcome) -> list[Vector]:
    """Return the gradient of each step that a loop took on a probe, (total items,) float64, zeros
    where it is None.
    """
    empty = torch.zeros_like(outcome.start[PARAMETER])
    return [flat_on_probe(observation.gradients, empty) for observation in outcome.observations]


def flat_on_probe(gradients: Mapping[str, torch.Tensor | None], empty: torch.Tensor) -> Vector:
    """Return the gradient of a probe's parameter, (total items,) float64.

    `empty` where it is None.
    """
    found = gradients[PARAMETER]
    # numpy has no bfloat16
    seen: Vector = (empty if found is None else found).to("cpu", torch.float64).numpy()
    return seen


def probe_of(case: Case, dtype: str = "float64") -> WeightProbe:
    """Return the probe that a case is, with all slopes 1."""
    assert case.spec is not None
    unit = unit_of(case)
    count = None if unit == 1 else lambda items: unit * len(items)
    return WeightProbe(
        case.plan,
        case.spec.loss.reduction,
        count,
        dtype,
    )


def expected_gradients(case: Case) -> list[Vector]:
    """Return the gradient of each window of a probe: the weight of each item times the slope of its
    loss.
    """
    probe = probe_of(case)
    slopes = np.array(slopes_of(case))
    rights = (probe.right_weights(window) for window in range(len(case.plan.windows)))
    return [
        # 0 times an infinite slope is NaN: items outside of the window have no part in it
        np.multiply(right, slopes, out=np.zeros_like(right), where=right != 0)
        for right in rights
    ]


def probes_of(instance: Instance) -> Iterator[WeightProbe]:
    """Yield the probes that show what a loop does to the weights of an instance's items, the most
    telling last.

    The first counts what the case counts, but items in micro-batches without valid targets, whose
    weights could not be read otherwise. Where there are such, another counts none there; where
    every item counts the same, another counts items.
    """
    plan = instance.case.plan
    items = Items(instance.data)
    reduction: Reduction = "sum" if instance.problem.reduction == "sum" else "mean"

    def count(indices: list[int]) -> float:
        return float(instance.count(items.__getitems__(indices)))

    counts = [count(list(cut)) for cut in plan.cuts]
    without = [plan.items(j) for j, counted in enumerate(counts) if not counted]
    empty = set(chain.from_iterable(without))
    shares = {counted / n for counted, n in zip(counts, plan.micro_batches, strict=True) if counted}
    alike = reduction == "sum" or len(shares) == 1
    if not alike:
        yield WeightProbe(
            plan, reduction, lambda indices: count(indices) + len(empty.intersection(indices))
        )
    elif reduction == "mean" and shares != {1.0} and not empty:
        yield WeightProbe(plan, reduction, count)
    if alike:
        yield WeightProbe(plan, reduction)
    if reduction == "mean" and empty:
        yield WeightProbe(plan, reduction, count)


def item_weights(probe: WeightProbe, observed: Vector, window: int) -> tuple[Weight, ...]:
    """Return the right and the observed weights of a step.

    Args:
        probe: the probe on which the weights were read.
        observed: the weight of each micro-batch's items.
        window: the index of the window in its epoch.

    Returns:
        A row for each micro-batch. Of a long plan one row for each run of equal ones, and none for
        what is rightly 0.
    """
    expected = probe.right_weights(window)[list(probe.plan.starts)]
    ranks = [rank if probe.plan.ranks else None for rank in probe.plan.owners]
    rows = [
        Weight(
            micro_batches=str(j), count=float(n), expected=float(e), observed=float(o), rank=rank
        )
        for j, (n, e, o, rank) in enumerate(
            zip(probe.counts, expected, observed, ranks, strict=True)
        )
    ]
    runs: list[range] = []
    is_long = len(rows) > MOST_ROWS
    for j, row in enumerate(rows):
        if is_long and row.expected == row.observed == 0:
            continue
        if (
            is_long
            and runs
            and runs[-1].stop == j
            and _digits(rows[runs[-1].start]) == _digits(row)
        ):
            runs[-1] = range(runs[-1].start, j + 1)
        else:
            runs.append(range(j, j + 1))
    return tuple(replace(rows[run.start], micro_batches=ranges_text(list(run))) for run in runs)


def _digits(row: Weight) -> list[str]:
    """Return a row with the digits that are shown: equal weights may differ by rounding in further
    ones.
    """
    numbers = row.count, row.expected, row.observed, row.rank
    return [f"{number:.6g}" for number in numbers if number is not None]


def ranges_text(numbers: Sequence[int]) -> str:
    """Return increasing numbers with runs of them written as `0-15`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def held_by(plan: Plan, items: Vector) -> list[int]:
    """Return the micro-batches of which some item has a weight other than 0."""
    held: list[int] = np.flatnonzero(np.logical_or.reduceat(items != 0, list(plan.starts))).tolist()
    return held


UNEQUAL = ((2, 3, 5), (3, 3, 2), (3,), (5, 2))
EQUAL = ((2,), (1,), (4,), (3,))
"""Sizes of the micro-batches of three windows and a short one, repeated as often as a window is long. Quotients of
unequal ones are no whole numbers: otherwise a coefficient that is kept from another window looks like a repetition."""


def separating_probe(probe: WeightProbe, assumes: Collection[str]) -> WeightProbe:
    """Return the probe that separates what looks alike on another one.

    Its windows have three or more micro-batches of other K, with different, with partly equal and
    with equal sizes, no two windows count the same, the last window is short, and there are two
    epochs: all within what the loop assumes.

    Args:
        probe: the other one.
        assumes: what the loop assumes.
    """
    # another K than the loop's plan has, so that a K written into the loop shows; at least 3, since
    # of two micro-batches the first is all but the last
    k = max(3, probe.plan.accumulation_steps + 1)
    lengths = [k, k, k] if WHOLE_WINDOWS in assumes else [k, k, k, k - 1]
    equal = EQUAL_MICRO_BATCHES in assumes or EQUAL_BATCHES in assumes
    shapes: tuple[tuple[int, ...], ...] = EQUAL if equal else UNEQUAL
    if EQUAL_BATCHES in assumes:
        shapes = ((2,),) * len(lengths)
    pairs = zip(shapes, lengths, strict=False)
    sizes = chain.from_iterable(islice(cycle(shape), length) for shape, length in pairs)
    # only a second epoch shows what a first one leaves behind
    plan = Plan(tuple(sizes), k, 1 if ONE_EPOCH in assumes else max(2, probe.plan.epochs))
    plan = dealt_to_ranks(plan, probe.plan.world_size, assumes)
    if probe.count is None or equal:
        return WeightProbe(plan, probe.reduction, dtype=probe.dtype)
    empty = set[int]()
    if 0 in probe.counts:
        # the second micro-batch of each window: neither the first nor the last, which loops treat
        # apart
        empty.update(chain.from_iterable(plan.items(window[1]) for window in plan.windows))
    # three binary digits: exact in every dtype, and no whole number
    unit = 1.0 if all(float(n).is_integer() for n in probe.counts) else 0.375

    def count(items: list[int]) -> float:
        # items count 1, 2 or 3, so that a count is no number of items
        return unit * sum(1 + i % 3 for i in items if i not in empty)

    return WeightProbe(
        plan,
        probe.reduction,
        count,
        probe.dtype,
    )
