"""A report put together from records: its answers first, then its sections.

And what changed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gradcheck_suite.core.records import KINDS, Data, Kind, Record, run_of
from gradcheck_suite.core.results import result_from_json
from gradcheck_suite.page import verdicts
from gradcheck_suite.page.content import Answer, Report, Section, machine_text, sources
from gradcheck_suite.page.reading import (
    Facts,
    Pairs,
    Part,
    Records,
    environments,
    made_from,
    matrix_of,
    read_all,
)
from gradcheck_suite.page.verdicts import outcome
from gradcheck_suite.page.violation import ViolationPage, stored_violations, violation_page

# Do the loops and scripts of a project hold?


MOST_RUNS = 6
"""Commits whose verdicts on own loops and scripts are shown."""
MOST_NAMED = 3
"""Violated loops and scripts that the answer names."""


_RANKED = ("violated", "unjudged", "holds")


def _diagnosis(data: Data) -> str:
    violation = result_from_json(data).violation
    return violation.diagnosis if violation else "violated"


def _judged(records: Records) -> list[tuple[str, Data, Record]]:
    """Return the loops, scripts and questions to trainers that were judged: name, result and
    record, oldest first.
    """
    runs = [
        (run_of(r.data)[0], r.data, r) for kind in ("verify", "audit") for r in records.of(kind)
    ]
    asked = [
        (f"{r.data['trainer']}: {r.data['question']}", r.data["result"], r)
        for r in records.of("trainer")
    ]
    return sorted(
        (*runs, *((n, data, r) for n, data, r in asked if data)), key=lambda one: one[2].time
    )


def own_verdicts(records: Records) -> tuple[Answer, ...]:
    """Return the verdicts on loops and scripts, by commit, the worst first, and what changed.

    Nothing without any.
    """
    found: dict[str, dict[str, Data]] = {}
    runs: dict[str, str] = {}
    judged = _judged(records)
    if not judged:
        return ()
    for name, data, record in judged:
        commit = record.commit[:7] or "no commit"
        runs.pop(commit, None)
        runs[commit] = f"{commit}, {record.time[:10]}"
        row = found.setdefault(name, {})
        row.pop(commit, None)
        row[commit] = data
    last = {name: list(row.values())[-1] for name, row in found.items()}
    order = sorted(found, key=lambda name: (_RANKED.index(str(last[name]["verdict"])), name))
    violated = [name for name in order if last[name]["verdict"] == "violated"]
    holding = sum(data["verdict"] == "holds" for data in last.values())
    what, verb = ("loop or script", "holds") if len(found) == 1 else ("loops and scripts", "hold")
    if violated:
        named = [f"{name} ({_diagnosis(last[name])})" for name in violated[:MOST_NAMED]]
        rest = [f"{len(violated) - MOST_NAMED} more"] if violated[MOST_NAMED:] else []
        brief = f"No: {len(violated)} of {len(found)} {what} violated: {', '.join([*named, *rest])}"
    else:
        brief = (
            f"{'Yes' if holding == len(found) else 'Not known'}: {holding} of {len(found)} {what}"
            f" {verb}"
        )
    turned = [
        f"{name} turned from {outcome(before)} to {outcome(after)}"
        for name in order
        if len(found[name]) > 1
        for before, after in [list(found[name].values())[-2:]]
        if outcome(before) != outcome(after)
    ]
    since = f" Since the run before: {'; '.join(turned)}." if turned else ""
    # the newest first: a telephone shows the first columns
    columns = dict(reversed(list(runs.items())[-MOST_RUNS:]))
    answer = Answer(
        "own",
        "Do your loops and scripts hold?",
        brief,
        f"{brief}.{since}",
        "violations" if violated else "verification",
        matrix=matrix_of(
            "The verdict at each commit, the newest first",
            "loop or script",
            columns,
            {name: found[name] for name in order},
            verdicts.verdict_cell,
        ),
        sources=sources(record for _, _, record in judged),
    )
    return (answer,)


def _audited(records: Records) -> Iterable[ViolationPage]:
    """Yield the violations of the newest audit of each script."""
    for number, record in enumerate(records.newest("audit")):
        for i, violation in enumerate(result_from_json(record.data).violations):
            script = run_of(record.data)[0]
            where = machine_text(record.environment)
            yield violation_page(violation, loop=script, name=f"audit-{number}-{i}", machine=where)


# What a report is made of, and the report.


Heading = tuple[str, str, str]
"""Title, name and subtitle of a page."""


def _heading(reports: Path, answers: tuple[Answer, ...]) -> Heading:
    project = reports.resolve().parent.name
    said = answers[0].brief if answers else "nothing was judged yet"
    return f"{project}: {said}", project, "verdicts of gradcheck-suite"


@dataclass(frozen=True)
class Contents:
    """What a report is made of.

    Attributes:
        kinds: of records that are read, by name.
        parts: the sections in order; where all figures come from is the last one.
        answers: of the first screen.
        heading: of the folder of records and the answers.
        violations: found in the records, beside the stored ones.
        prepared: the records as answers and sections read them.
        beside: texts of the folder that no command made, by the name that a part has as its kind.
    """

    kinds: Mapping[str, Kind]
    parts: tuple[Part, ...]
    answers: Callable[[Records], tuple[Answer, ...]]
    heading: Callable[[Path, tuple[Answer, ...]], Heading]
    violations: Callable[[Records], Iterable[ViolationPage]] = lambda _: ()
    prepared: Callable[[Records], Records] = lambda records: records
    beside: Callable[[Path], Mapping[str, list[Record]]] = lambda _: {}


OWN = Contents(
    KINDS,
    # what a project never asked has no section
    tuple(
        replace(part, missing="")
        for part in (verdicts.VERIFICATION, verdicts.AUDITS, verdicts.REAL_TRAINERS)
    ),
    own_verdicts,
    _heading,
    _audited,
)
"""The report on the records of one's own loops, scripts and trainers."""


