"""Lightning's `Trainer`: `accumulate_grad_batches`, and manual optimization as its guide prints it."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gradcheck_suite.core.contract import Batch, TrainingRun
from gradcheck_suite.loops.trainers.trainer import Trainer, begin, quiet

if TYPE_CHECKING:
    import torch


def lightning(run: TrainingRun) -> None:
    """`lightning.Trainer(accumulate_grad_batches=K)` with automatic optimization."""
    automatic, _ = _modules()
    _fit(run, automatic(run), accumulate_grad_batches=run.accumulation_steps)


def lightning_manual(run: TrainingRun) -> None:
    """`lightning.Trainer` with manual optimization, accumulating by the code that the guide prints."""
    _, manual = _modules()
    _fit(run, manual(run))


_trainer = partial(
    Trainer,
    requires=("lightning>=2.5",),
    tested=("2.6.6",),
    imports=("lightning.pytorch:LightningModule", "lightning.pytorch:Trainer"),
)
TRAINERS = (
    _trainer(
        name="lightning", loop=lightning, about="lightning.Trainer(accumulate_grad_batches=K)"
    ),
    _trainer(
        name="lightning-manual",
        loop=lightning_manual,
        about="lightning.Trainer with manual optimization, as its guide prints it",
    ),
)


@cache
def _modules() -> tuple[Any, Any]:
    """Return the modules for automatic and for manual optimization."""
    from lightning.pytorch import LightningModule

    class Automatic(LightningModule):  # type: ignore[misc]
        """The run's model, its loss and its optimizer; Lightning does the rest."""

        def __init__(self, run: TrainingRun) -> None:
            super().__init__()
            self.model = run.model
            self.run = run

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor | None:
            """Return the loss of a micro-batch."""
            return self.run.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return the run's optimizer."""
            return self.run.optimizer

    class Manual(Automatic):
        """The same with manual optimization, accumulating as the guide does: loss / N, a step after
        every N batches.
        """

        def __init__(self, run: TrainingRun) -> None:
            super().__init__(run)
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            """Send the loss backward; step and reset at the end of a window."""
            optimizer: Any = self.optimizers()
            self.manual_backward(self.run.loss(self.model, batch) / self.run.accumulation_steps)
            # as the guide has it: a short last window never gets to its step
            if (batch_idx + 1) % self.run.accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return Automatic, Manual


def _fit(run: TrainingRun, module: Any, **settings: Any) -> None:
    """Train with the trainer's own defaults, except that nothing is written, printed or logged."""
    from lightning.pytorch import Trainer as LightningTrainer

    begin(run)
    with quiet("lightning.pytorch", "lightning.fabric"):
        trainer = LightningTrainer(
            accelerator="cpu" if run.device.type == "cpu" else "gpu",
            devices=1,
            max_epochs=run.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(module, run.loader)
