"""Run a training loop under a ledger."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradcheck_suite.execution.devices import seeded
from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.measure.ledger import Ledger
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Batch, Loop, TrainingRun


def record(loop: Loop, subject: Case | Instance | TrainingRun) -> Ledger:
    """Run a loop under a new ledger and return the closed ledger.

    The loop receives the run unchanged except for `run.loss`, which marks the forward phase.

    Args:
        loop: any loop under the loop contract; its exceptions propagate.
        subject: a generated case, an instance, or a run.

    Raises:
        UsageError: the loop used a tensor that is not dense, such as a sparse gradient.
    """
    seed = 0
    if isinstance(subject, Case):
        subject = generated_instance(subject)
    if isinstance(subject, Instance):
        seed, subject = subject.case.seed, subject.run()
    run = subject
    ledger = Ledger(run.model, run.optimizer)

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with ledger.phase("forward"):
            return run.loss(model, batch)

    # restoring the random state allocates, so it stays outside the ledger
    with seeded(seed, run.device), torch.enable_grad(), ledger:
        loop(replace(run, loss=loss))
    return ledger
