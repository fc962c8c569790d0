"""transformers' `Trainer`.

A model of transformers' own is trained as it is: its `forward` gets the batch's `labels` and computes its loss. Any
other model is put into a module whose `forward` returns the loss.
"""

from __future__ import annotations

import inspect
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import TrainingRun
from gradcheck_suite.schema.weight_probe import SMALL_SCALE
from gradcheck_suite.trainers.process_state import freeze_imported_objects, quiet, reset_accelerate
from gradcheck_suite.trainers.questions import PADDED_ROWS, PLANS, SMOOTHED
from gradcheck_suite.trainers.trainer import Trainer

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

SAME_LOSS = 1e-5
"""Relative difference above which two losses are not the same one: models compute theirs in float32."""


def hf_trainer(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model that accepts the trainer's count of targets."""
    from transformers import PreTrainedModel

    from gradcheck_suite.trainers.loss_in_forward import AcceptingCount, labelled

    if isinstance(run.model, PreTrainedModel):
        _expect_own_loss(run)
        _train(run, run.model, run.loader)
    else:
        _train(run, AcceptingCount(run), labelled(run))


def hf_trainer_plain(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model whose `forward` takes no keyword for the count of targets."""
    from gradcheck_suite.trainers.loss_in_forward import Plain, labelled

    _train(run, Plain(run), labelled(run))


def hf_trainer_loss_func(run: TrainingRun) -> None:
    """`transformers.Trainer` with a `compute_loss_func` that divides by the count it is given."""
    import transformers

    from gradcheck_suite.trainers.loss_in_forward import Outputs, labelled

    if "compute_loss_func" not in inspect.signature(transformers.Trainer.__init__).parameters:
        raise CannotRunHere(
            f"the Trainer of transformers {transformers.__version__} takes no compute_loss_func: use 4.46 or later"
        )

    def part_of_window(outputs: dict[str, Any], labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if num_items_in_batch is None or run.reduction == "sum":
            return outputs["mean"]
        return outputs["mean"] * (outputs["count"] / num_items_in_batch)

    _train(run, Outputs(run), labelled(run), compute_loss_func=part_of_window)


def hf_trainer_smoothing(run: TrainingRun) -> None:
    """`transformers.Trainer` with `TrainingArguments(label_smoothing_factor=0.1)`, on a causal language model."""
    from transformers import PreTrainedModel

    from gradcheck_suite.trainers.problems import SMOOTHING

    if not isinstance(run.model, PreTrainedModel):
        raise CannotRunHere(
            "hf-trainer-smoothing smooths the labels of a model of transformers: pass a problem with one, such as "
            "--problem gradcheck_suite.trainers.problems:llama_smoothed"
        )
    _train(run, run.model, run.loader, arguments={"label_smoothing_factor": SMOOTHING})


_trainer = partial(
    Trainer,
    requires=("transformers>=4.45", "accelerate>=1.0"),
    tested=("4.45.2", "5.23.0"),
    imports=(
        "transformers:PreTrainedModel",
        "transformers:PrinterCallback",
        "transformers:Trainer",
        "transformers:TrainingArguments",
        "accelerate.state:AcceleratorState",
    ),
)
TRAINERS = (
    _trainer(
        name="hf-trainer",
        loop=hf_trainer,
        about="transformers.Trainer; the model accepts the count of targets",
        questions=(*PLANS, *PADDED_ROWS),
    ),
    _trainer(
        name="hf-trainer-plain",
        loop=hf_trainer_plain,
        about="transformers.Trainer; the model's forward takes no such count",
    ),
    _trainer(
        name="hf-trainer-loss-func",
        loop=hf_trainer_loss_func,
        about="transformers.Trainer with compute_loss_func",
    ),
    _trainer(
        name="hf-trainer-smoothing",
        loop=hf_trainer_smoothing,
        about="transformers.Trainer with label_smoothing_factor=0.1",
        questions=SMOOTHED,
    ),
)


def _train(
    run: TrainingRun,
    model: torch.nn.Module,
    loader: DataLoader[Any],
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train with the trainer's own defaults, except that nothing is written, printed or clipped."""
    from transformers import PrinterCallback, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    class WithLoader(TransformersTrainer):  # type: ignore[misc]
        """The trainer with the run's loader, set in the documented way."""

        def get_train_dataloader(self) -> Any:
            """Return the loader, prepared as the trainer prepares its own."""
            return self.accelerator.prepare(loader)

    freeze_imported_objects()
    reset_accelerate()
    with tempfile.TemporaryDirectory() as folder, quiet("transformers", "accelerate"):
        trainer = WithLoader(
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


def _expect_own_loss(run: TrainingRun) -> None:
    """Refuse a problem whose loss is not the one that its model computes: the trainer would train another objective."""
    import torch

    batch = next(iter(run.loader))
    if not isinstance(batch, dict) or "labels" not in batch:
        raise CannotRunHere(
            "transformers' Trainer takes batches that are dictionaries with labels: pass such a problem"
        )
    with torch.no_grad():
        wanted, own = float(run.loss(run.model, batch)), float(run.model(**batch)["loss"])
    # the suite scales a loss down to see whether the gradient's size matters: that is the same loss
    if not any(abs(wanted - scale * own) <= SAME_LOSS * scale * abs(own) for scale in (1.0, SMALL_SCALE)):
        raise CannotRunHere(
            f"the problem's loss is {wanted:.9g} where its model's own, which transformers' Trainer takes, is "
            f"{own:.9g}: let Problem.loss return model(**batch).loss"
        )
