"""Places in the user's program, read off the stack: `train.py:12`."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SUITE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Place:
    """A place in the program.

    Attributes:
        line: `file:line` of the innermost frame outside torch and the suite.
        path: `file:line` of every frame of the user's own files, innermost first.
    """

    line: str
    path: tuple[str, ...]


NOWHERE = Place("?", ())


@lru_cache(maxsize=4096)
def _kind(filename: str) -> str:
    """Return `skip`, `library` or `user` for a source file."""
    if filename.startswith(("<frozen", "<eval_with_key>", _TORCH, _SUITE)) or filename == contextlib.__file__:
        return "skip"
    return "library" if filename.startswith(_INSTALLED) else "user"


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except ValueError:
        return filename
    return filename if relative.startswith("..") else relative


DENOMINATOR = "num_items_in_batch"
"""The argument in which transformers' Trainer hands a loss the count of the window, over all its micro-batches."""


def declared_denominator() -> Any:
    """Return the count that a trainer has handed to the function that calls a loss, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if DENOMINATOR in frame.f_code.co_varnames:
            return frame.f_locals.get(DENOMINATOR)
        frame = frame.f_back
    return None


def here() -> Place:
    """Return the place in the user's program that runs; frames of torch and of the suite are left out."""
    frame: FrameType | None = sys._getframe(1)
    line, path = "", []
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _kind(filename)
        if kind != "skip":
            if not line:
                line = f"{_shown(filename)}:{frame.f_lineno}"
            if kind == "user":
                path.append(f"{_shown(filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return Place(line, tuple(path)) if line else NOWHERE
