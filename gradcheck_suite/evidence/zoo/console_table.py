"""The scoreboard on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradcheck_suite.evidence.zoo.scoreboard import Row
from gradcheck_suite.schema.results import Result

HEADER = f"{'bug':<31} {'found':>7} {'cases':>6} {'seconds':>8}  {'smallest':<9} diagnosis"


def line(row: Row) -> str:
    """Return a bug's line: found in how many runs, median cases and seconds, size of the smallest case, its names."""
    windows, micro_batches, layers = row.largest
    size = f"{windows}w {micro_batches}m {layers}l"
    cases = "-" if row.cases is None else f"{row.cases:g}"
    names = ", ".join(f"{name} x{count}" for name, count in row.names.most_common())
    marks = [] if row.found + row.within == len(row.runs) else ["MISSED"]
    marks += [f"within rounding x{row.within}"] if row.within else []
    marks += [f"no diagnosis x{row.unnamed}"] if row.unnamed else []
    marks += ["WRONG DIAGNOSIS"] if row.wrongly_named else []
    marks += [] if row.small else ["LARGE"]
    return (
        f"{row.bug.number or '-':>3} {row.bug.name:<27} {row.found:>3}/{len(row.runs):<3} {cases:>6} "
        f"{row.seconds:>8.2f}  {size:<9} {' '.join([*marks, names])}"
    )


def summary(rows: Sequence[Row], sound: Sequence[Result], *, asked: int, interrupted: bool) -> str:
    """Return the last lines: how many bugs are found, with which diagnoses, and whether a sound loop is blamed."""
    runs, within = sum(len(row.runs) for row in rows), sum(row.within for row in rows)
    found, named = sum(row.found for row in rows), sum(row.rightly_named for row in rows)
    unnamed = sum(row.unnamed for row in rows)
    blamed = [result.loop for result in sound if not result.holds]
    cases = [row.cases for row in rows if row.cases is not None]
    lines = [
        f"{sum(row.found == len(row.runs) for row in rows)} of {asked} bugs found in every run; "
        f"{found} of {runs} runs, {named} of them with a right diagnosis"
        + (f", {unnamed} with none" if unnamed else "")
        + (f"; in {within} runs what the bug does lies within rounding" if within else ""),
        f"median over the bugs: {median(cases):g} cases, {median(row.seconds for row in rows):.2f} s"
        if cases
        else "nothing was found",
        f"{len(sound) - len(blamed)} of {len(sound)} sound loops not blamed, over {sum(r.cases for r in sound):,} cases"
        + (f"; blamed: {', '.join(blamed)}" if blamed else ""),
    ]
    if interrupted:
        lines.append(f"interrupted after {len(rows)} of {asked} bugs and {len(sound)} sound loops")
    return "\n".join(lines)
