"""transformers' `Trainer` as a loop.

A model of transformers' own is trained as it is: its `forward` gets the batch's `labels` and computes its loss. Any
other model is put into a module whose `forward` returns the loss, in the two forms that the trainer tells apart: one
that accepts the trainer's count of targets, and one that does not.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import Batch, TrainingRun
from gradcheck_suite.schema.weight_probe import SMALL_SCALE
from gradcheck_suite.trainers.process import forget_accelerate, quiet, settle

IGNORED = -100
SMOOTHING = 0.1
SAME = 1e-5
"""Relative difference of two losses from which they are not the same one: models compute theirs in float32."""


class _WithItsLoader(Trainer):  # type: ignore[misc]
    """The trainer with a loader of ours, brought in the documented way."""

    def __init__(self, loader: DataLoader[Any], **settings: Any) -> None:
        self._loader = loader
        super().__init__(**settings)

    def get_train_dataloader(self) -> Any:
        """Return the loader, prepared as the trainer prepares its own."""
        return self.accelerator.prepare(self._loader)


class _Accepting(torch.nn.Module):
    """A module whose `forward` takes the trainer's count of targets, as transformers' models do."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model = run.model
        self.means = run.reduction == "mean"
        self.loss, self.count = run.loss, run.count

    def forward(self, labels: torch.Tensor, batch: Batch, num_items_in_batch: Any = None, **_: Any) -> dict[str, Any]:
        loss = self.loss(self.model, batch)
        if num_items_in_batch is not None and self.means:
            loss = loss * (self.count(batch) / num_items_in_batch)
        return {"loss": loss}


class _Plain(torch.nn.Module):
    """A module whose `forward` returns the loss of the batch it is given, and knows of no other batch."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model, self.loss = run.model, run.loss

    def forward(self, labels: torch.Tensor, batch: Batch) -> dict[str, Any]:
        return {"loss": self.loss(self.model, batch)}


class _Outputs(torch.nn.Module):
    """A module that leaves its loss to the trainer's `compute_loss_func`."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.model, self.loss, self.count = run.model, run.loss, run.count

    def forward(self, batch: Batch) -> dict[str, Any]:
        return {"mean": self.loss(self.model, batch), "count": self.count(batch)}


def hf_trainer(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model that accepts the trainer's count of targets."""
    if isinstance(run.model, PreTrainedModel):
        _expect_own_loss(run)
        _train(run, run.model, run.loader)
    else:
        _train(run, _Accepting(run), _labelled(run))


def hf_trainer_plain(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model whose `forward` takes no keyword for the count of targets."""
    _train(run, _Plain(run), _labelled(run))


def hf_trainer_loss_func(run: TrainingRun) -> None:
    """`transformers.Trainer` with a `compute_loss_func` that divides by the count it is handed."""
    if "compute_loss_func" not in inspect.signature(Trainer.__init__).parameters:
        raise CannotRunHere(
            f"the Trainer of transformers {transformers.__version__} takes no compute_loss_func: use 4.46 or later"
        )

    def part_of_window(outputs: dict[str, Any], labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if num_items_in_batch is None or run.reduction == "sum":
            return outputs["mean"]
        return outputs["mean"] * (outputs["count"] / num_items_in_batch)

    _train(run, _Outputs(run), _labelled(run), compute_loss_func=part_of_window)


def hf_trainer_smoothing(run: TrainingRun) -> None:
    """`transformers.Trainer` with `TrainingArguments(label_smoothing_factor=0.1)`, on a causal language model."""
    if not isinstance(run.model, PreTrainedModel):
        raise CannotRunHere(
            "hf-trainer-smoothing smooths the labels of a model of transformers: pass a problem with one, such as "
            "--problem gradcheck_suite.trainers.problems:llama_smoothed"
        )
    _train(run, run.model, run.loader, arguments={"label_smoothing_factor": SMOOTHING})


def _train(
    run: TrainingRun,
    model: torch.nn.Module,
    loader: DataLoader[Any],
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Let the trainer train: with its own defaults, but for what is written, printed or clipped."""
    settle()
    forget_accelerate()
    with tempfile.TemporaryDirectory() as folder, quiet("transformers", "accelerate"):
        trainer = _WithItsLoader(
            loader,
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=run.epochs,
                gradient_accumulation_steps=run.accumulation_steps,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                use_cpu=run.device.type == "cpu",
                dataloader_pin_memory=False,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **(arguments or {}),
            ),
            optimizers=(run.optimizer, None),
            **settings,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _labelled(run: TrainingRun) -> DataLoader[Any]:
    """Return a loader of the same micro-batches, each with `labels` of which as many are not ignored as it counts."""
    return DataLoader(
        run.loader.dataset,
        batch_sampler=run.loader.batch_sampler,
        collate_fn=_labels_beside(run.loader.collate_fn, run.count),
    )


def _labels_beside(
    collate: Callable[[Any], Batch], count: Callable[[Batch], torch.Tensor]
) -> Callable[[Any], dict[str, Any]]:
    def labelled(items: Any) -> dict[str, Any]:
        batch = collate(items)
        counted = float(count(batch))
        if counted != int(counted):
            raise CannotRunHere(
                f"transformers' Trainer counts targets, and this loss divides by {counted:g}, which is no number of "
                "targets: take a loss without weights"
            )
        # one more, since a batch that counts nothing has labels too, all ignored
        labels = torch.full((1, int(counted) + 1), IGNORED)
        labels[0, : int(counted)] = 0
        return {"labels": labels, "batch": batch}

    return labelled


def _expect_own_loss(run: TrainingRun) -> None:
    """Refuse a problem whose loss is not the one its model computes: the trainer would train another objective."""
    batch = next(iter(run.loader))
    if not isinstance(batch, dict) or "labels" not in batch:
        raise CannotRunHere(
            "transformers' Trainer takes batches that are dictionaries with labels: pass such a problem"
        )
    with torch.no_grad():
        wanted, own = float(run.loss(run.model, batch)), float(run.model(**batch)["loss"])
    # made small, it is the same loss, asked for to see whether the gradient's size matters
    if not any(abs(wanted - scale * own) <= SAME * scale * abs(own) for scale in (1.0, SMALL_SCALE)):
        raise CannotRunHere(
            f"the problem's loss is {wanted:.9g} where its model's own, which transformers' Trainer takes, is "
            f"{own:.9g}: let Problem.loss return model(**batch).loss"
        )
