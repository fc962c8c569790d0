"""Where an audit prints."""

from __future__ import annotations

import sys
from typing import TextIO


class StandardError:
    """The standard error of the time when the audit began, which the program may have replaced
    since then.

    Attributes:
        begun: that stream.
    """

    def __init__(self) -> None:
        self.begun: TextIO = sys.stderr

    @property
    def now(self) -> TextIO:
        """The stream, or the one of now where that was closed."""
        is_gone = self.begun is None or getattr(self.begun, "closed", False)
        return sys.stderr if is_gone else self.begun
