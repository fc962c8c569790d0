"""The detection curve as counts that add up: in how many cases each rule finds an error of each size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from gradcheck_suite.evidence.calibration.tally import add_counts
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF

OURS = "gradcheck-suite"
NEVER = -1
"""Stands in place of an exponent where not even an error of relative size 1 is found."""
WANTED = 0.99


def exponents(dtype: str) -> range:
    """Return k = 0, 1, ...: errors of size 2**-k are planted, from 1 down to one unit roundoff."""
    return range(round(-math.log2(UNIT_ROUNDOFF[dtype])) + 1)


@dataclass
class Curve:
    """The smallest errors that are found, in one dtype.

    Attributes:
        cases: number of cases.
        skipped: reason why no error was planted in a case -> number of cases.
        smallest: place -> rule -> Counter of k, where 2**-k is the smallest error that is found with all larger ones.
    """

    cases: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    smallest: dict[str, dict[str, Counter[int]]] = field(default_factory=dict)

    def note(self, place: str, found: Mapping[str, int]) -> None:
        """Count what each rule finds in a case at a place."""
        for rule, k in found.items():
            self.smallest.setdefault(place, {}).setdefault(rule, Counter())[k] += 1

    def add(self, other: Curve) -> None:
        """Add other counts to these."""
        self.cases += other.cases
        self.skipped.update(other.skipped)
        self.smallest = add_counts(self.smallest, other.smallest)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        smallest = {
            place: {rule: {str(k): n for k, n in sorted(counts.items())} for rule, counts in rules.items()}
            for place, rules in self.smallest.items()
        }
        return {"cases": self.cases, "skipped": dict(self.skipped), "smallest": smallest}


def curve_from_json(data: Mapping[str, Any]) -> Curve:
    """Read what `Curve.to_json` wrote."""
    smallest = {
        place: {rule: Counter({int(k): n for k, n in counts.items()}) for rule, counts in rules.items()}
        for place, rules in data["smallest"].items()
    }
    return Curve(data["cases"], Counter(data["skipped"]), smallest)


def share_found(counts: Mapping[int, int], exponent: int) -> float:
    """Return in what share of cases an error of size 2**-exponent and all larger ones are found."""
    return sum(n for k, n in counts.items() if k >= exponent) / sum(counts.values())


def size_found(counts: Mapping[int, int], share: float = WANTED) -> float | None:
    """Return the smallest size that is found in at least a share of cases; None where not even 1 is."""
    found = [k for k in counts if k != NEVER and share_found(counts, k) >= share]
    return 2.0 ** -max(found) if found else None


def surely(share: float, cases: int) -> float:
    """Return a lower bound, with 95% confidence, of the true share where a share of some cases was counted.

    Source: E. B. Wilson, Probable Inference, J. Am. Stat. Assoc. 22 (1927), the lower limit of the score interval.
    """
    interval = stats.binomtest(round(share * cases), cases).proportion_ci(0.9, method="wilson")
    return float(interval.low)
