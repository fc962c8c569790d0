"""Places in the user's program, read off the stack: `train.py:12`."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gradcheck_suite.core.text import file_text

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SUITE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Place:
    """A place in the program.

    Attributes:
        line: `file:line` of the innermost frame outside torch and the suite.
        path: `file:line` of the frames of the user's own files, innermost first.
    """

    line: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.path or self.path[0] == self.line:
            return self.line
        return f"{self.line} < {self.path[0]}"


NOWHERE = Place("?")


@lru_cache(maxsize=4096)
def _kind_of_file(filename: str) -> str:
    # `contextlib` stands between a user's line and what it calls under every context manager
    if filename.startswith(("<frozen", "<eval_with_key>", _TORCH, _SUITE)) or filename == contextlib.__file__:
        return "skip"
    return "library" if filename.startswith(_INSTALLED) else "user"


def is_users(filename: str | None) -> bool:
    """Return whether a source file is the user's own: neither of torch, nor of the suite, nor an installed package."""
    return filename is not None and _kind_of_file(filename) == "user"


def is_own(filename: str) -> bool:
    """Return whether a source file is the suite's."""
    return filename.startswith(_SUITE)


def shown(filename: str) -> str:
    """Return a file as a user would name it: relative to the folder that the program runs in, or a notebook's cell."""
    cell = file_text(filename)
    return _relative(filename) if cell == filename else cell


@lru_cache(maxsize=4096)
def _relative(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return filename if relative.startswith("..") else relative


MOST_FRAMES = 6


def here() -> Place:
    """Return the place in the user's program that runs."""
    frame: FrameType | None = sys._getframe(1)
    line, path = "", list[str]()
    # several frames: two losses that go backward through one helper of a trainer are two places
    while frame is not None and len(path) < MOST_FRAMES:
        kind = _kind_of_file(frame.f_code.co_filename)
        if kind != "skip":
            place = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
            line = line or place
            if kind == "user":
                path.append(place)
        frame = frame.f_back
    return Place(line, tuple(path)) if line else NOWHERE


MOST_LINES = 4


def lines_with(call: str, place: Place) -> list[str]:
    """Return where the user's files of a place have a call, a few at most: torch has no hook for `zero_grad`."""
    files = dict.fromkeys(line.rpartition(":")[0] for line in place.path)
    lines = ((f"{file}:{n}", text) for file in files for n, text in enumerate(linecache.getlines(file), 1))
    return [line for line, text in lines if call in text.partition("#")[0]][:MOST_LINES]


_LINE = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


def in_trace(entries: Iterable[str]) -> str | None:
    """Return the innermost place of the user's own files in a formatted stack, or None."""
    for entry in reversed(list(entries)):
        found = _LINE.search(entry)
        if found is not None and _kind_of_file(found["file"]) == "user":
            return f"{shown(found['file'])}:{found['line']}"
    return None


def _subclasses(kind: type) -> set[type]:
    children: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, children))


def living(kind: type) -> list[Any]:
    """Return every object of a class that the garbage collector knows; lazy proxies are not touched."""
    # by `type`, not `isinstance`, which reads `__class__` and so would import what a lazy proxy stands for
    kinds = _subclasses(kind)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]
