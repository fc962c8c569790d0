"""The source lines of exported operations and of errors, in the user's code."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def source_line(node: fx.Node) -> str:
    """Return ` (FILE, line N: code)` of the innermost frame in the user's code, or an empty string."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    foreign = [f for f in frames if _is_the_users(f["file"])]
    if not frames:
        return ""
    frame = (foreign or frames)[-1]
    return f" ({Path(frame['file']).name}, line {frame['line']}: {frame['code'].strip()})"


@dataclass(frozen=True)
class Place:
    """A line of the user's code, or of a library other than torch.

    Attributes:
        file: its path.
        number: of the line.
        line: its code.
        function: the function's full name, with its module.
    """

    file: str
    number: int
    line: str
    function: str

    @property
    def is_a_librarys(self) -> bool:
        """Whether the line is in an installed package."""
        return any(part in ("site-packages", "dist-packages") for part in Path(self.file).parts)


def place_of_error(error: BaseException) -> Place | None:
    """Return an exception's innermost line in the user's code, or None."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if _is_the_users(code.co_filename):
            line = linecache.getline(code.co_filename, number).strip()
            return Place(code.co_filename, number, line, f"{frame.f_globals.get('__name__')}.{code.co_qualname}")
    return None


def _is_the_users(file: str) -> bool:
    return not file.startswith((_TORCH, _PACKAGE, "<"))
