"""Build the report from the records: the sections in order, and the answers to the main questions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.records.step_times import summary
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Report, Section, device_name
from gradcheck_suite.report.records_view import environments, latest, read_all
from gradcheck_suite.report.sections.bridge import bridge
from gradcheck_suite.report.sections.calibration import calibration
from gradcheck_suite.report.sections.compiled import compiled
from gradcheck_suite.report.sections.costs import costs
from gradcheck_suite.report.sections.decision import decision, timed_steps
from gradcheck_suite.report.sections.memory import memory
from gradcheck_suite.report.sections.trainers import trainers
from gradcheck_suite.report.sections.verification import claims, counterexamples, verification
from gradcheck_suite.report.sections.zoo import zoo

TITLE = "gradcheck-suite: what resetting gradients does, and what it costs"
EQUIVALENCE = "C2.5"
"""The claim that zeroing by hand is equivalent to the optimizer's `zero_grad`."""


def build(reports: Path) -> Report:
    """Build the report from the records under a folder."""
    records = read_all(reports)
    sections: list[Section | None] = [
        verification(records.of("verify")),
        costs(records.of("benchmark")),
        memory(records.of("memory")),
        decision(records.of("benchmark")),
        compiled(records.of("benchmark")),
        claims(records.of("claim"), timed_steps(records.of("benchmark"))),
        zoo(records.of("zoo")),
        calibration(records.of("calibration")),
        bridge(records.of("bridge")),
        trainers(records.of("trainer")),
        counterexamples(records.of("verify")),
    ]
    everything = [record for kind in records.by_kind.values() for record in kind]
    return Report(
        title=TITLE,
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        answers=(
            ("Does zero_ give the same gradients as set_to_none?", _equal(records.of("verify")), "verified"),
            ("Where do they differ?", _differ(records.of("claim")), "claims"),
            ("What does each cost?", _cost(records.of("benchmark"), records.of("memory")), "costs"),
            ("Which of the claims are true?", _true(records.of("claim")), "claims"),
        ),
        sections=tuple(section for section in sections if section is not None),
        environments=environments(everything),
        problems=records.problems,
    )


def _equal(records: Sequence[Record]) -> str:
    newest = [r.data for r in latest(records, lambda d: (d.get("loop"), d.get("dtype"))) if r.data.get("loop") in MODES]
    if not newest:
        return "Not verified yet."
    violated = [d["loop"] for d in newest if d["verdict"] != "holds"]
    if violated:
        return f"No: {', '.join(violated)} violated."
    cases = max(int(d["judged"]) for d in newest)
    dtypes = ", ".join(sorted({str(d["dtype"]) for d in newest}))
    return (
        f"Yes: {len({d['loop'] for d in newest})} ways of resetting hand the optimizer the large batch's gradient, in "
        f"each of the {cases:,} cases that every one of them was judged on ({dtypes})."
    )


def _differ(records: Sequence[Record]) -> str:
    newest = [record.data for record in records if record.data.get("number") == EQUIVALENCE]
    return str(newest[-1]["sentence"]) if newest else "Not tested yet."


def _cost(measured: Sequence[Record], memory: Sequence[Record]) -> str:
    sentences = [text for text in (_steps(measured), _kept(memory)) if text]
    return " ".join(sentences) or "Not measured yet."


def _steps(records: Sequence[Record]) -> str:
    rows = timed_steps(records)
    devices = sorted({str(row["device"]) for row in rows})
    return " ".join(summary([row for row in rows if row["device"] == d], device_name(d)) for d in devices)


def _kept(records: Sequence[Record]) -> str:
    kept = {
        (int(r.data["parameters"]), str(r.data["mode"])): float(r.data["gradients_between"]) / 2**20 for r in records
    }
    sizes = [size for size, mode in kept if mode == "zero_" and (size, "set_to_none") in kept]
    if not sizes:
        return ""
    size = max(sizes)
    return (
        f"Between the steps of a model with {size:,} parameters, zero_ keeps {kept[size, 'zero_']:.0f} MiB of "
        f"gradients, set_to_none {kept[size, 'set_to_none']:.0f} MiB."
    )


def _true(records: Sequence[Record]) -> str:
    newest = latest([r for r in records if "number" in r.data], lambda d: d["number"])
    if not newest:
        return "Not tested yet."
    counts = {v: sum(r.data["verdict"] == v for r in newest) for v in ("confirmed", "conditional", "refuted")}
    return (
        f"Of {len(newest)} claims {counts['confirmed']} are confirmed, {counts['conditional']} true under a condition, "
        f"{counts['refuted']} refuted."
    )
