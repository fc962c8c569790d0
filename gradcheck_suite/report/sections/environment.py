"""Where the figures come from: every run, its machine, and the parts of the report that show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradcheck_suite.report.content import Answer, Section, Table
from gradcheck_suite.report.provenance import Source, sources
from gradcheck_suite.report.records_view import Pairs, Records, environments

FIRST_PAGE = "Overview"
RUNS = ("records", "number", "date", "commit", "command", "machine", "code", "working tree", "shown in")


def environment(
    records: Records, answers: Sequence[Answer], sections: Iterable[Section], made_on: Sequence[Pairs]
) -> Section | None:
    """Return the section on all runs and machines; None without records.

    Args:
        records: all of them.
        answers: of the first screen.
        sections: the others.
        made_on: the distinct environments of the records.
    """
    shown_in: dict[Source, list[str]] = {}
    for title, parts in (*((FIRST_PAGE, answer.sources) for answer in answers),
                         *((section.title, section.sources) for section in sections)):  # fmt: skip
        for source in parts:
            titles = shown_in.setdefault(_run(source), [])
            titles += [title] if title not in titles else []
    rows = tuple(
        (kind, source.records, source.date or None, source.commit or None, source.command or None, number,
         "older" if source.older else "current", "unclean" if source.unclean else None,
         ", ".join(shown_in.get(_run(source), ())) or "replaced by a newer run")
        for kind, found in records.by_kind.items()
        for number, made in enumerate((*made_on, ()), 1)
        for source in sources(r for r in found if environments([r]) == ((made,) if made else ()))
    )  # fmt: skip
    if not rows:
        return None
    runs = Table(
        "Every run behind this report",
        RUNS,
        rows,
        "Older: the code that the figures speak of has changed since, or the record does not say which it was. That "
        "code depends on the kind of record: benchmarks speak of the modes and of what measures them, verdicts and "
        "claims of what verifies. One command can write both kinds. A part of the report shows the newest record of "
        "each subject, so a later run can replace an earlier one, in whole or in part.",
    )
    return Section("provenance", "Where the figures come from", "environment", tables=(runs, *_machines(made_on)))


def _run(source: Source) -> Source:
    """Return a source without its count and its day, which differ where a part of its records is shown."""
    return replace(source, date="", records=0)


def _machines(made_on: Sequence[Pairs]) -> tuple[Table, ...]:
    if not made_on:
        return ()
    names = tuple(dict.fromkeys(name for made in made_on for name, _ in made))
    rows = tuple((number, *(dict(made).get(name) for name in names)) for number, made in enumerate(made_on, 1))
    note = "The number of a machine is that of the table above. Two rows may be one machine with other versions."
    return (Table("Machines, versions and precision flags", ("machine", *names), rows, note),)
