"""The parts of a report: what is written as HTML, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gradcheck_suite.records.sources import judge_digest
from gradcheck_suite.records.store import Record

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what its rows are.
        columns: the header.
        rows: one cell for each column; numbers are shown with three digits.
        note: under the table.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.caption}: {row} does not fit {self.columns}"


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        svg: the drawing, black on nothing.
        alt: what it shows, for those who cannot see it.
        caption: under it.
    """

    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        key: its anchor.
        title: its heading.
        text: paragraphs.
        tables: after the text.
        figures: after the tables.
        commands: that make the figures of this section again.
        missing: a sentence on what has not been run yet; None where everything has.
    """

    key: str
    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    commands: tuple[str, ...] = ()
    missing: str | None = None


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        made: when, ISO 8601.
        answers: the main questions, each with its answer and the key of the section with the figures.
        sections: in order.
        environments: the distinct environments of the records, as pairs of a name and a value.
        problems: records that could not be read.
    """

    title: str
    made: str
    answers: tuple[tuple[str, str, str], ...]
    sections: tuple[Section, ...]
    environments: tuple[tuple[tuple[str, str], ...], ...] = ()
    problems: tuple[str, ...] = ()


def shown(value: Cell) -> str:
    """Return a cell as text: numbers with three digits, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return value


def device_name(device: str) -> str:
    """Return what a reader calls a device."""
    return {"cpu": "CPU", "cuda": "GPU"}.get(device, device)


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON-ready data, without the drawings."""
    data = asdict(report)
    for section in data["sections"]:
        for figure in section["figures"]:
            del figure["svg"]
    answers = [dict(zip(("question", "answer", "section"), answer, strict=True)) for answer in report.answers]
    environments = [dict(environment) for environment in report.environments]
    return {"schema": 1, **data, "answers": answers, "environments": environments}


def commands_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the commands that made some records, each once, in order."""
    return tuple(dict.fromkeys(record.command for record in records if record.command))


def standing(records: Iterable[Record]) -> tuple[str, ...]:
    """Return a paragraph on the records behind some verdicts that another judge made, or an unclean working tree."""
    records = list(records)
    older = [record for record in records if record.judge != judge_digest()]
    unclean = sum(record.clean is False for record in records)
    sentences = []
    if older:
        commits = dict.fromkeys(f"commit {r.commit[:9]}" if r.commit else "an unknown commit" for r in older)
        sentences.append(
            f"Older than the judge: {len(older)} of the {len(records)} records behind these figures were made by "
            f"another version of the code that judges ({', '.join(commits)})."
        )
    if unclean:
        sentences.append(
            f"Unclean: {unclean} of the {len(records)} records were made with uncommitted changes in the working tree."
        )
    return (" ".join(sentences),) if sentences else ()
