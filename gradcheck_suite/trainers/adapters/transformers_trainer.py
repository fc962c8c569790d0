"""transformers' `Trainer`.

`hf-trainer` trains the model that it is given, whatever wraps it. A model that computes its own loss from the batch's
`labels` does so; for any other one the trainer's `compute_loss` is overridden, as its guide says. The other names put
the model into a module whose `forward` returns the loss in one of the forms that the trainer distinguishes.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import TrainingRun
from gradcheck_suite.schema.weight_probe import SMALL_SCALE
from gradcheck_suite.trainers.questions import PADDED_ROWS, PLANS, SMOOTHED
from gradcheck_suite.trainers.trainer import Trainer
from gradcheck_suite.trainers.transformers_loop import train

if TYPE_CHECKING:
    import torch

SAME_LOSS = 1e-5
"""Relative difference above which two losses are not the same one: models compute theirs in float32."""


def hf_trainer(run: TrainingRun) -> None:
    """`transformers.Trainer` on the model as it is given."""
    import transformers

    from gradcheck_suite.trainers.loss_in_forward import labelled

    if _computes_the_loss(run):
        train(run, transformers.Trainer, run.model, run.loader)
        return

    class ByComputeLoss(transformers.Trainer):  # type: ignore[misc]
        """The trainer with the problem's loss, set in the documented way."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            """Return the loss of a micro-batch."""
            return run.loss(model, inputs["batch"])

    train(run, ByComputeLoss, run.model, labelled(run))


def hf_trainer_counted(run: TrainingRun) -> None:
    """`transformers.Trainer`; the model is put into one that divides its loss by the trainer's count of targets."""
    from transformers import Trainer as TransformersTrainer

    from gradcheck_suite.trainers.loss_in_forward import AcceptingCount, labelled

    train(run, TransformersTrainer, AcceptingCount(run), labelled(run))


def hf_trainer_plain(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model whose `forward` takes no keyword for the count of targets."""
    from transformers import Trainer as TransformersTrainer

    from gradcheck_suite.trainers.loss_in_forward import Plain, labelled

    train(run, TransformersTrainer, Plain(run), labelled(run))


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

    train(run, transformers.Trainer, Outputs(run), labelled(run), compute_loss_func=part_of_window)


def hf_trainer_smoothing(run: TrainingRun) -> None:
    """`transformers.Trainer` with `TrainingArguments(label_smoothing_factor=0.1)`, on a causal language model."""
    import transformers

    from gradcheck_suite.trainers.problems import SMOOTHING

    if not isinstance(_looked_into(run.model), transformers.PreTrainedModel):
        raise CannotRunHere(
            "hf-trainer-smoothing smooths the labels of a model of transformers: pass a problem with one, such as "
            "--problem gradcheck_suite.trainers.problems:llama_smoothed"
        )
    train(run, transformers.Trainer, run.model, run.loader, arguments={"label_smoothing_factor": SMOOTHING})


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
        about="transformers.Trainer on the model as it is given",
        questions=(*PLANS, *PADDED_ROWS),
    ),
    _trainer(
        name="hf-trainer-counted",
        loop=hf_trainer_counted,
        about="transformers.Trainer; the loss is divided by the count of targets that it passes",
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


def _looked_into(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that PEFT wraps, to look at it; the model itself where PEFT wraps none."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _computes_the_loss(run: TrainingRun) -> bool:
    """Whether the run's model computes the problem's loss from a batch.

    Raises:
        CannotRunHere: it is a model of transformers, and its loss is another one: the trainer would train that.
    """
    import torch
    from transformers import PreTrainedModel

    batch = next(iter(run.loader))
    of_transformers = isinstance(_looked_into(run.model), PreTrainedModel)
    if not isinstance(batch, dict) or "labels" not in batch:
        if of_transformers:
            raise CannotRunHere(
                "transformers' Trainer takes batches that are dictionaries with labels: pass such a problem"
            )
        return False
    with torch.no_grad():
        wanted, own = float(run.loss(run.model, batch)), _own_loss(run.model, batch)
    # the suite scales a loss down to see whether the gradient's size matters: that is the same loss
    if own is not None and any(abs(wanted - scale * own) <= SAME_LOSS * scale * abs(own) for scale in (1, SMALL_SCALE)):
        return True
    if of_transformers:
        raise CannotRunHere(
            f"the problem's loss is {wanted:.9g} where its model's own, which transformers' Trainer takes, is "
            f"{'not computed' if own is None else f'{own:.9g}'}: let Problem.loss return model(**batch).loss"
        )
    return False


def _own_loss(model: torch.nn.Module, batch: Any) -> float | None:
    """Return the loss that a model computes from a batch, or None where it computes none."""
    try:
        return float(model(**batch)["loss"])
    except Exception:  # a model of another kind takes other arguments and returns other things
        return None
