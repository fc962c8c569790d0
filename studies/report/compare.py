"""What changed between two sets of records of any kind."""

from __future__ import annotations

from collections.abc import Mapping

from studies.report.build import PARTS
from studies.report.reading import SUBJECTS, Facts, Records

SMALLEST = 0.1
"""Relative change of a measured time or size from which it is reported."""
Fact = str | float | None


def facts(records: Records) -> Mapping[str, Facts]:
    """Return what the newest records of each kind say."""
    found: dict[str, dict[str, str | float]] = {kind: {} for kind in SUBJECTS}
    for part in PARTS:
        if part.facts is not None:
            for record in records.newest(part.kind):
                found[part.kind] |= part.facts(record.data)
    return found


def lines(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[str]:
    """Return every difference between the facts of two folders as a line, below the name of its kind.

    Words differ where they are not equal, measured numbers where they differ by a tenth.
    """
    found: list[str] = []
    for kind, before in old.items():
        after = new[kind]
        told = [
            f"  {_told(what, before.get(what), after.get(what))}"
            for what in dict.fromkeys((*before, *after))
            if _differ(before.get(what), after.get(what))
        ]
        found += [kind, *told] if told else []
    return found or ["nothing changed"]


def _differ(before: Fact, after: Fact) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return abs(after - before) > SMALLEST * max(abs(before), abs(after))
    return before != after


def _told(what: str, before: Fact, after: Fact) -> str:
    was, now = (f"{fact:.3g}" if isinstance(fact, float) else fact for fact in (before, after))
    if was is None:
        return f"+ {what}: {now}"
    return f"- {what}: was {was}" if now is None else f"{what}: {was} -> {now}"
