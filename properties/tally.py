"""What a run of the properties has seen of each reset mode, for the table under it.

Errors are those of every judged case. Times and bytes compare the modes on the same cases, and are given as ratios to
`set_to_none`: of a run on small models, which a busy machine slows as it likes, no more can be said.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gradcheck_suite.loops import MODES
from gradcheck_suite.measure.ledger import Ledger

AGAINST = "set_to_none"
COLUMNS = ("cases", "worst error / allowed", "time", "bytes moved", "peak bytes")


class Tally:
    """Sums by mode: cases, seconds, bytes; and the worst error over what is allowed."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def judge(self, mode: str, ratio: float) -> None:
        """Count a case that holds."""
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
        """Add what a loop's resets and accumulations moved, and its peak."""
        traffic = ledger.total("reset", "accumulate")
        self._sums[mode]["moved"] += traffic.read + traffic.written
        self._sums[mode]["peak"] += ledger.peak().bytes

    def add(self, other: Mapping[str, Mapping[str, float]]) -> None:
        """Add what another process has seen."""
        for mode, sums in other.items():
            for name, value in sums.items():
                own = self._sums[mode][name]
                self._sums[mode][name] = max(own, value) if name == "worst" else own + value

    def to_json(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return {mode: dict(sums) for mode, sums in self._sums.items()}

    def table(self) -> list[str]:
        """Return the lines of the table, none where no mode was seen."""
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
