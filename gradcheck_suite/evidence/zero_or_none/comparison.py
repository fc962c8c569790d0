"""Whether torch did what was predicted: each element of the parameter and of each entry of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from gradcheck_suite.evidence.zero_or_none.predictions import Point
from gradcheck_suite.evidence.zero_or_none.runs import Run
from gradcheck_suite.numerics.running_errors import UNIT_ROUNDOFF, Rounded

SLACK = 4
"""Factor on the running error bound, as torch orders the operations of a formula otherwise than the recurrence does.

It fuses products with sums, and writes `a + w (b - a)` for `(1 - w) a + w b`: up to twice the operations, and results
in between of up to twice the size. A bound of 0 stays 0.
"""
AGREEMENT = Decimal(10) ** -40
"""By how much, relative to the larger of 1 and the number, two derivations with `DIGITS` digits may differ."""
PARAMETER = "parameter"


@dataclass(frozen=True)
class Difference:
    """The worst element of one entry after one window.

    Attributes:
        window: its index.
        entry: `PARAMETER`, or a key of the optimizer's state.
        error: |observed - predicted|; infinite where the entry is missing or has another shape.
        allowed: what rounding explains; 0 where every operation is exact.
    """

    window: int
    entry: str
    error: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain the error."""
        return not self.error <= self.allowed


def differences(predicted: Sequence[Point], run: Run) -> list[Difference]:
    """Return the difference of every entry after every window."""
    found = []
    for w, (theta, state) in enumerate(predicted):
        observed = {PARAMETER: run.thetas[w], **run.states[w]}
        expected = {PARAMETER: theta, **state}
        if not state and "step" in observed and not observed["step"]:
            observed = {PARAMETER: observed[PARAMETER]}  # Adagrad makes its state before the first step
        found += [_difference(w, name, expected.get(name), observed.get(name)) for name in expected.keys() | observed]
    return found


def disagreement(first: Sequence[Point], second: Sequence[Point]) -> list[str]:
    """Return the entries, as `window w: entry`, in which two predictions differ by more than `AGREEMENT`."""
    found = []
    for w, ((theta, state), (other, other_state)) in enumerate(zip(first, second, strict=True)):
        mine, its = {PARAMETER: theta, **state}, {PARAMETER: other, **other_state}
        for name in mine.keys() | its:
            pairs = zip(_numbers(mine.get(name)), _numbers(its.get(name)), strict=False)
            same = len(_numbers(mine.get(name))) == len(_numbers(its.get(name)))
            if not same or any(abs(a.value - b.value) > AGREEMENT * max(Decimal(1), abs(b.value)) for a, b in pairs):
                found.append(f"window {w}: {name}")
    return found


def _numbers(entry: Any) -> list[Rounded]:
    """Return the elements of an entry; nothing where there is none."""
    elements = np.array([] if entry is None else entry, dtype=object).ravel()
    return [e if isinstance(e, Rounded) else Rounded(Decimal(e)) for e in elements]


def _difference(window: int, entry: str, expected: Any, observed: Any) -> Difference:
    mine, other = _numbers(expected), _numbers(observed)
    if expected is None or observed is None or len(mine) != len(other):
        return Difference(window, entry, float("inf"), 0.0)
    pairs = zip(mine, other, strict=True)
    found = [(abs(o.value - e.value), SLACK * UNIT_ROUNDOFF * e.error) for e, o in pairs]
    error, allowed = max(found, key=lambda pair: pair[0] - pair[1], default=(Decimal(0), Decimal(0)))
    return Difference(window, entry, float(error), float(allowed))
