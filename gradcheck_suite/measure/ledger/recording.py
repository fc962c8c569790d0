"""A training loop under the ledger."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradcheck_suite.execution.instance import Instance, generated_instance
from gradcheck_suite.measure.ledger.mode import Ledger
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Batch, Loop, TrainingRun


def record(loop: Loop, subject: Case | Instance | TrainingRun) -> Ledger:
    """Run a loop under a ledger of its own and return that, closed.

    The loop is handed the run as it is but for `run.loss`, which says when a forward begins and ends.

    Args:
        loop: any loop under the loop contract; what it raises is raised.
        subject: what to run it on: a generated case, an instance, or a run.

    Raises:
        UsageError: a tensor without a storage of its own to count turned up, such as a sparse gradient.
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

    # restoring the random state allocates: outside the ledger
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        with ledger:
            loop(replace(run, loss=loss))
    return ledger
