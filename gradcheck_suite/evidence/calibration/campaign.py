"""The campaign: chunk after chunk is counted and added up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gradcheck_suite.evidence.calibration.alarms import Judge
from gradcheck_suite.evidence.calibration.coverage import drawn_layers, drawn_losses
from gradcheck_suite.evidence.calibration.curve import Curve
from gradcheck_suite.evidence.calibration.detection import curve_of
from gradcheck_suite.evidence.calibration.drawing import draw_cases
from gradcheck_suite.evidence.calibration.styles import LOOPS
from gradcheck_suite.evidence.calibration.tally import Tally
from gradcheck_suite.execution.devices import one_thread
from gradcheck_suite.schema.contract import assumptions_of

CHUNK = 1000
"""Checks in a chunk: less than a minute's work."""


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        checks: number of checks of sound loops, in all dtypes together.
        planted: number of cases in each dtype that errors are planted in.
        seed: the same seed and versions draw the same cases.
        dtypes: names from `DTYPES`.
    """

    checks: int
    planted: int
    seed: int
    dtypes: tuple[str, ...]


def shares(total: int, dtypes: Sequence[str]) -> dict[str, int]:
    """Return how many of all the checks each dtype gets; the first ones get what is left over."""
    share, left = divmod(total, len(dtypes))
    return {dtype: share + (i < left) for i, dtype in enumerate(dtypes)}


def count_alarms(settings: Settings, progress: Callable[[int], None], into: dict[str, Tally]) -> None:
    """Judge sound loops until every dtype has its share of the checks.

    Args:
        settings: what was asked for.
        progress: called with a number of checks whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk, so that an interrupted caller keeps them.
    """

    def count(dtype: str, chunk: int, limit: int) -> Tally:
        return alarms_in_chunk(dtype, chunk, limit, settings.seed, progress)

    wanted = shares(settings.checks, settings.dtypes)
    _fill(into, wanted, CHUNK, Tally, lambda tally: tally.checks, count)


def trace_curves(settings: Settings, progress: Callable[[int], None], into: dict[str, Curve]) -> None:
    """Plant errors in the cases that sound loops are judged on, `settings.planted` of them in each dtype.

    Args:
        settings: what was asked for.
        progress: called with a number of cases whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk.
    """

    def count(dtype: str, chunk: int, limit: int) -> Curve:
        curve = Curve()
        for drawn in draw_cases(dtype, chunk, cases_for(CHUNK), settings.seed)[:limit]:
            curve.add(curve_of(drawn, settings.seed))
            progress(1)
        return curve

    wanted = dict.fromkeys(settings.dtypes, settings.planted)
    _fill(into, wanted, cases_for(CHUNK), Curve, lambda curve: curve.cases, count)


Counts = TypeVar("Counts", Tally, Curve)


def _fill(
    into: dict[str, Counts],
    wanted: Mapping[str, int],
    size: int,
    empty: Callable[[], Counts],
    done: Callable[[Counts], int],
    count: Callable[[str, int, int], Counts],
) -> None:
    """Add chunks of at most `size` to every dtype's counts until they come to what is wanted.

    The dtypes take turns, so that a run that is stopped early has counts of all of them.

    Args:
        into: dtype -> counts.
        wanted: dtype -> how much is to be counted.
        size: of a chunk.
        empty: returns no counts.
        done: returns how much is counted.
        count: (dtype, chunk, limit) -> the counts of a chunk.
    """
    with one_thread():
        for chunk in itertools.count():
            waiting = [dtype for dtype in wanted if done(into.setdefault(dtype, empty())) < wanted[dtype]]
            if not waiting:
                return
            for dtype in waiting:
                into[dtype].add(count(dtype, chunk, min(size, wanted[dtype] - done(into[dtype]))))


def alarms_in_chunk(dtype: str, chunk: int, limit: int, seed: int, progress: Callable[[int], None]) -> Tally:
    """Judge sound loops on the cases of one chunk, `limit` checks in all."""
    total = Tally()
    for drawn in draw_cases(dtype, chunk, cases_for(limit), seed):
        if total.checks >= limit:
            break
        total.add(Judge(drawn).run(limit - total.checks, lambda: progress(1)))
    return total


def cases_for(checks: int) -> int:
    """Return how many cases have loops for that many checks: loops that assume nothing are judged on every case."""
    return math.ceil(checks / sum(not assumptions_of(loop) for loop in LOOPS.values()))


def record(settings: Settings, tallies: Mapping[str, Tally], curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return what was counted as the data of a record.

    Coverage says which kinds of layers and losses that the strategies draw are in no case that was judged.
    """
    layers = {kind for tally in tallies.values() for kind in tally.layers}
    losses = {kind for tally in tallies.values() for kind in tally.losses}
    wanted = {"layers": (drawn_layers(), layers), "losses": (drawn_losses(), losses)}
    return {
        "asked": {"checks": settings.checks, "planted": settings.planted, "seed": settings.seed,
                  "dtypes": list(settings.dtypes)},
        "alarms": {dtype: tally.to_json() for dtype, tally in tallies.items()},
        "curves": {dtype: curve.to_json() for dtype, curve in curves.items()},
        "coverage": {
            what: {"reached": len(drawn & reached), "missing": sorted(drawn - reached)}
            for what, (drawn, reached) in wanted.items()
        },
        "loops": len(LOOPS),
    }  # fmt: skip
