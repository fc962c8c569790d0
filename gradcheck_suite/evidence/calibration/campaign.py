"""The campaign: chunk after chunk, each counted once, stored and added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.evidence.calibration.alarms import Judge
from gradcheck_suite.evidence.calibration.coverage import drawn_layers, drawn_losses
from gradcheck_suite.evidence.calibration.curve import Curve, curve_from_json
from gradcheck_suite.evidence.calibration.detection import curve_of
from gradcheck_suite.evidence.calibration.drawing import draw_cases
from gradcheck_suite.evidence.calibration.store import Store, made_by
from gradcheck_suite.evidence.calibration.styles import LOOPS
from gradcheck_suite.evidence.calibration.tally import Tally, tally_from_json
from gradcheck_suite.execution.devices import one_thread
from gradcheck_suite.schema.contract import assumptions_of

CHUNK = 1000
"""Checks in a chunk: less than a minute's work."""

CURVE = tuple(f"evidence/calibration/{name}.py" for name in ("curve", "detection", "planting"))
"""Modules that decide the detection curve, beside those that decide a verdict."""


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        checks: of sound loops, in all dtypes together.
        planted: cases in each dtype that errors are planted in.
        seed: same seed and versions, same cases.
        dtypes: which.
    """

    checks: int
    planted: int
    seed: int
    dtypes: tuple[str, ...]


def shares(total: int, dtypes: Sequence[str]) -> dict[str, int]:
    """Return how many of all the checks each dtype gets; the first ones get what is left over."""
    share, left = divmod(total, len(dtypes))
    return {dtype: share + (i < left) for i, dtype in enumerate(dtypes)}


def count_alarms(settings: Settings, store: Store, progress: Callable[[int], None], into: dict[str, Tally]) -> None:
    """Judge sound loops until every dtype has its share of the checks; what was stored is not judged again.

    Args:
        settings: what was asked for.
        store: of chunks.
        progress: called with a number of checks whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk, so that whoever interrupts has what was counted.
    """
    wanted = shares(settings.checks, settings.dtypes)
    chunk = 0
    with one_thread():
        while waiting := [d for d in settings.dtypes if into.setdefault(d, Tally()).checks < wanted[d]]:
            # dtype by dtype in turn, so that what is stopped early has looked at all of them
            for dtype in waiting:
                limit = min(CHUNK, wanted[dtype] - into[dtype].checks)
                key = {"counts": "alarms", "seed": settings.seed, "dtype": dtype, "chunk": chunk, "limit": limit,
                       "by": made_by()}  # fmt: skip
                if (stored := store.get(key)) is None:
                    tally = alarms_in_chunk(dtype, chunk, limit, settings.seed, progress)
                    store.put(key, tally.to_json())
                else:
                    tally = tally_from_json(stored)
                    progress(tally.checks)
                into[dtype].add(tally)
            chunk += 1


def alarms_in_chunk(dtype: str, chunk: int, limit: int, seed: int, progress: Callable[[int], None]) -> Tally:
    """Judge sound loops on the cases of one chunk, `limit` checks in all."""
    total = Tally()
    for drawn in draw_cases(dtype, chunk, cases_for(limit), seed):
        if total.checks >= limit:
            break
        total.add(Judge(drawn).run(limit - total.checks, lambda: progress(1)))
    return total


def cases_for(checks: int) -> int:
    """Return how many cases have loops for that many checks: every one has those that rely on nothing."""
    return math.ceil(checks / sum(not assumptions_of(loop) for loop in LOOPS.values()))


def trace_curves(settings: Settings, store: Store, progress: Callable[[int], None], into: dict[str, Curve]) -> None:
    """Plant errors in the same cases that sound loops are judged on, `settings.planted` of them in each dtype.

    Args:
        settings: what was asked for.
        store: of chunks.
        progress: called with a number of cases whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk.
    """
    chunk = 0
    with one_thread():
        while waiting := [d for d in settings.dtypes if into.setdefault(d, Curve()).cases < settings.planted]:
            for dtype in waiting:
                limit = min(cases_for(CHUNK), settings.planted - into[dtype].cases)
                key = {"counts": "curve", "seed": settings.seed, "dtype": dtype, "chunk": chunk, "limit": limit,
                       "by": made_by(CURVE)}  # fmt: skip
                if (stored := store.get(key)) is None:
                    curve = Curve()
                    for drawn in draw_cases(dtype, chunk, cases_for(CHUNK), settings.seed)[:limit]:
                        curve.add(curve_of(drawn, settings.seed))
                        progress(1)
                    store.put(key, curve.to_json())
                else:
                    curve = curve_from_json(stored)
                    progress(curve.cases)
                into[dtype].add(curve)
            chunk += 1


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
