"""Which line of a traceback is the user's: the last one outside this package and outside what is installed."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")


def users_line(error: BaseException) -> str:
    """Return `FILE, line N` of where in the user's code an exception was on its way, or of where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    frame = (own or foreign or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"
