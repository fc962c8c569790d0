"""A stopwatch, such that a busy machine searches as far as an idle one."""

from __future__ import annotations

import time


class Stopwatch:
    """Measures time from when it is made."""

    def __init__(self) -> None:
        self._thread, self._clock = time.thread_time(), time.perf_counter()

    def passed(self) -> float:
        """Return the seconds that this thread computed since then, or a quarter of the clock's if that is more."""
        return max(time.thread_time() - self._thread, (time.perf_counter() - self._clock) / 4)
