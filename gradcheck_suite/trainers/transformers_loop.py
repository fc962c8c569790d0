"""A loop made of transformers' `Trainer` or of any subclass of it, such as those of trl and sentence-transformers.

The trainer trains `run.model` itself. It gets the run's optimizer and the run's loader, the latter in the documented
way (`get_train_dataloader`). transformers is imported when the loop runs.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.contract import Batch, Loop, TrainingRun
from gradcheck_suite.trainers.process_state import begin, quiet, reset_accelerate


def transformers_loop(
    trainer: type,
    *,
    arguments: Mapping[str, Any] | None = None,
    inputs: Callable[[Batch], Any] | None = None,
    **settings: Any,
) -> Loop:
    """Return a loop that trains with a subclass of transformers' `Trainer`.

        train = gradcheck_suite.transformers_loop(trl.SFTTrainer, train_dataset=ROWS, processing_class=TOKENIZER)

    The trainer's own defaults hold, except that nothing is saved, logged, clipped or cast to bfloat16. What the trainer
    makes of its own data set is not used: the run's loader yields what its collator would yield.

    Args:
        trainer: the class.
        arguments: settings of its training arguments, whose class is read off the annotation of `args`.
        inputs: batch of the Problem -> what the trainer's collator would yield for it, where that is another thing: a
            Problem's tensors have one row for each item, and a collator of pairs yields two.
        settings: further arguments of the class.

    Raises:
        UsageError: `trainer` is no class with a method `get_train_dataloader`.
    """
    if not inspect.isclass(trainer) or not hasattr(trainer, "get_train_dataloader"):
        raise UsageError(f"transformers_loop: expected a subclass of transformers.Trainer, got {trainer!r}")

    def loop(run: TrainingRun) -> None:
        loader = run.loader if inputs is None else mapped(run, inputs)
        train(run, trainer, run.model, loader, arguments=arguments, **settings)

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

    return DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler, collate_fn=collate)


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
            model=model, args=_arguments_class(trainer)(**options), optimizers=(run.optimizer, None), **settings
        )
        made.remove_callback(PrinterCallback)
        made.train()


def _arguments_class(trainer: type) -> Any:
    """Return the most special class of training arguments that the constructor's annotation names."""
    from transformers import TrainingArguments

    for kind in trainer.__mro__:
        constructor: Any = vars(kind).get("__init__")
        hint = getattr(constructor, "__annotations__", {}).get("args")
        if isinstance(hint, str):
            hint = eval(hint, inspect.unwrap(constructor).__globals__)
        if hint is not None:
            named = [one for one in (typing.get_args(hint) or (hint,)) if inspect.isclass(one)]
            found = [one for one in named if issubclass(one, TrainingArguments)]
            return max(found, key=lambda one: len(one.__mro__), default=TrainingArguments)
    return TrainingArguments
