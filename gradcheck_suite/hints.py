"""What an exception that ends a loop most likely means, where a known one does."""

from __future__ import annotations

import dataclasses

_BY_TEXT = (
    (
        "does not require grad and does not have a grad_fn",
        "the loss carries no graph: look for torch.no_grad or inference_mode around the loop, and for detach or item",
    ),
    (
        "Inference tensors cannot be saved for backward",
        "the loop runs in inference mode: take torch.inference_mode away from it",
    ),
    (
        "backward through the graph a second time",
        "the same loss went through backward twice: compute it anew for each micro-batch",
    ),
)


def hint(error: BaseException) -> str | None:
    """Return what to look for, or None where nothing is known about such an error."""
    if isinstance(error, SystemExit):
        return "it ended the program: a loop returns when it is done"
    if isinstance(error, dataclasses.FrozenInstanceError):
        return "a TrainingRun cannot be changed: keep what the loop needs in variables of its own"
    text = str(error)
    return next((meaning for part, meaning in _BY_TEXT if part in text), None)
