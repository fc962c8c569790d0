"""How long the parent waits for ranks, and where the ones are that do not answer.

A rank that waits inside a collective runs no Python code, so no alarm can stop it: the parent looks at it from outside.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gradcheck_suite.execution.time_limits import IDLE, STARTING, STARTUP_S, rest_of_limit

STILL_S = 1.5
"""Seconds in which ranks that wait for each other forever use no processor."""
PAUSE_S = 0.25
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/torch/_ops.py")
"""Places of torch in which a rank waits for the others."""
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


class Patience:
    """The time that ranks have for one case.

    Attributes:
        pause: seconds until it is to be asked again.
        deadlock: whether it ended because ranks wait for each other, and not because of the time limit.
    """

    def __init__(self, pids: Sequence[int], folder: Path, time_limit_s: float | None) -> None:
        """Start the time.

        Args:
            pids: the ranks' process ids.
            folder: with the files that ranks write their stacks to.
            time_limit_s: the limit, None for none.
        """
        self._pids, self._folder, self._limit = list(pids), folder, time_limit_s
        self.pause, self.deadlock = PAUSE_S, False
        self._first = self._began = self._still_since = time.monotonic()
        self._at_start = self._last = self._processor()

    def is_over(self, open_ranks: Sequence[int]) -> bool:
        """Return whether no answer is to be expected any more from the ranks that have not answered yet."""
        now, used = time.monotonic(), self._processor()
        if sum(used) - sum(self._last) > IDLE * PAUSE_S:
            self._still_since, self._last = now, used
        if now - self._still_since > STILL_S:
            self.deadlock = all(_waits(self.stack(rank)) for rank in open_ranks)
            self._still_since = now
        return self.deadlock or self._is_late(now, used, open_ranks)

    def _is_late(self, now: float, used: list[float], open_ranks: Sequence[int]) -> bool:
        passed = now - self._began
        if self._limit is None or passed < self._limit:
            return False
        if any(mark in self.stack(rank) for rank in open_ranks for mark in STARTING) and now - self._first < STARTUP_S:
            self._began, self._at_start = now, used
            return False
        # ranks that wait for one which computes are not idle
        computed = max(b - a for a, b in zip(self._at_start, used, strict=True))
        return not rest_of_limit(self._limit, passed, computed)

    def stack(self, rank: int) -> str:
        """Return the Python stack of a rank, its innermost call first; empty where it has ended."""
        file = self._folder / f"stack-{rank}"
        try:
            file.write_text("")
            os.kill(self._pids[rank], signal.SIGUSR1)
            for _ in range(100):
                time.sleep(0.005)
                if (text := file.read_text()).endswith("\n"):
                    return text
        except OSError:
            pass
        return ""

    def _processor(self) -> list[float]:
        return [_processor_s(pid) for pid in self._pids]


def place_of(stack: str) -> str:
    """Return where a rank is, such as `all_reduce (my_loop.py, line 12)`."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    if not frames:
        return "an unknown place"
    foreign = ("/torch/", "/gradcheck_suite/execution/", "<frozen")
    own = next((f for f in frames if not any(mark in f["file"] for mark in foreign)), frames[-1])
    inner = [f for f in frames[: frames.index(own)] if "/torch/" in f["file"] and f["name"] != "wrapper"]
    where = f"{Path(own['file']).name}, line {own['line']}"
    return f"{inner[-1]['name']} ({where})" if inner else where


def _waits(stack: str) -> bool:
    first = _FRAME.search(stack)
    return first is not None and any(place in first["file"] for place in WAITING)


def _processor_s(pid: int) -> float:
    """Return the processor seconds of a process so far; where the system does not tell, of this moment."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        # a process that has ended uses none; elsewhere than on Linux every rank seems to compute
        return 0.0 if Path("/proc/self/stat").exists() else time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
