"""The weight read-out probe under a case's plan: the weight that a loop gives each item, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from gradcheck_suite.diagnosis.loop_runner import LoopRunner
from gradcheck_suite.execution.batches import Items
from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.contract import Batch, Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Reduction
from gradcheck_suite.schema.weight_probe import probe_case

Count = Callable[[list[int]], float]
"""What the mean over some items, given by their indices, divides by."""


@dataclass(frozen=True)
class WeightProbe:
    """A probe: how its items are cut up and what its mean divides by.

    Attributes:
        plan: of the run.
        reduction: of the probe's loss.
        count: what the mean over some items divides by, if not their number.
    """

    plan: Plan
    reduction: Reduction
    count: Count | None = None

    @property
    def counts(self) -> tuple[float, ...]:
        """What the mean over each micro-batch divides by."""
        if self.count is None:
            return self.plan.micro_batches
        return tuple(self.count(list(self.plan.items(j))) for j in range(len(self.plan.micro_batches)))

    def right_weights(self, window: int) -> Vector:
        """Return (total items,): the weight of each item in a window's gradient, 0 in those without valid targets."""
        right, counts, members = np.zeros(self.plan.total_items), self.counts, self.plan.windows[window]
        share = 1.0 if self.reduction == "sum" else 1.0 / sum(counts[j] for j in members)
        for j in members:
            right[self.plan.items(j).start : self.plan.items(j).stop] = share if counts[j] else 0.0
        return right

    def observed_weights(self, runner: LoopRunner, *, scale: float = 1.0) -> list[Vector] | None:
        """Run the loop on the probe and return the weights it gave the items.

        Args:
            runner: of the loop.
            scale: the factor that the probe's loss is multiplied by, and the weights divided.

        Returns:
            For each step the weight of each item, (total items,); None where the loop raised or no run is left.
        """
        instance = generated_instance(probe_case(self.plan, self.reduction))
        problem = instance.problem if self.count is None else _counted(instance.problem, self.count)
        scaled = replace(problem, loss=lambda model, batch: scale * problem.loss(model, batch))
        outcome = runner.run(replace(instance, problem=scaled))
        if outcome is None or outcome.raised is not None:
            return None
        none = np.zeros(self.plan.total_items)
        seen = [observation.gradients["0.weight"] for observation in outcome.observations]
        return [none if g is None else g.numpy() / scale for g in seen]


def probes_of(instance: Instance) -> Iterator[WeightProbe]:
    """Yield the probes that show what a loop does to the weights of an instance's items, the most telling first.

    The first counts what the case counts, but items where each counts the same, and items in micro-batches without
    valid targets, whose weights could not be read otherwise. Where there are such, the second counts none there.
    """
    plan, reduction, items = instance.case.plan, instance.problem.reduction, Items(instance.data)

    def count(indices: list[int]) -> float:
        return float(instance.count(items.__getitems__(indices)))

    counts = [count(list(plan.items(j))) for j in range(len(plan.micro_batches))]
    empty = {i for j, counted in enumerate(counts) if not counted for i in plan.items(j)}
    shares = {counted / n for counted, n in zip(counts, plan.micro_batches, strict=True) if counted}
    if reduction == "sum" or len(shares) == 1:
        yield WeightProbe(plan, reduction)
    else:
        yield WeightProbe(plan, reduction, lambda indices: count(indices) + len(empty.intersection(indices)))
    if reduction == "mean" and empty:
        yield WeightProbe(plan, reduction, count)


def _counted(probe: Problem, count: Count) -> Problem:
    """Return the probe with a mean that divides by another count; the mean over a count of 0 is 0."""

    def count_batch(batch: Batch) -> torch.Tensor:
        return torch.tensor(count(batch["x"].reshape(-1).tolist()), dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        total, divisor = model(batch).sum(), count_batch(batch)
        return total / divisor if divisor else 0 * total

    return replace(probe, loss=loss, count=count_batch)
