"""Running a loop on the weight read-out probe: the weight it gives each item, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.schema.contract import Batch, Loop, Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.weight_probe import probe_case

Count = Callable[[list[int]], torch.Tensor]
"""What the mean over some items, given by their indices, divides by."""


def probe_steps(
    loop: Loop, plan: Plan, reduction: str, *, scale: float = 1.0, count: Count | None = None
) -> list[npt.NDArray[np.float64]] | None:
    """Return, for each step the loop takes on the probe, the weight it gave each item; None where it fails there.

    Args:
        loop: the subject.
        plan: of the case that is explained.
        reduction: likewise.
        scale: the probe's loss is multiplied by it, and the weights divided.
        count: in place of the probe's own, which is the number of items.
    """
    instance = generated_instance(probe_case(plan, reduction))  # type: ignore[arg-type]
    problem = instance.problem if count is None else _counted(instance.problem, count)
    scaled = replace(problem, loss=lambda model, batch: scale * problem.loss(model, batch))
    outcome = run_loop(loop, replace(instance, problem=scaled))
    if outcome.raised is not None:
        return None
    none = np.zeros(plan.total_items)
    seen = [observation.gradients["0.weight"] for observation in outcome.observations]
    return [none if g is None else g.numpy() / scale for g in seen]


def _counted(probe: Problem, count: Count) -> Problem:
    """Return the probe with a mean that divides by another count; one of 0 counts for nothing."""

    def count_batch(batch: Batch) -> torch.Tensor:
        return count(batch["x"].reshape(-1).tolist())

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        total, divisor = model(batch).sum(), count_batch(batch)
        return total / divisor if divisor else 0 * total

    return replace(probe, loss=loss, count=count_batch)
