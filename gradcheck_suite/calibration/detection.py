"""The detection curve: how small a planted error the suite's bound finds, and the rival rules, on the same gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradcheck_suite.calibration.drawing import Drawn
from gradcheck_suite.calibration.planting import PLACES, Sound
from gradcheck_suite.calibration.styles import LOOPS
from gradcheck_suite.contract import assumptions_of
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.numerics.compare import Layout, Vector
from gradcheck_suite.numerics.rivals import RIVALS, Compared
from gradcheck_suite.references.reference import REFERENCES, CannotJudgeError, Window
from gradcheck_suite.subject import run_loop

OURS = "gradcheck-suite"
NEVER = -1
"""In place of an exponent: not even an error of relative size 1 is found."""
WANTED = 0.99
SURE = 1.6448536269514722
"""The normal quantile of 95%, one-sided."""


def exponents(dtype: str) -> range:
    """Return k = 0, 1, ...: errors of size 2**-k are planted, from 1 down to one unit roundoff."""
    return range(round(-math.log2(UNIT_ROUNDOFF[dtype])) + 1)


@dataclass
class Curve:
    """How small an error is found, in one dtype.

    Attributes:
        cases: how many were looked at.
        skipped: why a case was not -> how many.
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
        for place, rules in other.smallest.items():
            for rule, counts in rules.items():
                self.smallest.setdefault(place, {}).setdefault(rule, Counter()).update(counts)

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
    """Return what the true share is at least, with 95% confidence, where a share of some cases was counted.

    Source: E. B. Wilson, Probable Inference, J. Am. Stat. Assoc. 22 (1927), the lower limit of the score interval.
    """
    centre = share + SURE**2 / (2 * cases)
    width = SURE * math.sqrt(share * (1 - share) / cases + SURE**2 / (4 * cases**2))
    return (centre - width) / (1 + SURE**2 / cases)


def curve_of(drawn: Drawn, seed: int) -> Curve:
    """Plant errors in a sound loop's gradient of one case.

    Args:
        drawn: the case.
        seed: of the choice of loop, window and places.
    """
    rng = np.random.default_rng([seed, int(drawn.case.digest, 16)])
    reference = REFERENCES.get(drawn.case, None)
    curve = Curve(cases=1)
    try:
        if reference.finding is not None:
            curve.skipped["torch and JAX disagree"] += 1
            return curve
        loops = [loop for loop in LOOPS.values() if assumptions_of(loop) <= drawn.within]
        rng.shuffle(loops)  # type: ignore[arg-type]
        # one whose losses are not computed under an autocast, since those are of another precision
        outcome = next(o for loop in loops if (o := run_loop(loop, reference.trial)).compute is None)
        if len(outcome.observations) != drawn.case.plan.steps:
            curve.skipped[str(outcome.raised)] += 1
            return curve
        index = int(rng.integers(len(outcome.observations)))
        window = reference.window(index)
        observed = reference.flat(outcome.observations[index].gradients)
        if window.compare(observed).ratio > 1:
            curve.skipped["a false alarm"] += 1
            return curve
        sound = Sound(observed, window.contributions, reference.layout, drawn.case.dtype)
    except CannotJudgeError as error:
        curve.skipped[" ".join(str(error).split())] += 1
        return curve
    for place, direction_of in PLACES.items():
        direction = direction_of(sound, rng)
        if direction is not None:
            sign = float(rng.choice((-1.0, 1.0)))
            curve.note(place, smallest_found(sound, window, sign * direction))
    return curve


def smallest_found(sound: Sound, window: Window, direction: Vector) -> dict[str, int]:
    """Return, for each rule, k: it finds the error of size 2**-k in a direction, and all larger ones.

    Args:
        sound: the gradient.
        window: whose it is.
        direction: (P,), what an error of size 1 adds.
    """
    rules: dict[str, Callable[[Vector], bool]] = {OURS: lambda planted: window.compare(planted).ratio > 1}
    rules |= {name: _rival(name, window, sound.layout, sound.dtype) for name in RIVALS}
    found = dict.fromkeys(rules, NEVER)
    looking = set(rules)
    for k in exponents(sound.dtype):
        planted = sound.with_error(direction, 2.0**-k)
        for name in sorted(looking):
            if rules[name](planted):
                found[name] = k
            else:
                looking.discard(name)
        if not looking:
            break
    return found


def _rival(name: str, window: Window, layout: Layout, dtype: str) -> Callable[[Vector], bool]:
    """Return whether a rule finds something wrong with a gradient, parameter by parameter as its users apply it."""
    rule, large, exact = RIVALS[name], window.large_batch, window.expected
    parts = [slice(start, start + size) for start, size in zip(layout.offsets, layout.sizes, strict=True) if size]
    return lambda planted: not all(rule(Compared(planted[p], large[p], exact[p], dtype)) for p in parts)
