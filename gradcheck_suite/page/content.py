"""What a page says: tables, figures and paragraphs as data, and where their numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradcheck_suite.core.records import Record

# Where figures come from: command, commit, date and machine, and whether the code has changed
# since.


@dataclass(frozen=True)
class Source:
    """A run, or several of the same command at the same commit.

    Attributes:
        kind: of the records.
        command: that made the records.
        commit: of the repository, nine digits; empty where it is unknown.
        date: the day of the newest record; empty where it is unknown.
        machine: the processor, its cores and the devices.
        records: how many there are.
        older: whether the code that the figures speak of is another one today, or may be.
        unclean: whether the working tree had uncommitted changes.
    """

    kind: str
    command: str
    commit: str
    date: str
    machine: str
    records: int = 1
    older: bool = False
    unclean: bool = False


def sources(records: Iterable[Record]) -> tuple[Source, ...]:
    """Return the runs behind some records, the newest first."""
    groups: dict[Source, list[Record]] = {}
    for record in records:
        older = record.older
        # None is "not known", and is not held against a record
        unclean = record.clean is False
        commit = record.commit[:9]
        where = machine_text(record.environment)
        run = Source(
            record.kind,
            record.command,
            commit,
            "",
            where,
            older=older,
            unclean=unclean,
        )
        groups.setdefault(run, []).append(record)
    found = [(max(r.time for r in group), run, len(group)) for run, group in groups.items()]
    found.sort(key=lambda run: run[0], reverse=True)
    return tuple(replace(run, date=time[:10], records=count) for time, run, count in found)


def machine_text(environment: Mapping[str, Any]) -> str:
    """Return the machine of an environment in a few words; empty where it is unknown."""
    if not environment:
        return ""
    devices = environment.get("devices") or {}
    accelerators = [str(d) for d in devices.get("torch", ()) if str(d) != "cpu"]
    processor = environment.get("processor", "unknown processor")
    cores = environment.get("processor_count", "?")
    versions = environment.get("versions") or {}
    torch = f"torch {versions['torch']}" if versions.get("torch") else ""
    return ", ".join(filter(None, (*accelerators, f"{processor}, {cores} cores", torch)))


# The parts of a report: what is written as HTML, Markdown or JSON.


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
            assert len(row) == len(self.columns), (
                f"{self.caption}: {row} does not fit {self.columns}"
            )


def table(caption: str, rows: Iterable[Mapping[str, Cell]], note: str = "") -> Table:
    """Return a table of rows that each have the header of every column with its cell."""
    rows = list(rows)
    return Table(
        caption, tuple(rows[0] if rows else ()), tuple(tuple(row.values()) for row in rows), note
    )


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        key: its name in the page, and that of its file beside the Markdown.
        spec: a Vega-Lite specification, without width and configuration.
        alt: what it shows, for those who cannot see it.
        caption: under it.
        sources: of its numbers, where they are not those of its section or answer.
        in_story: whether it stands in the Markdown, where it is a section's; that of an answer
            always does.
    """

    key: str
    spec: Mapping[str, Any]
    alt: str
    caption: str = ""
    sources: tuple[Source, ...] = ()
    in_story: bool = False


