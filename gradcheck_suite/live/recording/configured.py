"""The accumulation steps that a trainer is configured with, read off the stack at a step; no trainer is imported.

A window is held only to a number that the trainer divides by. transformers' Trainer keeps the window's own length in
`current_gradient_accumulation_steps` since transformers#39659, and divides by that: a short window there says nothing
about K.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def _of_transformers(trainer: Any) -> Any:
    steps = trainer.args.gradient_accumulation_steps
    return steps if getattr(trainer, "current_gradient_accumulation_steps", steps) == steps else None


def _of_lightning(trainer: Any) -> Any:
    return trainer.accumulate_grad_batches


TRAINERS: dict[str, Callable[[Any], Any]] = {
    "accelerate.optimizer": lambda optimizer: optimizer.gradient_state.num_steps,
    "lightning.pytorch.trainer.trainer": _of_lightning,
    "pytorch_lightning.trainer.trainer": _of_lightning,
    "transformers.trainer": _of_transformers,
}
"""The module of a trainer's methods -> how to read its accumulation steps off `self`."""


def configured_steps() -> int | None:
    """Return the accumulation steps of the outermost trainer that runs, or None where there is none or it has 1."""
    found: Any = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        read = TRAINERS.get(frame.f_globals.get("__name__", ""))
        if read is not None and (owner := frame.f_locals.get("self")) is not None:
            with contextlib.suppress(AttributeError):  # another class of that module, or another release
                found = read(owner)
        frame = frame.f_back
    return found if type(found) is int and found > 1 else None
