"""A report put together from records: its answers first, then its sections; what
changed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from gradcheck_suite.core.records import KINDS, Data, Record, RecordKind, audited_script
from gradcheck_suite.core.results import result_from_json
from gradcheck_suite.page import verdicts
from gradcheck_suite.page.content import HeadlineAnswer, Report, Section, machine_text, sources
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


@dataclass(frozen=True)
class _Judged:
    """A loop, a script or a question to a trainer that was judged, its result and the record."""

    name: str
    result: Data
    record: Record


def _judged_runs(records: Records) -> list[_Judged]:
    """Return what was judged, oldest first."""
    found = [
        _Judged(audited_script(record.data)[0], record.data, record)
        for record in (*records.of("verify"), *records.of("audit"))
    ]
    for record in records.of("trainer"):
        result = record.data["result"]
        if result:
            name = f"{record.data['trainer']}: {record.data['question']}"
            found.append(_Judged(name, result, record))
    return sorted(found, key=lambda judged: judged.record.time)


def own_verdicts(records: Records) -> tuple[HeadlineAnswer, ...]:
    """Return the answer on the project's loops and scripts: their verdicts by commit, the worst
    first, and what has changed; no answer where nothing was judged.
    """
    found: dict[str, dict[str, Data]] = {}
    runs: dict[str, str] = {}
    judged = _judged_runs(records)
    if not judged:
        return ()
    for one in judged:
        commit = one.record.commit[:7] or "no commit"
        # a commit that is met again moves to the end: the last run of it counts
        runs.pop(commit, None)
        runs[commit] = f"{commit}, {one.record.time[:10]}"
        row = found.setdefault(one.name, {})
        row.pop(commit, None)
        row[commit] = one.result
    last = {name: list(row.values())[-1] for name, row in found.items()}
    order = sorted(found, key=lambda name: (_RANKED.index(str(last[name]["verdict"])), name))
    violated = [name for name in order if last[name]["verdict"] == "violated"]
    brief = _brief({name: last[name] for name in order}, violated)
    turned = list(filter(None, (_turned(name, list(found[name].values())) for name in order)))
    since = f" Since the run before: {'; '.join(turned)}." if turned else ""
    # the newest first: a telephone shows the first columns
    columns = dict(reversed(list(runs.items())[-MOST_RUNS:]))
    answer = HeadlineAnswer(
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
        sources=sources(one.record for one in judged),
    )
    return (answer,)


def _brief(last: Mapping[str, Data], violated: Sequence[str]) -> str:
    """Return how many loops and scripts hold, and the names of the first that do not."""
    total = len(last)
    what = "loop or script" if total == 1 else "loops and scripts"
    if violated:
        named = [f"{name} ({_diagnosis(last[name])})" for name in violated[:MOST_NAMED]]
        if len(violated) > MOST_NAMED:
            named.append(f"{len(violated) - MOST_NAMED} more")
        return f"No: {len(violated)} of {total} {what} violated: {', '.join(named)}"
    holding = sum(data["verdict"] == "holds" for data in last.values())
    # an unjudged loop neither holds nor is violated
    said = "Yes" if holding == total else "Not known"
    return f"{said}: {holding} of {total} {what} {'holds' if total == 1 else 'hold'}"


def _turned(name: str, results: Sequence[Data]) -> str | None:
    """Return how the last verdict differs from the one before; None where it does not."""
    if len(results) < 2:
        return None
    before, after = map(outcome, results[-2:])
    return f"{name} turned from {before} to {after}" if before != after else None


def _audited(records: Records) -> Iterable[ViolationPage]:
    """Yield the violations of the newest audit of each script."""
    for number, record in enumerate(records.newest("audit")):
        for i, violation in enumerate(result_from_json(record.data).violations):
            script = audited_script(record.data)[0]
            where = machine_text(record.environment)
            yield violation_page(violation, loop=script, name=f"audit-{number}-{i}", machine=where)


# What a report is made of, and the report.


Heading = tuple[str, str, str]
"""Title, name and subtitle of a page."""


def _heading(reports: Path, answers: tuple[HeadlineAnswer, ...]) -> Heading:
    project = reports.resolve().parent.name
    said = answers[0].brief if answers else "nothing was judged yet"
    return f"{project}: {said}", project, "verdicts of gradcheck-suite"


@dataclass(frozen=True)
class ReportContents:
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

    kinds: Mapping[str, RecordKind]
    parts: tuple[Part, ...]
    answers: Callable[[Records], tuple[HeadlineAnswer, ...]]
    heading: Callable[[Path, tuple[HeadlineAnswer, ...]], Heading]
    violations: Callable[[Records], Iterable[ViolationPage]] = lambda _: ()
    prepared: Callable[[Records], Records] = lambda records: records
    beside: Callable[[Path], Mapping[str, list[Record]]] = lambda _: {}


OWN = ReportContents(
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


def build(reports: Path, contents: ReportContents = OWN) -> Report:
    """Build a report from the records under a folder.

    A record that cannot be read is left out and named.
    """

    def made(records: Records) -> tuple[tuple[HeadlineAnswer, ...], tuple[Section, ...]]:
        records = contents.prepared(records)
        answered = contents.answers(records)
        sections = [section for section in (p.section(records) for p in contents.parts) if section]
        last = verdicts.provenance(records, answered, sections, _made_on(records))
        return answered, tuple([*sections, last] if last else sections)

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
    return environments(chain.from_iterable(records.by_kind.values()))


# What changed between the records of two folders.


SMALLEST = 0.1
"""Relative change of a measured time or size from which it is reported."""
Fact = str | float | None


def compared(old: Path, new: Path, contents: ReportContents = OWN) -> list[str]:
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

    before, records_before = made_from(read_all(old, contents.kinds), facts)
    after, records_after = made_from(read_all(new, contents.kinds), facts)
    lines = _differing_facts(before, after)
    for folder, records in ((old, records_before), (new, records_after)):
        lines += [
            f"left out: {folder}: {problem.removesuffix('; left out')}"
            for problem in records.problems
        ]
    return lines


def _differing_facts(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[str]:
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
        # times differ from run to run
        return abs(after - before) > SMALLEST * max(abs(before), abs(after))
    return before != after


def _told(what: str, before: Fact, after: Fact) -> str:
    was, now = (f"{fact:.3g}" if isinstance(fact, float) else fact for fact in (before, after))
    if was is None:
        return f"+ {what}: {now}"
    return f"- {what}: was {was}" if now is None else f"{what}: {was} -> {now}"
