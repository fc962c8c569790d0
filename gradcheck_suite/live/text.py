"""The words of a live run's result."""

from __future__ import annotations

from gradcheck_suite.records.columns import aligned, counted
from gradcheck_suite.records.weight_text import weight_lines
from gradcheck_suite.schema.live_results import LiveResult, LiveViolation

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
    lines = [f"{result.script}  {verdict}  {steps} judged of {result.steps}{over}  {result.seconds:.1f} s"]
    for how, count in result.again.items():
        lines.append(f"    {counted(count, 'window')} computed again, {how}")
    for violation in result.violations:
        lines += [f"    {line}" for line in ([_title(violation)] if shown else violation_lines(violation))]
    for violation in result.accepted:
        lines += [f"    accepted: {violation.diagnosis}, {violation.explanation}"]
    lines += [f"    {result.second_opinion}"] if result.second_opinion else []
    lines += [f"    finding: {finding}" for finding in (*result.findings, *result.disagreements)]
    return lines
