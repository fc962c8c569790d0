"""Hugging Face Accelerate: its `accumulate()`, the recipe that its guide gives for unequal counts,
and `no_sync`.

Accelerate leaves the loop to its user, so the loops here are those that its guide prints.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

from gradcheck_suite.core.contract import Batch, TrainingRun, training_loop
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.trainers.trainer import Trainer, begin, reset_accelerate


def accelerate(run: TrainingRun) -> None:
    """`with accelerator.accumulate(model)` around forward, backward, step and reset, as the guide's
    finished code.
    """
    _accumulate(run, _accelerator(run, gradient_accumulation_steps=run.accumulation_steps))


def accelerate_counted(run: TrainingRun) -> None:
    """The guide's recipe for samples of variable size: fetch a window, count it, undo the division
    in `backward`.
    """
    accelerator = _accelerator(run, gradient_accumulation_steps=run.accumulation_steps)
    model, optimizer, loader = accelerator.prepare(run.model, run.optimizer, run.loader)
    for _ in range(run.epochs):
        batches = iter(loader)
        while window := list(islice(batches, run.accumulation_steps)):
            total = _total(run, window)
            for i, batch in enumerate(window):
                # in one process the prepared model is not wrapped, and has no `no_sync`
                reduces = accelerator.num_processes == 1 or i == len(window) - 1
                with nullcontext() if reduces else model.no_sync():
                    # `accelerator.backward` divides by the accumulation steps, which the recipe
                    # undoes
                    loss = (
                        _summed(run, model, batch)
                        * run.accumulation_steps
                        * accelerator.num_processes
                        / total
                    )
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_no_sync(run: TrainingRun) -> None:
    """`accelerator.no_sync(model)` around all but a window's last micro-batch.

    The loop counts and divides itself.
    """
    accelerator = _accelerator(run)
    model, optimizer, loader = accelerator.prepare(run.model, run.optimizer, run.loader)
    for _ in range(run.epochs):
        batches = iter(loader)
        while window := list(islice(batches, run.accumulation_steps)):
            total = _total(run, window)
            for i, batch in enumerate(window):
                with accelerator.no_sync(model) if i < len(window) - 1 else nullcontext():
                    accelerator.backward(_summed(run, model, batch) / total)
            optimizer.step()
            optimizer.zero_grad()


@training_loop(autocast="float16")
def accelerate_scaler(run: TrainingRun) -> None:
    """`accumulate()` with `mixed_precision="fp16"`, so that Accelerate's GradScaler scales,
    unscales and steps.
    """
    if run.device.type == "cpu":
        raise CannotRunHere(
            "accelerate refuses fp16, and with it its GradScaler, on the CPU: `verify` has --device"
            " cuda"
        )
    _accumulate(
        run,
        _accelerator(
            run, gradient_accumulation_steps=run.accumulation_steps, mixed_precision="fp16"
        ),
    )


_trainer = partial(
    Trainer,
    requires=("accelerate>=1.0",),
    tested=("1.15.0",),
    imports=(
        "accelerate:Accelerator",
        "accelerate.state:AcceleratorState",
        "accelerate.state:GradientState",
    ),
)
TRAINERS = (
    _trainer(
        name="accelerate",
        loop=accelerate,
        about="Accelerate's accumulate(), as its guide prints it",
    ),
    _trainer(
        name="accelerate-counted",
        loop=accelerate_counted,
        about="Accelerate's recipe for samples of variable size",
    ),
    _trainer(
        name="accelerate-no-sync",
        loop=accelerate_no_sync,
        about="Accelerate's no_sync() in a loop that counts and divides itself",
    ),
    _trainer(
        name="accelerate-scaler",
        loop=accelerate_scaler,
        about="Accelerate's accumulate() in fp16, with its GradScaler; CUDA only",
    ),
)


def _accelerator(run: TrainingRun, **settings: Any) -> Any:
    from accelerate import Accelerator

    begin(run)
    # the first `Accelerator` of a process decides for all later ones
    reset_accelerate()
    return Accelerator(cpu=run.device.type == "cpu", **settings)


def _accumulate(run: TrainingRun, accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(run.model, run.optimizer, run.loader)
    for _ in range(run.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(run.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


def _summed(run: TrainingRun, model: Any, batch: Batch) -> Any:
    """Return the loss summed over what it counts."""
    loss = run.loss(model, batch)
    return loss * run.count(batch) if run.reduction == "mean" else loss


def _total(run: TrainingRun, window: list[Batch]) -> Any:
    """Return what a window's sum is divided by."""
    return sum(run.count(batch) for batch in window) if run.reduction == "mean" else 1.0
