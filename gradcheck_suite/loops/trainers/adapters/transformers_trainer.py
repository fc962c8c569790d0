"""transformers' `Trainer`.

`hf-trainer` trains the model that it is given, whatever wraps it. A model that computes its own
loss from the batch's `labels` does so; for any other one the trainer's `compute_loss` is
overridden, as its guide says. The other names put the model into a module whose `forward` returns
the loss in one of the forms that the trainer distinguishes.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gradcheck_suite.core.case import SMALL_SCALE
from gradcheck_suite.core.contract import Batch, Loop, TrainingRun
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.trainers.trainer import (
    PADDED_ROWS,
    PLANS,
    SMOOTHED,
    Trainer,
    begin,
    quiet,
    reset_accelerate,
)

if TYPE_CHECKING:
    import torch


# A loop made of transformers' `Trainer` or of any subclass of it, such as those of trl and
# sentence-transformers.
#
# The trainer trains `run.model` itself. It gets the run's optimizer and the run's loader, the
# latter in the documented way (`get_train_dataloader`). transformers is imported when the loop
# runs.


def transformers_loop(
    trainer: type,
    *,
    arguments: Mapping[str, Any] | None = None,
    inputs: Callable[[Batch], Any] | None = None,
    **settings: Any,
) -> Loop:
    """Return a loop that trains with a subclass of transformers' `Trainer`.

        train = gradcheck_suite.transformers_loop(trl.SFTTrainer, train_dataset=ROWS,
        processing_class=TOKENIZER)

    The trainer's own defaults hold, except that nothing is saved, logged, clipped or cast to
    bfloat16, and that the learning rate is constant. What the trainer makes of its own data set is
    not used: the run's loader yields what its collator would yield.

    Args:
        trainer: the class.
        arguments: settings of its training arguments, whose class is read off the annotation of
            `args`.
        inputs: batch of the Problem -> what the trainer's collator would yield for it, where that
            is another thing: a Problem's tensors have one row for each item, and a collator of
            pairs yields two.
        settings: further arguments of the class.

    Raises:
        UsageError: `trainer` is no class with a method `get_train_dataloader`.
    """
    if not inspect.isclass(trainer) or not hasattr(trainer, "get_train_dataloader"):
        raise UsageError(
            f"transformers_loop: expected a subclass of transformers.Trainer, got {trainer!r}"
        )

    def loop(run: TrainingRun) -> None:
        loader = run.loader if inputs is None else mapped(run, inputs)
        train(
            run,
            trainer,
            run.model,
            loader,
            arguments=arguments,
            **settings,
        )

    loop.__name__ = loop.__qualname__ = trainer.__name__
    # as namedtuple does: the caller's file names the libraries that a verdict is about
    loop.__module__ = sys._getframe(1).f_globals.get("__name__", __name__)
    loop.__doc__ = f"`{trainer.__module__}.{trainer.__name__}`."
    return loop


def mapped(run: TrainingRun, inputs: Callable[[Batch], Any]) -> Any:
    """Return a loader of the run's micro-batches, each given to a function."""
    from torch.utils.data import DataLoader

    def collate(items: Any) -> Any:
        return inputs(run.loader.collate_fn(items))

    return DataLoader(
        run.loader.dataset, batch_sampler=run.loader.batch_sampler, collate_fn=collate
    )


