"""The source lines of exported operations and of errors, in the user's code."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)
_BRIDGE = str(Path(__file__).parent)


def source_line(node: fx.Node) -> str:
    """Return ` (FILE, line N: code)` of the innermost frame outside torch and this package, or nothing."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    foreign = [f for f in frames if _is_the_users(f["file"])]
    if not frames:
        return ""
    frame = (foreign or frames)[-1]
    return f" ({Path(frame['file']).name}, line {frame['line']}: {frame['code'].strip()})"


def source_line_of_error(error: BaseException) -> str:
    """Return ` (FILE, line N: code)` of an exception's innermost frame outside torch and this package, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_the_users(frame.filename):
            return f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
    return ""


def _is_the_users(file: str) -> bool:
    return not file.startswith((_TORCH, _BRIDGE, "<"))
