"""Counts of a campaign, as plain data that adds up: chunks are counted one by one, stored, and summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BINS = 20
"""Of equal width from 0 to 1, for errors over what was allowed."""


@dataclass
class Spread:
    """How ratios of error to bound are spread.

    Attributes:
        counts: of each of `BINS` bins; the last one holds what is larger as well.
        largest: of all.
    """

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    largest: float = 0.0

    def note(self, ratio: float) -> None:
        """Count a ratio."""
        self.counts[max(0, min(BINS - 1, int(min(ratio, 1.0) * BINS)))] += 1
        self.largest = max(self.largest, ratio)

    def quantile(self, share: float) -> float | None:
        """Return what a share of the ratios are at most, to the width of a bin; None where there are no ratios."""
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
    """What checks of sound loops came to, in one dtype.

    Attributes:
        checks: how many: one loop judged on one case.
        cases: how many different ones.
        elements: of gradients, compared in all the checks.
        skipped: why a check could not be made -> how many.
        alarms: sound loops that were blamed, each with its case.
        findings: what torch and JAX disagreed about -> how often.
        over: ratios of error to bound: of all checks under `""`, and of those whose case has a kind of layer.
        drawn_on: ratios of those gradients that needed the part of the bound which is drawn.
        layers: checks that were made, by kind of layer in their case.
        losses: likewise by kind of loss.
        loops: likewise by loop.
        rivals: checks in which another rule blames the sound loop, by rule; those of losses under an autocast, whose
            precision is another one, are not among them.
        autocast: checks whose losses were under an autocast.
        rivals_autocast: those in which another rule blames the sound loop, by rule.
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
        """Checks that were made, the skipped ones left out."""
        return self.checks - self.skipped.total()

    def note_ratio(self, kinds: Iterable[str], ratio: float) -> None:
        """Count the ratio of a check whose case has these kinds of layers."""
        for kind in ("", *kinds):
            self.over.setdefault(kind, Spread()).note(ratio)

    def add(self, other: Tally) -> None:
        """Add other counts to these."""
        for name in ("checks", "cases", "elements", "autocast"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("skipped", "findings", "layers", "losses", "loops", "rivals", "rivals_autocast"):
            getattr(self, name).update(getattr(other, name))
        self.alarms += other.alarms
        self.drawn_on.add(other.drawn_on)
        for kind, spread in other.over.items():
            self.over.setdefault(kind, Spread()).add(spread)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {
            "checks": self.checks,
            "judged": self.judged,
            "cases": self.cases,
            "elements": self.elements,
            "skipped": dict(self.skipped.most_common()),
            "alarms": self.alarms,
            "findings": dict(self.findings),
            "over": {kind: spread.to_json() for kind, spread in sorted(self.over.items())},
            "drawn_on": self.drawn_on.to_json(),
            "layers": dict(sorted(self.layers.items())),
            "losses": dict(sorted(self.losses.items())),
            "loops": dict(sorted(self.loops.items())),
            "rivals": dict(sorted(self.rivals.items())),
            "autocast": self.autocast,
            "rivals_autocast": dict(sorted(self.rivals_autocast.items())),
        }


def tally_from_json(data: Mapping[str, Any]) -> Tally:
    """Read what `Tally.to_json` wrote."""
    return Tally(
        checks=data["checks"],
        cases=data["cases"],
        elements=data["elements"],
        skipped=Counter(data["skipped"]),
        alarms=list(data["alarms"]),
        findings=Counter(data["findings"]),
        over={kind: spread_from_json(spread) for kind, spread in data["over"].items()},
        drawn_on=spread_from_json(data["drawn_on"]),
        layers=Counter(data["layers"]),
        losses=Counter(data["losses"]),
        loops=Counter(data["loops"]),
        rivals=Counter(data["rivals"]),
        autocast=data["autocast"],
        rivals_autocast=Counter(data["rivals_autocast"]),
    )
