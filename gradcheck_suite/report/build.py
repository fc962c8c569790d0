"""Build the report from the records: the sections in order, and the answers to the main questions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.bridge_section import bridge
from gradcheck_suite.report.calibration_section import calibration
from gradcheck_suite.report.compiled_section import compiled
from gradcheck_suite.report.content import Report, Section, device_name
from gradcheck_suite.report.costs_section import costs
from gradcheck_suite.report.decision_section import decision
from gradcheck_suite.report.memory_section import memory
from gradcheck_suite.report.records_view import environments, latest, read_all
from gradcheck_suite.report.sections import claims, counterexamples, verification
from gradcheck_suite.report.trainers_section import trainers
from gradcheck_suite.report.zoo_section import zoo

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
        claims(records.of("claim")),
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
    cases = sum(int(d["judged"]) for d in newest)
    dtypes = ", ".join(sorted({str(d["dtype"]) for d in newest}))
    return (
        f"Yes: {len({d['loop'] for d in newest})} ways of resetting hand the optimizer the large batch's gradient, in "
        f"each of {cases:,} judged cases ({dtypes})."
    )


def _differ(records: Sequence[Record]) -> str:
    newest = [record.data for record in records if record.data.get("number") == EQUIVALENCE]
    return str(newest[-1]["sentence"]) if newest else "Not tested yet."


def _cost(measured: Sequence[Record], memory: Sequence[Record]) -> str:
    sentences = [text for text in (_windows(measured), _steps(measured), _kept(memory)) if text]
    return " ".join(sentences) or "Not measured yet."


def _windows(records: Sequence[Record]) -> str:
    windows: dict[tuple[object, ...], dict[str, float]] = {}
    for record in records:
        data = record.data
        if data.get("measures") == "window":
            key = tuple(data[n] for n in ("device", "dtype", "parameters", "layout", "micro_batches"))
            windows.setdefault(key, {})[str(data["mode"])] = float(data["seconds"]["median"])
    both = {k: v["zero_"] / v["set_to_none"] for k, v in windows.items() if {"zero_", "set_to_none"} <= v.keys()}
    parts = []
    for device in sorted({str(k[0]) for k in both}):
        ratios = sorted(ratio for k, ratio in both.items() if k[0] == device)
        parts.append(
            f"On the {device_name(device)} a window under zero_ takes {median(ratios):.2f} times as long as under "
            f"set_to_none (median of {len(ratios)} settings, {ratios[0]:.2f} to {ratios[-1]:.2f})."
        )
    return " ".join(parts)


def _steps(records: Sequence[Record]) -> str:
    steps = [r.data for r in records if r.data.get("measures") == "step"]
    if not steps:
        return ""
    equal = sum(step["better"] == "neither" for step in steps)
    return (
        f"Over whole steps, measured with the modes in turn, chance explains the difference in {equal} of "
        f"{len(steps)} settings."
    )


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
