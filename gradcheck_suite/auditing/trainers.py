"""What the trainers on the stack say of a step: who runs, how many micro-batches a window has, and the
scale of a GradScaler that steps.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any

# What trainers are configured with, read off the stack at a step; no trainer is imported.


def _of_transformers(trainer: Any) -> Any:
    # since transformers#39659 a Trainer divides by the window's own length, which then says nothing
    # about K
    steps = trainer.args.gradient_accumulation_steps
    return (
        steps if getattr(trainer, "current_gradient_accumulation_steps", steps) == steps else None
    )


TRAINERS: dict[str, Callable[[Any], Any]] = {
    "accelerate.optimizer": lambda optimizer: optimizer.gradient_state.num_steps,
    "lightning.pytorch.trainer.trainer": attrgetter("accumulate_grad_batches"),
    "pytorch_lightning.trainer.trainer": attrgetter("accumulate_grad_batches"),
    "transformers.trainer": _of_transformers,
    "deepspeed.runtime.zero.stage_1_and_2": lambda optimizer: None,
    "deepspeed.runtime.zero.stage3": lambda optimizer: None,
}
"""The module of a trainer's methods -> how to read its accumulation steps off `self`."""


def trainer_on_the_stack() -> tuple[str | None, int | None, float | None]:
    """Return the outermost trainer that runs, its accumulation steps, and the scale of a GradScaler
    that steps.
    """
    steps: Any = None
    trainer: str | None = None
    scale: float | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if (configured := TRAINERS.get(name)) is not None and (
            owner := frame.f_locals.get("self")
        ) is not None:
            # another class of that module, or another release
            with contextlib.suppress(AttributeError):
                steps = configured(owner)
                trainer = name.removeprefix("pytorch_")
        elif name == "torch.amp.grad_scaler" and scale is None:
            found = getattr(frame.f_locals.get("self"), "_scale", None)
            scale = None if found is None else float(found)
        frame = frame.f_back
    return trainer, (steps if type(steps) is int and steps > 1 else None), scale