@dataclass(frozen=True)
class Claim:
    """A widely read claim and its verdict.

    Attributes:
        number: such as `C1.2`.
        origin: where it is published.
        text: the claim as published.
        short: the claim in a few words.
        verdict: `confirmed`, `conditional` or `refuted`; of a question `always`, `sometimes` or
            `never`.
        sentence: what holds.
        condition: under which it is true; empty if under none or any.
        how: what is judged of it, and how.
        counterexample: the smallest case against it; empty if there is none.
        numbers: figures of the run that no plot shows, as pairs of a name and a value.
        figures: plots of the other figures of the run.
        series: rows of numbers, such as the components of a gradient, each with its name.
        sources: of the verdict.
    """

    number: str
    origin: str
    text: str
    short: str
    verdict: str
    sentence: str
    condition: str
    how: str
    counterexample: str
    numbers: tuple[tuple[str, str], ...] = ()
    figures: tuple[Figure, ...] = ()
    series: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Verdicts in rows and columns, always shown.

    Attributes:
        caption: what a cell says.
        corner: the name of the rows.
        columns: the header of the columns.
        rows: pairs of the row's name and its cells; a cell is a pair of a class (`good`, `bad`,
            `warn`, `none`) and its lines of text.
        notes: under the matrix, such as why a cell is empty.
    """

    caption: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """A text that people wrote, such as a finding in a trainer.

    Attributes:
        title: its first heading.
        markdown: the rest of it.
    """

    title: str
    markdown: str

    @property
    def parts(self) -> tuple[str, str]:
        """What the title is about, with its colon, and what it says of it.

        A title without a colon is all about.
        """
        about, colon, says = self.title.partition(": ")
        return about + colon, says


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        key: its anchor; with the next two, filled in by whoever keeps the list of sections.
        title: its heading.
        tab: the page that it stands on, in lower case.
        text: paragraphs.
        matrices: after the text.
        figures: after the matrices.
        claims: after the figures.
        documents: after the claims.
        tables: last, closed until a reader opens them.
        sources: the runs that made its figures.
        missing: a sentence on what has not been run yet; None where everything has.
    """

    key: str = ""
    title: str = ""
    tab: str = ""
    text: tuple[str, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    documents: tuple[Document, ...] = ()
    tables: tuple[Table, ...] = ()
    sources: tuple[Source, ...] = ()
    missing: str | None = None


@dataclass(frozen=True)
class HeadlineAnswer:
    """One of the four answers of the first screen.

    Attributes:
        key: its anchor.
        question: in a few words.
        brief: the answer in a few words, for a telephone's first screen.
        answer: one sentence with its figure.
        tab: the page with the details.
        matrix: the picture of a verification.
        figures: the other pictures.
        claims: one line each.
        sources: of the pictures.
    """

    key: str
    question: str
    brief: str
    answer: str
    tab: str
    matrix: Matrix | None = None
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        name: at the top of the page: the suite's, or the project's.
        subtitle: what the page is about, in a line that explains its first words.
        made: when, ISO 8601.
        answers: of the first screen.
        sections: in order.
        environments: the distinct environments of the records, as pairs of a name and a value.
        problems: records that could not be read.
        violations: the stored violations, each a page of its own
            (`page.violation.ViolationPage`).
    """

    title: str
    name: str
    subtitle: str
    made: str
    answers: tuple[HeadlineAnswer, ...]
    sections: tuple[Section, ...]
    environments: tuple[tuple[tuple[str, str], ...], ...] = ()
    problems: tuple[str, ...] = ()
    violations: tuple[Any, ...] = ()

    @property
    def tabs(self) -> dict[str, str]:
        """The pages after the first one, in the order of their sections: key -> name."""
        # the evidence stands behind the answers, whatever sections there are
        last = ["violations", "environment"] if self.violations else ["environment"]
        before = [section.tab for section in self.sections if section.tab not in last]
        return {tab: tab.capitalize() for tab in (*before, *last)}


def cell_text(value: Cell) -> str:
    """Return a cell as text: numbers with three digits, nothing as a dash."""
    if value is None:
        return "-"
    # before int: True is an int in Python
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return value


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON-ready data, without the specifications of the plots."""
    data = _without_plots(asdict(report))
    # pairs keep their order on the page; in JSON names are what a reader looks for
    environments = [dict(environment) for environment in report.environments]
    return {"schema": 2, **data, "environments": environments}


def _without_plots(data: Any) -> Any:
    if isinstance(data, dict):
        return {
            key: _without_plots(value)
            for key, value in data.items()
            if key not in ("spec", "in_story")
        }
    return [_without_plots(value) for value in data] if isinstance(data, list | tuple) else data