def build(reports: Path, contents: Contents = OWN) -> Report:
    """Build a report from the records under a folder.

    A record that cannot be read is left out and named.
    """

    def made(records: Records) -> tuple[tuple[Answer, ...], tuple[Section, ...]]:
        records = contents.prepared(records)
        answered = contents.answers(records)
        sections = tuple(section for part in contents.parts if (section := part.section(records)))
        last = verdicts.provenance(records, answered, sections, _made_on(records))
        return answered, (*sections, *([last] if last else []))

    found = replace(read_all(reports, contents.kinds), beside=contents.beside(reports))
    (answered, sections), records = made_from(found, made)
    violations, unread = stored_violations(reports)
    title, name, subtitle = contents.heading(reports, answered)
    return Report(
        title=title,
        name=name,
        subtitle=subtitle,
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        answers=answered,
        sections=sections,
        environments=_made_on(records),
        problems=(*records.problems, *unread),
        violations=(*contents.violations(records), *violations),
    )


def _made_on(records: Records) -> tuple[Pairs, ...]:
    return environments(record for kind in records.by_kind.values() for record in kind)


# What changed between the records of two folders.


SMALLEST = 0.1
"""Relative change of a measured time or size from which it is reported."""
Fact = str | float | None


def compared(old: Path, new: Path, contents: Contents = OWN) -> list[str]:
    """Return what changed between the records of two folders, a line each, and which records could
    not be read.
    """

    def facts(records: Records) -> Mapping[str, Facts]:
        found: dict[str, dict[str, str | float]] = {kind: {} for kind in contents.kinds}
        for part in contents.parts:
            if part.facts is not None:
                for record in records.newest(part.kind):
                    found[part.kind] |= part.facts(record.data)
        return found

    told = [(folder, *made_from(read_all(folder, contents.kinds), facts)) for folder in (old, new)]
    (_, before, _), (_, after, _) = told
    unread = [
        f"left out: {folder}: {problem.removesuffix('; left out')}"
        for folder, _, records in told
        for problem in records.problems
    ]
    return [*_changes(before, after), *unread]


def _changes(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[str]:
    """Return every difference between the facts of two folders as a line, below the name of its
    kind.

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
