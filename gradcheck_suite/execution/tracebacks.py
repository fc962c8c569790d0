"""Exceptions of user code: the line that raised them, and their most likely cause."""

from __future__ import annotations

import dataclasses
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")


def users_line(error: BaseException) -> str:
    """Return `FILE, line N` of an exception's innermost frame in user code, or of the frame that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    frame = (own or foreign or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def is_import_failure(error: BaseException) -> bool:
    """Return whether an exception says that something could not be imported.

    It is an `ImportError`, an exception at the top level of a module, or an exception raised in place of one of these.
    """
    if isinstance(error, ImportError) or "<module>" in _functions(error):
        return True
    if error.__cause__ is not None:
        return is_import_failure(error.__cause__)
    context = error.__context__
    if context is None or error.__suppress_context__:
        return False
    # a handler that goes on without the import, and fails later in another function, failed by itself
    return _functions(error)[-1:] == _functions(context)[:1] and is_import_failure(context)


def _functions(error: BaseException) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


_BY_TEXT = (
    (
        "does not require grad and does not have a grad_fn",
        "the loss carries no graph: look for torch.no_grad or inference_mode around the loop, and for detach or item",
    ),
    (
        "Inference tensors cannot be saved for backward",
        "the loop runs in inference mode: remove torch.inference_mode",
    ),
    (
        "backward through the graph a second time",
        "backward was called twice on the same loss: compute the loss again for each micro-batch",
    ),
    (
        # https://github.com/pytorch/pytorch/issues/143580
        "expect_autograd_hooks_ INTERNAL ASSERT",
        "with static_graph=True, the first forward and backward of a run must not be under no_sync",
    ),
    (
        "Default process group has not been initialized",
        "the loop needs several ranks: verify it with --ranks 2",
    ),
)


def hint(error: BaseException) -> str | None:
    """Return the likely cause of an exception and what to do, or None."""
    if isinstance(error, SystemExit):
        return "the loop ended the program: return from the loop instead"
    if isinstance(error, dataclasses.FrozenInstanceError):
        return "a TrainingRun cannot be changed: keep what the loop needs in variables of its own"
    text = str(error)
    return next((meaning for part, meaning in _BY_TEXT if part in text), None)
