"""Build the report from the records: the first screen's answers, the sections in order, the stored violations."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gradcheck_suite.report.answers import answers
from gradcheck_suite.report.content import Answer, Report, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import Records, environments, made_from, read_all
from gradcheck_suite.report.sections.atlas import atlas
from gradcheck_suite.report.sections.bridge import bridge
from gradcheck_suite.report.sections.calibration import calibration
from gradcheck_suite.report.sections.claims import claims
from gradcheck_suite.report.sections.compiled import compiled
from gradcheck_suite.report.sections.costs import costs
from gradcheck_suite.report.sections.decision import decision, timed_steps
from gradcheck_suite.report.sections.findings import findings
from gradcheck_suite.report.sections.memory import memory
from gradcheck_suite.report.sections.steps import steps
from gradcheck_suite.report.sections.traffic import traffic
from gradcheck_suite.report.sections.trainers import trainers
from gradcheck_suite.report.sections.verification import verification
from gradcheck_suite.report.sections.zero_or_none import zero_or_none
from gradcheck_suite.report.sections.zoo import zoo
from gradcheck_suite.report.violation import stored_violations

TITLE = "gradcheck-suite: what resetting gradients does, and what it costs"


def build(reports: Path) -> Report:
    """Build the report from the records under a folder; a record that cannot be read is left out and named."""
    (answered, sections), records = made_from(read_all(reports), lambda found: _parts(found, reports))
    violations, unread = stored_violations(reports)
    return Report(
        title=TITLE,
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        answers=answered,
        sections=sections,
        environments=environments(record for kind in records.by_kind.values() for record in kind),
        problems=(*records.problems, *unread),
        violations=violations,
    )


def _parts(records: Records, reports: Path) -> tuple[tuple[Answer, ...], tuple[Section, ...]]:
    measured, claimed = records.of("benchmark"), records.of("claim")
    sections: list[Section | None] = [
        verification(records.of("verify")),
        decision(measured),
        memory(records.of("memory")),
        costs(measured),
        compiled(measured),
        traffic(records.of("traffic")),
        claims(claimed, timed_steps(measured)),
        zoo(records.of("zoo")),
        calibration(records.of("calibration")),
        bridge(records.of("bridge")),
        trainers(records.of("trainer")),
        findings(reports),
        atlas(records.of("atlas")),
        zero_or_none(records.of("zero-or-none")),
        steps(records.of("step")),
        _provenance(records),
    ]
    return answers(records), tuple(section for section in sections if section is not None)


def _provenance(records: Records) -> Section | None:
    rows = tuple(
        (kind, source.records, source.date or None, source.commit or None, source.command or None,
         source.machine or None, "older" if source.older else "current", "unclean" if source.unclean else None)
        for kind, found in records.by_kind.items()
        for source in sources(found)
    )  # fmt: skip
    if not rows:
        return None
    columns = ("records", "number", "date", "commit", "command", "machine", "code", "working tree")
    table = Table(
        "Every run behind this report",
        columns,
        rows,
        "Older: the code that the figures speak of has changed since, or the record does not say which it was. That "
        "code depends on the kind of record: benchmarks speak of the modes and of what measures them, verdicts and "
        "claims of what verifies. One command can write both kinds. A section shows the newest record of each "
        "subject; earlier runs are listed too.",
    )
    return Section("provenance", "Where the figures come from", "environment", tables=(table,))
