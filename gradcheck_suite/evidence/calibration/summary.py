"""The figures of a campaign, computed from its record, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.evidence.calibration.curve import OURS, WANTED, curve_from_json, share_found, size_found, surely
from gradcheck_suite.numerics.baselines import RIVALS

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """The smallest errors that are found in one dtype, at one place.

    Attributes:
        dtype: of the cases.
        place: where errors were planted.
        cases: how many.
        sizes: rule -> the smallest size that it finds in 99% of the cases; None where not even 1 is.
        half: the smallest size that the suite's bound finds in half of the cases.
        at_least: with 95% confidence, the share of all such cases in which the suite's bound finds its size.
    """

    dtype: str
    place: str
    cases: int
    sizes: Mapping[str, float | None]
    half: float | None
    at_least: float | None


def found(data: Data) -> Iterator[Found]:
    """Yield a row per dtype and place."""
    for dtype, curve in data["curves"].items():
        for place, rules in curve_from_json(curve).smallest.items():
            cases = sum(rules[OURS].values())
            sizes = {rule: size_found(rules[rule]) for rule in (OURS, *RIVALS)}
            exponent = max((k for k in rules[OURS] if sizes[OURS] == 2.0**-k), default=None)
            sure = None if exponent is None else surely(share_found(rules[OURS], exponent), cases)
            yield Found(dtype, place, cases, sizes, size_found(rules[OURS], 0.5), sure)


def rival_alarms(data: Data, dtype: str) -> dict[str, int]:
    """Return how often each rival blames a sound loop, losses under an autocast left out."""
    counts = data["alarms"].get(dtype, {}).get("rivals", {})
    return {rule: int(counts.get(rule, 0)) for rule in RIVALS}


def better(data: Data) -> list[str]:
    """Return one line for each place where a rule that blames no sound loop finds smaller errors than the bound."""
    lines = []
    for row in found(data):
        quiet = [rule for rule, alarms in rival_alarms(data, row.dtype).items() if not alarms]
        own = row.sizes[OURS]
        for rule in quiet:
            size = row.sizes[rule]
            if size is not None and (own is None or size < own):
                lines.append(f"{row.dtype}, {row.place}: {rule} finds {shown(size)}, the bound {shown(own)}")
    return lines


def false_alarms(data: Data) -> int:
    """Return how often the suite blames a sound loop."""
    return sum(len(tally["alarms"]) for tally in data["alarms"].values())


def checks(data: Data) -> int:
    """Return the number of checks that were made, in all dtypes."""
    return sum(tally["judged"] for tally in data["alarms"].values())


def shown(size: float | None) -> str:
    """Return a relative error as text."""
    return "none" if size is None else "1" if size == 1 else f"{size:.1e}"


def percent() -> str:
    """Return the share of cases in which an error of a size must be found, as text."""
    return f"{100 * WANTED:g}%"
