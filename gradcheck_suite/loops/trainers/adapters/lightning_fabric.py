"""Lightning's Fabric: a sound loop on its primitives, and accumulation as its guide prints it.

Fabric leaves the loop to its user; it provides `setup`, `backward`, `no_backward_sync` and the
wrapped optimizer.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from gradcheck_suite.core.contract import TrainingRun
from gradcheck_suite.loops.trainers.trainer import Trainer, begin, quiet


def fabric(run: TrainingRun) -> None:
    """Fabric's `no_backward_sync` around all but a window's last micro-batch.

    The loop counts and divides itself.
    """
    with quiet("lightning.fabric"):
        owner, model, optimizer, loader = _set_up(run)
        for _ in range(run.epochs):
            batches = iter(loader)
            while window := list(islice(batches, run.accumulation_steps)):
                total = sum(run.count(batch) for batch in window)
                for i, batch in enumerate(window):
                    with owner.no_backward_sync(model, enabled=i < len(window) - 1):
                        loss = run.loss(model, batch)
                        owner.backward(
                            loss * run.count(batch) / total if run.reduction == "mean" else loss
                        )
                optimizer.step()
                optimizer.zero_grad()


def fabric_printed(run: TrainingRun) -> None:
    """Accumulation by the code that Fabric's guide prints: a step wherever `iteration % K` is 0, no
    division.
    """
    with quiet("lightning.fabric"):
        owner, model, optimizer, loader = _set_up(run)
        for _ in range(run.epochs):
            for iteration, batch in enumerate(loader):
                is_accumulating = iteration % run.accumulation_steps != 0
                with owner.no_backward_sync(model, enabled=is_accumulating):
                    owner.backward(run.loss(model, batch))
                if not is_accumulating:
                    optimizer.step()
                    optimizer.zero_grad()


_trainer = partial(
    Trainer, requires=("lightning>=2.5",), tested=("2.6.6",), imports=("lightning.fabric:Fabric",)
)
TRAINERS = (
    _trainer(
        name="fabric",
        loop=fabric,
        about="Lightning Fabric in a loop that counts and divides itself",
    ),
    _trainer(
        name="fabric-printed",
        loop=fabric_printed,
        about="Lightning Fabric's accumulation, as its guide prints it",
    ),
)


def _set_up(run: TrainingRun) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric

    begin(run)
    owner = Fabric(accelerator="cpu" if run.device.type == "cpu" else "gpu", devices=1)
    model, optimizer = owner.setup(run.model, run.optimizer)
    return owner, model, optimizer, owner.setup_dataloaders(run.loader)
