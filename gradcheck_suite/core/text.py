"""Results in words: counts with their nouns, weights, and the text of an audit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradcheck_suite.core.results import LiveResult, LiveViolation

# Counts with their nouns, and names and texts in two columns. Imports neither framework.


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of a name and a text, with the texts in one column."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in pairs]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 window` or `2 micro-batches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


# The table of expected and observed weights on a console, with bars.


HEADER = "weight of each item, by micro-batch (index, {rank}count, expected, observed; # observed, | expected):"
WIDTH = 24
"""Characters of the longest bar."""
Row = tuple[str | int, int | None, float, float, float]
"""Index of the micro-batch, its rank where there are several, count, expected and observed weight of each item."""


def weight_lines(rows: Iterable[Row], most: int | None = None) -> list[str]:
    """Return the lines of a table of weights; none where there are none.

    Args:
        rows: of the micro-batches of a window.
        most: rows that are shown at most.
    """
    rows = list(rows)
    if not rows:
        return []
    top = max((abs(w) for *_, e, o in rows for w in (e, o) if math.isfinite(w)), default=0.0)
    shown = rows[:most]
    ranks = any(rank is not None for _, rank, *_ in rows)
    places = [f"{j:>3} {rank:>4}" if ranks else f"{j:>3}" for j, rank, *_ in shown]
    lines = [
        f"  {place} {n:>8.6g} {e:>12.6g} {o:>12.6g}  {_bar(e, o, top)}".rstrip()
        for place, (*_, n, e, o) in zip(places, shown, strict=True)
    ]
    more = [f"  and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [HEADER.format(rank="rank, " if ranks else ""), *lines, *more]


def _bar(expected: float, observed: float, top: float) -> str:
    """Return a bar as long as the observed weight, of `-` where it is negative, with a mark at the expected one."""
    if not top or not math.isfinite(expected) or not math.isfinite(observed):
        return ""
    bar = ("#" if observed > 0 else "-") * _length(observed, top)
    mark = _length(expected, top)
    return f"{bar[:mark]:<{mark}}|{bar[mark:]}"


def _length(weight: float, top: float) -> int:
    # rounding must not decide between two lengths
    return math.floor(round(WIDTH * abs(weight) / top, 6) + 0.5)


# The words of a live run's result.


SHOWN_ROWS = 8


def _title(violation: LiveViolation) -> str:
    kind = violation.kind if violation.kind == violation.diagnosis else f"{violation.kind}: {violation.diagnosis}"
    at = "" if violation.step is None else f" at step {violation.step}"
    more = violation.occurrences - 1
    return f"{kind}{at}" + (f" and {more} more" if more else "")


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 1e-3 else f"{100 * share:.3g}%"


def violation_lines(violation: LiveViolation) -> list[str]:
    """Return a violation in words: kind, diagnosis, explanation, places, weights."""
    pairs = [
        ("loss", violation.where),
        ("backward", violation.backward),
        ("step", violation.stepped),
        ("parameter", violation.parameter),
        ("gradient", None if violation.gradient_error is None else f"off by {_percent(violation.gradient_error)}"),
    ]
    lines = [_title(violation), violation.explanation]
    lines += aligned((name, value) for name, value in pairs if value)
    rows = ((row.micro_batch, row.rank, row.count, row.expected, row.observed) for row in violation.weights)
    return [*lines, *weight_lines(rows, most=SHOWN_ROWS)]


def result_lines(result: LiveResult, *, shown: bool = False) -> list[str]:
    """Return the result of a run in words.

    Args:
        result: the result.
        shown: whether the violations were printed when they were found.
    """
    verdict = "VIOLATED" if result.violations else result.verdict
    if result.interrupted and result.holds:
        verdict = "holds so far (interrupted)"
    steps = counted(result.windows, "step")
    over = f" over {result.ranks} ranks" if result.ranks > 1 else ""
    accepted = f", {counted(len(result.accepted), 'fault')} accepted" if result.accepted else ""
    lines = [f"{result.script}  {verdict}  {steps} judged of {result.steps}{over}{accepted}  {result.seconds:.1f} s"]
    for how, count in result.again.items():
        lines.append(f"    {counted(count, 'window')} computed again, {how}")
    for violation in result.violations:
        lines += [f"    {line}" for line in ([_title(violation)] if shown else violation_lines(violation))]
    for violation in result.accepted:
        lines += [f"    accepted: {_title(violation).partition(': ')[2]}, {violation.explanation}"]
    lines += [f"    {result.second_opinion}"] if result.second_opinion else []
    lines += [f"    finding: {finding}" for finding in (*result.findings, *result.disagreements)]
    return lines
