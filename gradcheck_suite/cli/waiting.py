"""What the user waits for, and how long: said on a terminal within a second, and counted from the
command's begin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

IMPORTS = "importing torch and JAX"


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Say on a terminal's standard error what is waited for, until it is there.

    Nothing is said elsewhere, as in a pipe.

    Args:
        what: what is waited for, such as `"importing torch and JAX"`.

    Yields:
        A function that says something else in its place.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # what is imported may print: kept clear of the line, and sent where it would go
    with Console(stderr=True).status(f"{what} ...") as status:
        yield lambda text: status.update(f"{text} ...")


@dataclass
class LapTimer:
    """Tells the seconds that the user has waited for one result after another."""

    _since: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        """Return the seconds since the last result, or since the begin."""
        before = self._since
        self._since = time.perf_counter()
        return self._since - before
