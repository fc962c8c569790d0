"""Read the records for the report: the latest of each subject, and the machines that made them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradcheck_suite.records.store import KINDS, Record, read_records

Pairs = tuple[tuple[str, str], ...]
Made = TypeVar("Made")
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record raises that lacks a field or has one of another type."""


@dataclass(frozen=True)
class Records:
    """All records of a reports folder, by kind, oldest first, and what could not be read."""

    by_kind: Mapping[str, list[Record]]
    problems: tuple[str, ...]

    def of(self, kind: str) -> list[Record]:
        """Return a kind's records."""
        return self.by_kind.get(kind, [])


def read_all(reports: Path) -> Records:
    """Read every kind's records."""
    found: dict[str, list[Record]] = {}
    problems: list[str] = []
    for kind in KINDS:
        found[kind], trouble = read_records(reports, kind)
        problems += trouble
    return Records(found, tuple(problems))


def made_from(records: Records, make: Callable[[Records], Made]) -> tuple[Made, Records]:
    """Return what `make` makes of the records, and the records without those that it cannot read.

    A record that lacks a field, or has one of another type, is left out and named in the problems.
    """
    try:
        return make(records), records
    except UNREADABLE:
        kept, problems = {}, list(records.problems)
        for kind, found in records.by_kind.items():
            kept[kind], trouble = _readable(kind, found, 1, make)
            problems += trouble
    records = Records(kept, tuple(problems))
    return make(records), records


def _readable(
    kind: str, found: list[Record], first: int, make: Callable[[Records], object]
) -> tuple[list[Record], list[str]]:
    """Return the records that can be read, and one line on each other; `first` is the number of the first of them."""
    try:
        make(Records({kind: found}, ()))
    except UNREADABLE as error:
        if len(found) == 1:
            return [], [f"{kind}, record {first}: cannot be read ({type(error).__name__}: {error}); left out"]
        half = len(found) // 2
        before, after = (
            _readable(kind, part, start, make) for part, start in ((found[:half], first), (found[half:], first + half))
        )
        return before[0] + after[0], before[1] + after[1]
    return found, []


def latest(records: Iterable[Record], key: Callable[[Mapping[str, Any]], Hashable]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appear."""
    kept: dict[Hashable, Record] = {}
    for record in records:
        kept[key(record.data)] = record
    return list(kept.values())


def current(records: Iterable[Record]) -> list[Record]:
    """Return the measurements of each device that were made where its newest one was made.

    Times and bytes compare only within one machine and one set of versions, so older rows of another are left out.
    """
    records = list(records)
    newest = {record.data.get("device"): record for record in records}
    return [record for record in records if _made_where_made(record, newest[record.data.get("device")])]


def _made_where_made(record: Record, other: Record) -> bool:
    """Return whether two records come from one machine and one set of versions; a record may not say its device."""
    mine, others = record.environment, other.environment
    device = mine.get("device"), others.get("device")
    alike = all(mine.get(name) == others.get(name) for name in ("processor", "processor_count", "versions"))
    return alike and (device[0] == device[1] or None in device)


def environments(records: Iterable[Record]) -> tuple[Pairs, ...]:
    """Return each distinct environment as pairs of a name and a value."""
    return tuple(dict.fromkeys(_pairs(record.environment) for record in records if record.environment))


def _pairs(environment: Mapping[str, Any]) -> Pairs:
    versions = environment.get("versions") or {}
    devices = environment.get("devices") or {}
    precision = environment.get("precision") or {}
    pairs = [
        ("processor", f"{environment.get('processor', 'unknown')}, {environment.get('processor_count', '?')} cores"),
        ("platform", str(environment.get("platform", "unknown"))),
        *((f"{name} devices", ", ".join(map(str, found))) for name, found in devices.items()),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("precision", ", ".join(f"{name} {value}" for name, value in precision.items())),
    ]
    return tuple(pairs)
