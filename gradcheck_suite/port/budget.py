"""How many candidates a search for a cause may try: a count, so that a verdict is the same on every
machine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

SECONDS = 150.0
"""Wall-clock time after which a judgement stops, and says so. No name is given that depends on when it stopped."""


@dataclass
class Budget:
    """What may still be tried: without arguments, by a judgement that begins now.

    Attributes:
        left: number of candidates.
        until: when the whole judgement stops, by the monotonic clock.
        stopped: whether that was before the candidates were tried.
    """

    left: float = math.inf
    until: float = field(default_factory=lambda: time.monotonic() + SECONDS)
    stopped: bool = False

    @property
    def late(self) -> bool:
        """Whether the time of the judgement is over."""
        return time.monotonic() > self.until

    def of(self, candidates: int) -> Budget:
        """Return that of one search."""
        return Budget(candidates, self.until)

    def spend(self) -> bool:
        """Take a candidate; return whether it may be tried."""
        self.left -= 1
        self.stopped = self.stopped or self.late
        return self.left >= 0 and not self.stopped

    @property
    def words(self) -> str:
        """Why the search ended without a cause, where candidates are left that were not tried."""
        if self.stopped:
            return f"; the search for a cause was stopped after {SECONDS:.0f} s"
        return (
            "; the search for a cause ended before all candidates were tried"
            if self.left < 0
            else ""
        )
