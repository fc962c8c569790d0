"""A window of a run of JAX in the records that the judge of the audit reads.

Each gradient that was computed becomes a backward pass, each device a rank. What JAX itself has
added up over devices has one coefficient on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gradcheck_suite.auditing import weights as reading_weights
from gradcheck_suite.auditing.events import BY_HAND, PassRecord, StepRecord
from gradcheck_suite.auditing.jax.losses import LARGEST, LEAST, NUMBER, ROWS, TOTAL, LossTerm
from gradcheck_suite.auditing.jax.windows import Column, Member, StepGradients
from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.replay import BackwardPass, StepWindow
from gradcheck_suite.auditing.weighing import WindowReadings

Level = np.ndarray[tuple[int], np.dtype[np.float64]]
"""What is kept of the weights of a level: `LEAST` to `ROWS`."""
EVEN = 1e-5
"""Relative difference of the weights of items that weigh the same."""
TOLERANCE = 2e-5
"""Relative error of a weight that JAX has computed in float32."""
KEY = 0
"""The one key of all parameters: the samples of all leaves are one vector."""


def term_of(term: LossTerm, levels: Sequence[Sequence[float]], unread: str) -> Term:
    """Return a term in numbers: the weight of its outermost items, and what may be counted.

    Args:
        term: of a loss.
        levels: what is kept of the weights of each of its levels.
        unread: why these could not be computed; empty where they were.
    """
    expression = ("Sum", *term.expression)
    line = term.line or None
    if term.opaque or unread or not len(levels):
        return Term(expression, opaque=term.opaque or unread or "it has no items", line=line)
    rows = [np.asarray(one, np.float64) for one in levels]
    # a level without weights is masked as a whole: it is even, and is left out of the counts
    even = [one for one in rows if not one[NUMBER] or _is_even(one)]
    if not even:
        return Term(expression, opaque="its items have other weights each", line=line)
    weight = _signed_weight(even[0])
    counted = [one for one in even if one[NUMBER]]
    alike = [one for one in counted if _is_alike(one, weight)]
    others = [one for one in counted if not _is_alike(one, weight)]
    return Term(
        expression,
        weight,
        _counts_of(alike, elements=float(even[0][NUMBER])),
        deeper=tuple((_signed_weight(one), float(one[NUMBER])) for one in others),
        tolerance=TOLERANCE,
        of_parameters=term.of_parameters,
        line=line,
    )


def _counts_of(levels: Sequence[Level], *, elements: float) -> dict[str, float]:
    """Return what a term may count: by name, a number of items.

    Sums of rows may be summed: the innermost items are counted, or the outermost, or the fewest.

    Args:
        levels: those whose items weigh the same as the outermost ones, these first.
        elements: the number of the outermost items.
    """
    numbers = [float(one[NUMBER]) for one in levels] or [0.0]
    counts = {"nonzero": numbers[-1], "elements": elements}
    fewest = min([*numbers, *(float(one[ROWS]) for one in levels)])
    if fewest not in counts.values():
        counts["rows"] = fewest
    return counts


def _is_even(row: Level) -> bool:
    return bool(row[LARGEST] - row[LEAST] <= EVEN * row[LARGEST])


def _signed_weight(row: Level) -> float:
    return float(np.sign(row[TOTAL]) * row[LARGEST]) if row[NUMBER] else 0.0


def _is_alike(row: Level, weight: float) -> bool:
    return bool(abs(row[LARGEST] - abs(weight)) <= EVEN * abs(weight))


def _record_of(column: Column, member: Member) -> PassRecord:
    mark = column.mark
    terms = [
        term_of(term, levels, mark.unread.get(i, ""))
        for i, (term, levels) in enumerate(zip(mark.terms, member.terms, strict=True))
        if not term.of_parameters
    ]
    # nothing is "in `.grad`": the program hands each gradient on itself
    return PassRecord(
        mark.place,
        accumulates=False,
        terms=terms,
        arrivals={KEY: BY_HAND},
    )


def step_window(window: StepGradients, optimizer: int, columns: Collection[Column]) -> StepWindow:
    """Return the window of a step in the records of the judge.

    Args:
        window: of the step.
        optimizer: its index.
        columns: the gradients that stand for its passes.
    """
    records: dict[int, dict[int, PassRecord]] = {}
    coefficients = {}
    of_column = dict(zip(map(id, window.columns), window.coefficients, strict=True))
    for column in columns:
        for member in column.members:
            records.setdefault(column.number, {})[member.device] = _record_of(column, member)
            coefficients[member.device, column.number] = of_column[id(column)]
    passes = {
        number: BackwardPass([of_devices[d] for d in sorted(of_devices)])
        for number, of_devices in records.items()
    }
    step = window.step
    record = StepRecord(
        optimizer,
        step.place,
        {KEY: np.ones(1)},
        step.number,
    )
    return StepWindow(
        optimizer=optimizer,
        number=step.number,
        step=record,
        passes=passes,
        keys=[KEY],
        coefficients={KEY: coefficients},
        factor=1.0,
        edit=None,
        seen={number: {} for number in passes},
        first=False,
        before=0,
        local=(),
        null=set(),
        zero=set(),
        not_finite=set(),
        error=window.tolerance,
    )


def pending_of(window: StepGradients, optimizer: int) -> WindowReadings:
    """Return a window whose weights are to be judged."""
    found = step_window(window, optimizer, window.used)
    used = dict(found.coefficients[KEY])

    def read(factor: float) -> reading_weights.Reading:
        scaled = {source: c * factor for source, c in used.items()}
        return reading_weights.read_terms(found.passes, scaled, {}, window.tolerance)

    return WindowReadings(
        found,
        used,
        [read(1.0)],
        1.0,
        read,
        scaled=window.step.is_scaled,
    )


def devices_of(window: StepGradients) -> int:
    """Return the number of devices of a window."""
    devices = set[int]()
    for column in window.columns:
        devices.update(member.device for member in column.members)
    return len(devices) or 1