def train(
    run: TrainingRun,
    trainer: Any,
    model: Any,
    loader: Any,
    *,
    arguments: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train a model on a loader, with the optimizer and the accumulation steps of a run.

    Args:
        run: the run.
        trainer: transformers' `Trainer` or a subclass of it.
        model: what the trainer is given.
        loader: of the micro-batches.
        arguments: settings of the training arguments.
        settings: further arguments of the class.
    """
    from transformers import PrinterCallback

    class WithLoader(trainer):  # type: ignore[misc, unused-ignore]
        """The trainer with the run's loader, set in the documented way."""

        def get_train_dataloader(self) -> Any:
            """Return the loader, prepared as the trainer prepares its own."""
            return self.accelerator.prepare(loader)

    begin(run)
    reset_accelerate()
    with tempfile.TemporaryDirectory() as folder, quiet("transformers", "accelerate"):
        options = {
            "output_dir": folder,
            "num_train_epochs": run.epochs,
            "gradient_accumulation_steps": run.accumulation_steps,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "use_cpu": run.device.type == "cpu",
            "bf16": False,
            "dataloader_pin_memory": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            **(arguments or {}),
        }
        made = WithLoader(
            model=model,
            args=_arguments_class(trainer)(**options),
            optimizers=(run.optimizer, None),
            **settings,
        )
        made.remove_callback(PrinterCallback)
        made.train()


def _annotation(function: Any, argument: str) -> Any:
    """Return what a function's argument is annotated with, as an object.

    None where there is no annotation, or one that names what only a type checker imports.
    """
    # since Python 3.14 annotations are evaluated where they are read
    try:
        hint = getattr(function, "__annotations__", {}).get(argument)
        if isinstance(hint, str):
            return eval(hint, inspect.unwrap(function).__globals__)
    except NameError:
        return None
    return hint


def _arguments_class(trainer: type) -> Any:
    """Return the most special class of training arguments that the constructor's annotation names."""
    from transformers import TrainingArguments

    for kind in trainer.__mro__:
        constructor: Any = vars(kind).get("__init__")
        hint = _annotation(constructor, "args")
        if hint is not None:
            named = [one for one in typing.get_args(hint) or (hint,) if inspect.isclass(one)]
            found = [one for one in named if issubclass(one, TrainingArguments)]
            return max(found, key=lambda one: len(one.__mro__), default=TrainingArguments)
    return TrainingArguments


SAME_LOSS = 1e-5
"""Relative difference above which two losses are not the same one: models compute theirs in float32."""


def hf_trainer(run: TrainingRun) -> None:
    """`transformers.Trainer` on the model as it is given."""
    import transformers

    from gradcheck_suite.loops.trainers.problems import labelled

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
    """`transformers.Trainer`.

    The model is put into one that divides its loss by the trainer's count of targets.
    """
    from transformers import Trainer as TransformersTrainer

    from gradcheck_suite.loops.trainers.problems import AcceptingCount, labelled

    train(run, TransformersTrainer, AcceptingCount(run), labelled(run))


def hf_trainer_plain(run: TrainingRun) -> None:
    """`transformers.Trainer`; a model whose `forward` takes no keyword for the count of targets."""
    from transformers import Trainer as TransformersTrainer

    from gradcheck_suite.loops.trainers.problems import Plain, labelled

    train(run, TransformersTrainer, Plain(run), labelled(run))


def hf_trainer_loss_func(run: TrainingRun) -> None:
    """`transformers.Trainer` with a `compute_loss_func` that divides by the count it is given."""
    import transformers

    from gradcheck_suite.loops.trainers.problems import Outputs, labelled

    if "compute_loss_func" not in inspect.signature(transformers.Trainer.__init__).parameters:
        raise CannotRunHere(
            f"the Trainer of transformers {transformers.__version__} takes no compute_loss_func:"
            " use 4.46 or later"
        )

    def part_of_window(
        outputs: dict[str, Any], labels: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if num_items_in_batch is None or run.reduction == "sum":
            return outputs["mean"]
        return outputs["mean"] * (outputs["count"] / num_items_in_batch)

    train(
        run,
        transformers.Trainer,
        Outputs(run),
        labelled(run),
        compute_loss_func=part_of_window,
    )


def hf_trainer_smoothing(run: TrainingRun) -> None:
    """`transformers.Trainer` with `TrainingArguments(label_smoothing_factor=0.1)`, on a causal
    language model.
    """
    import transformers

    from gradcheck_suite.loops.trainers.models import SMOOTHING

    if not isinstance(_looked_into(run.model), transformers.PreTrainedModel):
        raise CannotRunHere(
            "hf-trainer-smoothing smooths the labels of a model of transformers: pass a problem"
            " with one, such as --problem gradcheck_suite.loops.trainers.models:llama_smoothed"
        )
    train(
        run,
        transformers.Trainer,
        run.model,
        run.loader,
        arguments={"label_smoothing_factor": SMOOTHING},
    )


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
        CannotRunHere: it is a model of transformers, and its loss is another one: the trainer would
            train that.
    """
    import torch
    from transformers import PreTrainedModel

    batch = next(iter(run.loader))
    of_transformers = isinstance(_looked_into(run.model), PreTrainedModel)
    if not isinstance(batch, dict) or "labels" not in batch:
        if of_transformers:
            raise CannotRunHere(
                "transformers' Trainer takes batches that are dictionaries with labels: pass such a"
                " problem"
            )
        return False
    with torch.no_grad():
        wanted = float(run.loss(run.model, batch))
        own = _own_loss(run.model, batch)
    # the suite scales a loss down to see whether the gradient's size matters: that is the same loss
    if isinstance(own, float) and any(
        abs(wanted - scale * own) <= SAME_LOSS * scale * abs(own) for scale in (1, SMALL_SCALE)
    ):
        return True
    if of_transformers:
        shown = f"{own:.9g}" if isinstance(own, float) else own
        raise CannotRunHere(
            f"the problem's loss is {wanted:.9g} where its model's own, which transformers' Trainer"
            f" takes, is {shown}: let Problem.loss return model(**batch).loss"
        )
    return False


def _own_loss(model: torch.nn.Module, batch: Any) -> float | str:
    """Return the loss that a model computes from a batch, or why it computes none."""
    # a model of another kind takes other arguments and returns other things
    try:
        return float(model(**batch)["loss"])
    except Exception as error:
        return " ".join(f"not computed ({type(error).__name__}: {error})".split())
