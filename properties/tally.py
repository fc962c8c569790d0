"""Figures of each reset mode, collected while the properties run, for the table at the end of the run.

Errors are those of every judged case. Times and bytes compare the modes on the same cases. They are ratios to
`set_to_none`, since absolute times on small models and a busy machine mean little.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gradcheck_suite.loops.reset_modes import MODES
from studies.ledger import Ledger

AGAINST = "set_to_none"
COLUMNS = ("cases", "worst error / allowed", "time", "bytes moved", "peak bytes")


class Tally:
    """Sums by mode: cases, seconds, bytes; and the worst error over what is allowed."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def judge(self, mode: str, ratio: float) -> None:
        """Count a case on which the mode holds."""
        if mode in MODES:
            self._sums[mode]["cases"] += 1
            self._sums[mode]["worst"] = max(self._sums[mode]["worst"], ratio)

    @contextmanager
    def timed(self, mode: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.perf_counter()
        yield
        if mode in MODES:
            self._sums[mode]["seconds"] += time.perf_counter() - started

    def weigh(self, mode: str, ledger: Ledger) -> None:
        """Add the bytes that a loop's resets and accumulations moved, and its peak."""
        self._sums[mode]["moved"] += ledger.total("reset", "accumulate").moved
        self._sums[mode]["peak"] += ledger.peak().bytes

    def add(self, other: Mapping[str, Mapping[str, float]]) -> None:
        """Add the sums of another process."""
        for mode, sums in other.items():
            for name, value in sums.items():
                own = self._sums[mode][name]
                self._sums[mode][name] = max(own, value) if name == "worst" else own + value

    def to_json(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return {mode: dict(sums) for mode, sums in self._sums.items()}

    def table(self) -> list[str]:
        """Return the lines of the table; none where no mode was counted."""
        if not self._sums:
            return []
        width = max(map(len, MODES))
        lines = [f"{'mode':<{width}}  " + "  ".join(f"{column:>{max(8, len(column))}}" for column in COLUMNS)]
        for mode in MODES:
            cells = (f"{self._sums[mode]['cases']:.0f}", f"{self._sums[mode]['worst']:.2g}", *self._ratios(mode))
            padded = (f"{cell:>{max(8, len(column))}}" for cell, column in zip(cells, COLUMNS, strict=True))
            lines.append(f"{mode:<{width}}  " + "  ".join(padded))
        return [*lines, f"time, bytes moved by resets and accumulations, and peaks are ratios to {AGAINST}"]

    def _ratios(self, mode: str) -> Iterator[str]:
        for name in ("seconds", "moved", "peak"):
            own, against = self._sums[mode][name], self._sums[AGAINST][name]
            yield f"{own / against:.2f}" if own and against else "-"


TALLY = Tally()
