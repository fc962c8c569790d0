"""What changed between two sets of records of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradcheck_suite.studies.report.build import PARTS
from gradcheck_suite.studies.report.reading import SUBJECTS, Facts, Records

SMALLEST = 0.1
"""Relative change of a measured time or size from which it is reported."""


@dataclass(frozen=True)
class Change:
    """One difference between two sets of records.

    Attributes:
        kind: of the records.
        what: the subject, such as a loop with its dtype and device.
        before: what the old records say; None where they do not have it.
        after: what the new records say; None where they do not have it.
    """

    kind: str
    what: str
    before: str | None
    after: str | None


def facts(records: Records) -> Mapping[str, Facts]:
    """Return what the newest records of each kind say."""
    found: dict[str, dict[str, str | float]] = {kind: {} for kind in SUBJECTS}
    for part in PARTS:
        if part.facts is not None:
            for record in records.newest(part.kind):
                found[part.kind] |= part.facts(record.data)
    return found


def changes(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[Change]:
    """Return every difference between the facts of two folders.

    Words differ where they are not equal, measured numbers where they differ by a tenth.
    """
    found = []
    for kind, before in old.items():
        after = new[kind]
        for what in dict.fromkeys((*before, *after)):
            if _differ(before.get(what), after.get(what)):
                found.append(Change(kind, what, _shown(before.get(what)), _shown(after.get(what))))
    return found


def lines(found: list[Change]) -> Iterator[str]:
    """Yield the changes as lines, by kind."""
    kind = ""
    for change in found:
        if change.kind != kind:
            kind = change.kind
            yield kind
        if change.before is None:
            yield f"  + {change.what}: {change.after}"
        elif change.after is None:
            yield f"  - {change.what}: was {change.before}"
        else:
            yield f"  {change.what}: {change.before} -> {change.after}"
    if not found:
        yield "nothing changed"


def _differ(before: str | float | None, after: str | float | None) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return abs(after - before) > SMALLEST * max(abs(before), abs(after))
    return before != after


def _shown(fact: str | float | None) -> str | None:
    return f"{fact:.3g}" if isinstance(fact, float) else fact
