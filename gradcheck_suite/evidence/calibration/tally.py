"""Counts of a campaign as plain data: chunks are counted separately, stored and added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

BINS = 20
"""Number of bins of equal width from 0 to 1 for errors over what was allowed."""


def add_counts(into: Any, other: Any) -> Any:
    """Return two values of the same type added up: numbers, lists, Counters, dictionaries by key, objects by field."""
    if isinstance(into, Counter):
        into.update(other)
        return into
    if isinstance(into, dict):
        return into | {
            key: add_counts(into[key], value) if key in into else deepcopy(value) for key, value in other.items()
        }
    if hasattr(into, "add"):
        into.add(other)
        return into
    return into + other


@dataclass
class Spread:
    """A histogram of ratios of error to bound.

    Attributes:
        counts: of each of `BINS` bins; the last one holds what is larger as well.
        largest: of all ratios.
    """

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    largest: float = 0.0

    def note(self, ratio: float) -> None:
        """Count a ratio."""
        self.counts[max(0, min(BINS - 1, int(min(ratio, 1.0) * BINS)))] += 1
        self.largest = max(self.largest, ratio)

    def quantile(self, share: float) -> float | None:
        """Return an upper bound of a share of the ratios, to the width of a bin; None where there are no ratios."""
        wanted, seen = share * sum(self.counts), 0
        for i, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((i + 1) / BINS, self.largest)
        return None

    def add(self, other: Spread) -> None:
        """Add other counts to these."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.largest = max(self.largest, other.largest)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {"counts": self.counts, "largest": self.largest}


def spread_from_json(data: Mapping[str, Any]) -> Spread:
    """Read what `Spread.to_json` wrote."""
    return Spread(list(data["counts"]), float(data["largest"]))


@dataclass
class Tally:
    """Counts of checks of sound loops, in one dtype.

    Attributes:
        checks: number of checks: one loop judged on one case.
        cases: number of different cases.
        elements: number of elements of gradients, compared in all the checks.
        skipped: reason why a check could not be made -> number of checks.
        alarms: sound loops that were blamed, each with its case.
        findings: disagreement of torch and JAX -> number of checks.
        over: kind of layer -> ratios of error to bound of the checks whose case has that layer; `""` -> of all checks.
        drawn_on: ratios of the gradients that needed the Monte Carlo part of the bound.
        layers: kind of layer -> checks that were made on cases with it.
        losses: kind of loss -> checks that were made on cases with it.
        loops: loop -> checks that were made of it.
        rivals: rival rule -> checks in which it blames the sound loop, losses under an autocast left out, since their
            precision differs from the case's.
        autocast: number of checks whose losses were under an autocast.
        rivals_autocast: rival rule -> checks under an autocast in which it blames the sound loop.
    """

    checks: int = 0
    cases: int = 0
    elements: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    findings: Counter[str] = field(default_factory=Counter)
    over: dict[str, Spread] = field(default_factory=dict)
    drawn_on: Spread = field(default_factory=Spread)
    layers: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    loops: Counter[str] = field(default_factory=Counter)
    rivals: Counter[str] = field(default_factory=Counter)
    autocast: int = 0
    rivals_autocast: Counter[str] = field(default_factory=Counter)

    @property
    def judged(self) -> int:
        """Number of checks that were made, the skipped ones left out."""
        return self.checks - self.skipped.total()

    def note_ratio(self, kinds: Iterable[str], ratio: float) -> None:
        """Count the ratio of a check whose case has these kinds of layers."""
        for kind in ("", *kinds):
            self.over.setdefault(kind, Spread()).note(ratio)

    def add(self, other: Tally) -> None:
        """Add other counts to these."""
        for name in _NAMES:
            setattr(self, name, add_counts(getattr(self, name), getattr(other, name)))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {"judged": self.judged} | {name: _plain(getattr(self, name)) for name in _NAMES}


_NAMES = [field.name for field in fields(Tally)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in sorted(value.items())}
    return value.to_json() if isinstance(value, Spread) else value


def tally_from_json(data: Mapping[str, Any]) -> Tally:
    """Read what `Tally.to_json` wrote."""
    values = {name: data[name] for name in _NAMES}
    counters = {name: Counter(value) for name, value in values.items() if isinstance(value, dict)}
    over = {kind: spread_from_json(spread) for kind, spread in data["over"].items()}
    return Tally(**values | counters | {"over": over, "drawn_on": spread_from_json(data["drawn_on"])})
