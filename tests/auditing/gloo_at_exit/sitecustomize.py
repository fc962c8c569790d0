"""Lets torch's Gloo threads finish before a rank's interpreter ends.

Python imports this by its name. A thread that releases a collective after the interpreter's end has
begun waits for the GIL, which ends the thread, and the process with SIGABRT: torch's race, seen in
`studies/tests/test_findings_on_ranks.py`, with or without an audit.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

QUIET = 3
"""Looks in a row, 10 ms apart, at which all threads must sleep."""


def _busy() -> bool:
    """Say whether a Gloo thread of this process computes, or waits for a processor."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(FileNotFoundError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop" and rest.split()[0] != "S":
                return True
    return False


@atexit.register
def _wait() -> None:
    end, quiet = time.monotonic() + 60, 0
    while quiet < QUIET and time.monotonic() < end:
        quiet = 0 if _busy() else quiet + 1
        time.sleep(0.01)
