"""Lightning's `Trainer` as loops: `accumulate_grad_batches`, and manual optimization as its guide prints it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from gradcheck_suite.schema.contract import Batch, TrainingRun
from gradcheck_suite.trainers.process import quiet, settle


class _Automatic(LightningModule):  # type: ignore[misc]
    """The run's model, its loss and its optimizer; Lightning does the rest."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model, self.run = run.model, run

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor | None:
        return self.run.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.run.optimizer


class _Manual(_Automatic):
    """The same with manual optimization, accumulating as the guide does: loss / N, a step after every N batches."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.run.loss(self.model, batch) / self.run.accumulation_steps)
        if (batch_idx + 1) % self.run.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def lightning(run: TrainingRun) -> None:
    """`lightning.Trainer(accumulate_grad_batches=K)` with automatic optimization."""
    _fit(run, _Automatic(run), accumulate_grad_batches=run.accumulation_steps)


def lightning_manual(run: TrainingRun) -> None:
    """`lightning.Trainer` with manual optimization, accumulating by the code that the guide prints."""
    _fit(run, _Manual(run))


def _fit(run: TrainingRun, module: LightningModule, **settings: Any) -> None:
    """Let the trainer train: with its own defaults, but for what is written, printed or logged."""
    settle()
    with quiet("lightning.pytorch", "lightning.fabric"):
        trainer = Trainer(
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
