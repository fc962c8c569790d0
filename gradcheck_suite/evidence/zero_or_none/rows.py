"""The table: for each optimizer, what one window that misses a parameter changes under zeros and under None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradcheck_suite.evidence.zero_or_none import runs
from gradcheck_suite.evidence.zero_or_none.comparison import PARAMETER, Difference, differences, disagreement
from gradcheck_suite.evidence.zero_or_none.laws import Law
from gradcheck_suite.evidence.zero_or_none.predictions import by_recurrence, by_sums
from gradcheck_suite.loops.modes import RESET_MODES

WINDOWS = (runs.REACHED, runs.REACHED, runs.MISSED)
ELEMENT = 2
"""The element of the parameter, counted by rows, whose values the table shows."""
ZERO, NONE = RESET_MODES["zero_"], RESET_MODES["set_to_none"]


@dataclass(frozen=True)
class Row:
    """One optimizer under one choice of settings.

    Attributes:
        optimizer: name of the law: the class in `torch.optim`, and "of a vector" where vectors have rows of their own.
        variant: name of the settings.
        settings: that differ from torch's defaults.
        law: what a zero gradient does, as formulas.
        before: an element of the parameter after two windows that reach it.
        after_zero: the same after a window that misses it, with a gradient of zeros.
        after_none: the same with None.
        zero_changes: what the step of that window changed under zeros: `parameter`, or entries of the state.
        none_changes: the same under None.
        same: whether parameter and state are the same under both.
        to_the_bit: whether the prediction allows no error, since every operation is exact.
        as_predicted: whether torch did what both derivations predict, in every window and entry.
    """

    optimizer: str
    variant: str
    settings: dict[str, Any]
    law: str
    before: float
    after_zero: float
    after_none: float
    zero_changes: tuple[str, ...]
    none_changes: tuple[str, ...]
    same: bool
    to_the_bit: bool
    as_predicted: bool

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self)


def rows(law: Law) -> list[Row]:
    """Return a row for each variant of an optimizer, from runs of torch."""
    return [_row(law, variant) for variant in law.variants]


def _row(law: Law, variant: str) -> Row:
    settings = dict(law.variants[variant])
    zero, none = (runs.run(law, settings, WINDOWS, mode) for mode in (ZERO, NONE))
    compared, disagree = list[Difference](), list[str]()
    for run, mode in ((zero, ZERO), (none, NONE)):
        seen = runs.expected_gradients(law, WINDOWS, mode)
        first, second = (way(law, run.settings, runs.start(law), seen) for way in (by_recurrence, by_sums))
        compared += differences(first, run)
        disagree += disagreement(first, second)
    return Row(
        law.name,
        variant,
        settings,
        law.zero,
        before=float(zero.thetas[1].flat[ELEMENT]),
        after_zero=float(zero.thetas[2].flat[ELEMENT]),
        after_none=float(none.thetas[2].flat[ELEMENT]),
        zero_changes=changes(law, zero),
        none_changes=changes(law, none),
        same=_equal([zero.thetas[2], zero.states[2]], [none.thetas[2], none.states[2]]),
        to_the_bit=not any(d.allowed for d in compared),
        as_predicted=not any(d.is_wrong for d in compared) and not disagree,
    )


def changes(law: Law, run: runs.Run) -> tuple[str, ...]:
    """Return what the last step changed: `parameter`, then entries of the state in alphabetic order."""
    own = slice(1, None) if law.reads_none_as_zero else slice(None)
    before, after = ({PARAMETER: run.thetas[w][own], **run.states[w]} for w in (-2, -1))
    changed = [name for name in after if not _equal(before.get(name), after[name])]
    return tuple(sorted(changed, key=lambda name: (name != PARAMETER, name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(np.array_equal(one, other))
