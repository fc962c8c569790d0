"""Whether a loop leaves micro-batches out because their loss is NaN or infinite.

The loss of a micro-batch whose targets are all ignored is NaN, and its gradient 0. A loop that skips it may lose more
than that. The loop runs again with such losses replaced by finite ones of the same gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.contract import Batch

SKIPPED = Diagnosis(
    "skipped-non-finite",
    "the loss of a micro-batch without valid targets is NaN, its gradient is 0, and with finite losses in place "
    "of such ones the loop is right: it skips, resets or ends the window where a loss is not finite; leave out that "
    "micro-batch alone, or add it",
)


def run_with_finite_losses(runner: LoopRunner, instance: Instance) -> Outcome | None:
    """Run a loop on a case whose losses are made finite; None where they are already, or where no run is left.

    Ranks compute the losses of their own case, so there it is None too.
    """
    plan, model = instance.case.plan, instance.model()
    if plan.ranks:
        return None
    batches = [instance.batch(plan.items(j)) for j in range(len(plan.micro_batches))]
    with torch.no_grad():
        uncounted = [batch for batch in batches if not instance.count(batch)]
        if all(instance.problem.loss(model, batch).isfinite() for batch in uncounted):
            return None

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        value = instance.problem.loss(model, batch)
        # backward gives 0 where the value was not finite, which is the gradient of such a loss
        return value if value.isfinite() else value.nan_to_num()

    return runner.run(replace(instance, problem=replace(instance.problem, loss=loss)))
