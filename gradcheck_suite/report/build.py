"""Build the report from the records: the first screen's answers, the sections in order, the stored violations."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gradcheck_suite.report.answers import answers
from gradcheck_suite.report.content import Answer, Report, Section
from gradcheck_suite.report.records_view import Pairs, Records, environments, made_from, read_all
from gradcheck_suite.report.sections.atlas import atlas
from gradcheck_suite.report.sections.audits import audits
from gradcheck_suite.report.sections.bridge import bridge
from gradcheck_suite.report.sections.calibration import calibration
from gradcheck_suite.report.sections.claims import claims
from gradcheck_suite.report.sections.compiled import compiled
from gradcheck_suite.report.sections.costs import costs
from gradcheck_suite.report.sections.decision import decision, timed_steps
from gradcheck_suite.report.sections.environment import environment
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
SUBTITLE = "zero_ writes zeros to p.grad; None releases it: p.grad = None"


def build(reports: Path) -> Report:
    """Build the report from the records under a folder; a record that cannot be read is left out and named."""
    (answered, sections), records = made_from(read_all(reports), lambda found: _parts(found, reports))
    violations, unread = stored_violations(reports)
    return Report(
        title=TITLE,
        subtitle=SUBTITLE,
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        answers=answered,
        sections=sections,
        environments=_made_on(records),
        problems=(*records.problems, *unread),
        violations=violations,
    )


def _parts(records: Records, reports: Path) -> tuple[tuple[Answer, ...], tuple[Section, ...]]:
    measured, claimed = records.of("benchmark"), records.of("claim")
    sections: list[Section | None] = [
        verification(records.of("verify")),
        audits(records.of("audit")),
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
    ]
    answered, written = answers(records), tuple(section for section in sections if section is not None)
    last = environment(records, answered, written, _made_on(records))
    return answered, (*written, *([last] if last else []))


def _made_on(records: Records) -> tuple[Pairs, ...]:
    return environments(record for kind in records.by_kind.values() for record in kind)
