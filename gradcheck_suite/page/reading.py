"""Records as a report reads them: the newest of each subject, and a part of the report that shows
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from gradcheck_suite.core.records import Data, Record, RecordKind, read_records
from gradcheck_suite.page.content import Matrix, Section, sources

DEVICES = {"cpu": "CPU", "cuda": "GPU"}
"""Device -> what a reader calls it."""
Pairs = tuple[tuple[str, str], ...]
Made = TypeVar("Made")
Place = TypeVar("Place", bound=Hashable)
Content = TypeVar("Content")
Tone = tuple[str, tuple[str, ...]]
"""A cell of a matrix: its class and its lines."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record raises that lacks a field or has one of another type."""


def device_name(device: str) -> str:
    """Return what a reader calls a device."""
    return DEVICES.get(device, device)


def latest(
    records: Iterable[Record], subject: Sequence[str] | Callable[[Data], Hashable]
) -> list[Record]:
    """Return the last record of each subject, in the order in which the subjects first appear.

    Args:
        records: oldest first.
        subject: the names of the fields that tell subjects apart, or a function of a record's data.
    """
    kept: dict[Hashable, Record] = {}
    for record in records:
        key = (
            subject(record.data)
            if callable(subject)
            else tuple(record.data.get(name) for name in subject)
        )
        # a later record takes the place of an earlier one, at its position: the order of subjects
        # stays
        kept[key] = record
    return list(kept.values())


@dataclass(frozen=True)
class Records:
    """All records of a reports folder, by kind, oldest first, and what could not be read.

    Attributes:
        kinds: that were read, by name.
        by_kind: the records.
        problems: a line for each that could not be read.
        beside: texts that no command made, as records, by the name that a part has as its kind.
    """

    kinds: Mapping[str, RecordKind]
    by_kind: Mapping[str, list[Record]]
    problems: tuple[str, ...] = ()
    beside: Mapping[str, list[Record]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Record]:
        """Return a kind's records."""
        return self.by_kind.get(kind) or self.beside.get(kind, [])

    def newest(self, kind: str) -> list[Record]:
        """Return the last record of each subject of a kind."""
        subject = self.kinds[kind].subject if kind in self.kinds else None
        return self.of(kind) if subject is None else latest(self.of(kind), subject)


Facts = Mapping[str, str | float]
"""Subject -> what a record says of it: a word, or a measured number."""


@dataclass(frozen=True)
class Part:
    """A section of the report, and what `report --compare` reads of the same records.

    Attributes:
        key: its anchor.
        tab: the page that it stands on.
        title: its heading.
        kind: of the records that it shows.
        content: newest records -> the section without key, tab and title, and without sources where
            it shows all of them; None where they say nothing that it shows.
        facts: data of a newest record -> what it says; None where another section has the facts of
            the kind.
        missing: what the section says where there are no records; empty where it is left out.
    """

    key: str
    tab: str
    title: str
    kind: str
    content: Callable[[list[Record]], Section | None]
    facts: Callable[[Data], Facts] | None = None
    missing: str = ""

    def section(self, records: Records) -> Section | None:
        """Return the section; None where nothing was recorded and the report does not say so."""
        newest = records.newest(self.kind)
        found = self.content(newest) if newest else None
        if found is None:
            return (
                Section(
                    self.key,
                    self.title,
                    self.tab,
                    missing=self.missing,
                )
                if self.missing
                else None
            )
        # texts that no command made have no run to name
        made_by = found.sources or (sources(newest) if self.kind in records.by_kind else ())
        # without a row a table knows no column
        tables = tuple(table for table in found.tables if table.columns)
        return replace(
            found, key=self.key, title=self.title, tab=self.tab, tables=tables, sources=made_by
        )


def read_all(reports: Path, kinds: Mapping[str, RecordKind]) -> Records:
    """Read every record of some kinds."""
    found: dict[str, list[Record]] = {}
    problems: list[str] = []
    for name, kind in kinds.items():
        found[name], trouble = read_records(reports, kind)
        problems += trouble
    return Records(kinds, found, tuple(problems))


def made_from(records: Records, make: Callable[[Records], Made]) -> tuple[Made, Records]:
    """Return what `make` makes of the records, and the records without those that it cannot read.

    A record that lacks a field, or has one of another type, is left out and named in the problems.
    """
    try:
        return make(records), records
    # tried record by record only after the whole has failed: most folders have no damaged one
    except UNREADABLE:
        kept: dict[str, list[Record]] = {kind: [] for kind in records.by_kind}
        problems = list(records.problems)
        for kind, found in records.by_kind.items():
            for number, record in enumerate(found, 1):
                try:
                    make(
                        replace(
                            records,
                            by_kind={kind: [record]},
                            problems=(),
                            beside={},
                        )
                    )
                    kept[kind].append(record)
                except UNREADABLE as error:
                    why = f"{type(error).__name__}: {error}"
                    problems.append(f"{kind}, record {number}: cannot be read ({why}); left out")
    records = replace(records, by_kind=kept, problems=tuple(problems))
    return make(records), records


def matrix_of(
    caption: str,
    corner: str,
    columns: Mapping[Place, str],
    cells: Mapping[str, Mapping[Place, Content]],
    cell: Callable[[Content | None], Tone],
    notes: Sequence[str] = (),
) -> Matrix:
    """Return a matrix with a row for each name and a column for each place.

    Args:
        caption: what a cell says.
        corner: the name of the rows.
        columns: place -> its header.
        cells: name of a row -> place -> what is known there.
        cell: what is known, or None -> class and lines.
        notes: under the matrix.
    """
    rows = tuple(
        (name, tuple(cell(row.get(place)) for place in columns)) for name, row in cells.items()
    )
    return Matrix(
        caption,
        corner,
        tuple(columns.values()),
        rows,
        tuple(notes),
    )


def environments(records: Iterable[Record]) -> tuple[Pairs, ...]:
    """Return each distinct environment as pairs of a name and a value."""
    return tuple(
        # in the order in which they first appear
        dict.fromkeys(_pairs(record.environment) for record in records if record.environment)
    )


def _pairs(environment: Data) -> Pairs:
    versions, devices, flags = (
        environment.get(name) or {} for name in ("versions", "devices", "precision")
    )
    return (
        (
            "processor",
            (
                f"{environment.get('processor', 'unknown')},"
                f" {environment.get('processor_count', '?')} cores"
            ),
        ),
        ("platform", str(environment.get("platform", "unknown"))),
        *((f"{name} devices", ", ".join(map(str, found))) for name, found in devices.items()),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        ),
        ("precision", ", ".join(f"{name} {value}" for name, value in flags.items())),
    )
