"""The source lines of exported operations and of errors, in the user's code."""

from __future__ import annotations

import os
import re
import traceback
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


def frame_of_error(error: BaseException) -> traceback.FrameSummary | None:
    """Return an exception's innermost frame in the user's code, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_the_users(frame.filename)), None)


def _is_the_users(file: str) -> bool:
    return not file.startswith((_TORCH, _PACKAGE, "<"))
