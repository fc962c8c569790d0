"""The report put together: its answers first, then its sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradcheck_suite.core.records import Record
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.page.content import Answer, Figure, Report, Section, device_name, sources, step_times
from gradcheck_suite.page.violation import stored_violations
from gradcheck_suite.studies.report.charts import (
    STEPS,
    kept_gradient,
    kept_gradient_plot,
    unused_parameter,
    unused_parameter_plot,
)
from gradcheck_suite.studies.report.costs import (
    compiled,
    costs,
    current_steps,
    decision,
    memory,
    ratio_figures,
    timed_steps,
    traffic,
    window_figure,
)
from gradcheck_suite.studies.report.evidence import (
    atlas,
    calibration,
    claim_list,
    claims,
    moved_by_zeros,
    steps,
    zero_or_none,
    zoo,
)
from gradcheck_suite.studies.report.verdicts import (
    Pairs,
    Records,
    audits,
    bridge,
    disagreement,
    environment,
    environments,
    findings,
    made_from,
    matrix,
    newest_verdicts,
    place_order,
    read_all,
    share_text,
    trainers,
    verification,
)

# The four answers of the first screen, each one sentence with its figure, and their pictures.


EQUIVALENCE = "C2.5"
"""The claim that zeroing by hand is equivalent to the optimizer's `zero_grad`."""
HEIGHT = 112
"""Pixels of the plots on the first screen."""


def answers(records: Records) -> tuple[Answer, ...]:
    """Return the answers to the four main questions."""
    measured = records.of("benchmark")
    return (
        _holds(records.of("verify")),
        _differs([r for r in records.of("claim") if r.data.get("number") == EQUIVALENCE], records.of("zero-or-none")),
        _costs(measured, records.of("memory")),
        _true(records.of("claim"), measured),
    )


def _holds(records: Sequence[Record]) -> Answer:
    newest = newest_verdicts(records)
    modes = [record for record in newest if record.data.get("loop") in MODES]
    brief, sentence = _holds_sentence(modes)
    return Answer(
        "holds",
        "Does every mode hold?",
        brief,
        sentence,
        "verification",
        matrix=matrix(newest, len(MODES)) if newest else None,
        sources=sources(modes or newest),
    )


def _holds_sentence(newest: Sequence[Record]) -> tuple[str, str]:
    """Return the answer in a few words, and as a sentence with its figures."""
    if not newest:
        return "Not verified yet", "Not verified yet."
    datas = [record.data for record in newest]
    modes = {str(d["loop"]) for d in datas}
    violated = {str(d["loop"]) for d in datas if d["verdict"] != "holds"}
    if violated:
        brief = f"No: {len(violated)} of {len(modes)} are violated"
        return brief, f"{brief} ({', '.join(sorted(violated))})."
    judged = sorted({int(d.get("judged", 0)) for d in datas})
    cases = " to ".join(f"{count:,}" for count in dict.fromkeys((judged[0], judged[-1])))
    worst = max(float(d.get("worst_error_over_allowed") or 0) for d in datas)
    brief = f"Yes, all {len(modes)} modes hold"
    disagreeing = f" {disagreement(datas)}." if disagreement(datas) else ""
    return f"{brief}{_where_all(datas)}: the gradient is that of one large batch", (
        f"{brief}: in {cases} random cases each, the gradient is that of one large batch. The worst error is "
        f"{share_text(worst)} of what rounding allows.{disagreeing}"
    )


def _where_all(datas: Sequence[Mapping[str, Any]]) -> str:
    """Return the dtypes in which every mode was verified, by device; empty if there are none."""
    modes: dict[tuple[str, str], set[str]] = {}
    for data in datas:
        place = (str(data.get("dtype", "?")), str(data.get("device", "?")))
        modes.setdefault(place, set()).add(str(data["loop"]))
    most = max(len(mine) for mine in modes.values())
    devices: dict[str, list[str]] = {}
    for dtype, device in sorted((place for place in modes if len(modes[place]) == most), key=place_order):
        devices.setdefault(device, []).append(dtype)
    return " and".join(f" in {', '.join(dtypes)} on the {device_name(device)}" for device, dtypes in devices.items())


def _differs(records: Sequence[Record], optimizers: Sequence[Record]) -> Answer:
    unused, kept = unused_parameter(), kept_gradient()
    moved = unused["None"][-1] - unused["zero_"][-1]
    return Answer(
        "differs",
        "Where do they differ?",
        f"zero_ moves an unused parameter (momentum{', Adam' * ('Adam' in moved_by_zeros(optimizers))}) and clears a "
        "gradient that was kept; None does neither",
        f"Unused parameter: zero_ moves it on by momentum ({moved:.2f} in {STEPS} steps){_also_moved(optimizers)}; "
        f"None does not. Kept gradient: zero_ sets it to {kept['zero_'][1]:g}; None keeps it.",
        "atlas" if optimizers else "claims",
        figures=(
            Figure(
                "unused-parameter",
                unused_parameter_plot(HEIGHT),
                "A parameter that only the first step uses, under SGD with momentum 0.9: under zero_ it moves on from "
                f"{unused['zero_'][0]:g} to {unused['zero_'][-1]:.2f}, under None it stays at {unused['None'][-1]:g}",
                "A parameter used in step 1 alone, SGD, momentum 0.9",
            ),
            Figure(
                "kept-gradient",
                kept_gradient_plot(HEIGHT),
                "A kept reference to a gradient after the backward, the reset and the next backward: under zero_ "
                f"{', '.join(f'{v:g}' for v in kept['zero_'])}; under None {', '.join(f'{v:g}' for v in kept['None'])}",
                "A gradient given away: kept = p.grad[0]",
            ),
        ),
        sources=sources(records[-1:]),
    )


def _also_moved(optimizers: Sequence[Record]) -> str:
    """Return which optimizers move a parameter without a gradient under `zero_` alone, the first of them by name."""
    names = moved_by_zeros(optimizers)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f", also under {names[0]}{more}" if names else ""


def _costs(measured: Sequence[Record], memory: Sequence[Record]) -> Answer:
    rows = timed_steps(measured)
    window = window_figure(memory, HEIGHT)
    sentence = " ".join(filter(None, (_time_sentence(measured), _memory_sentence(memory))))
    figures = [*ratio_figures(rows, HEIGHT), *([window] if window else [])]
    return Answer(
        "costs",
        "What does each cost?",
        _costs_in_brief(measured, memory),
        sentence or "Not measured yet.",
        "cost",
        figures=tuple(replace(figure, key=f"first-{figure.key}") for figure in figures[:3]),
        sources=sources([*current_steps(measured), *memory]),
    )


def _costs_in_brief(measured: Sequence[Record], memory: Sequence[Record]) -> str:
    found = step_times(timed_steps(measured))
    rows, neither = len(found.rows), len(found.where("neither"))
    kept = _kept_gradients(memory)
    settings = f"{_of(neither, rows)} {_devices(found.rows)}settings"
    said = [f"Time: no difference shown in {settings}"] if rows else []
    said += (
        [
            f"{'m' if said else 'M'}emory between steps, {kept[0] / 1e6:.0f} M parameters: zero_ keeps {kept[1]:.0f} "
            f"MiB, None {kept[2]:.0f}"
        ]
        if kept
        else []
    )
    return "; ".join(said) or "Not measured yet"


def _time_sentence(measured: Sequence[Record]) -> str:
    rows = timed_steps(measured)
    texts = []
    for device in sorted({str(row["device"]) for row in rows}):
        found = step_times([row for row in rows if row["device"] == device])
        if not found.rows:
            continue
        counts = {name: len(found.where(which)) for name, which in (("None", "none"), ("zero_", "zero"))}
        faster = [f"{name} is faster in {count}" for name, count in counts.items() if count]
        shown = (
            f"no difference shown in {_of(len(found.where('neither')), len(found.rows))} {device_name(device)} settings"
        )
        texts.append(f"Time: {'; '.join([f'{shown} ({_medians(found.rows)})', *faster])}.")
    return " ".join(texts)


def _of(count: int, total: int) -> str:
    return f"any of {total}" if count == total else f"{count} of {total}"


def _devices(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the device of some rows, with a space after it; empty where they have several."""
    names = {device_name(str(row["device"])) for row in rows}
    return f"{names.pop()} " if len(names) == 1 else ""


def _medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of pairs behind each setting, and between which values the medians lie."""
    pairs = sorted({int(row["pairs"]) for row in rows})
    saved = sorted(float(row["saved"]) / float(row["zero"]) for row in rows)
    lowest, highest = (f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}" for share in (saved[0], saved[-1]))
    counted = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    return f"{counted} pairs of steps each; medians under None from {lowest} to {highest}"


def _kept_gradients(records: Sequence[Record]) -> tuple[int, float, float] | None:
    """Return the largest measured number of parameters, and the MiB of gradients that zero_ and None keep there."""
    kept = {
        (int(r.data["parameters"]), str(r.data["mode"])): float(r.data["gradients_between"]) / 2**20 for r in records
    }
    sizes = [size for size, mode in kept if mode == "zero_" and (size, "set_to_none") in kept]
    return (max(sizes), kept[max(sizes), "zero_"], kept[max(sizes), "set_to_none"]) if sizes else None


def _memory_sentence(records: Sequence[Record]) -> str:
    if not (kept := _kept_gradients(records)):
        return ""
    return (
        f"Memory between steps, {kept[0] / 1e6:.0f} M parameters: zero_ keeps {kept[1]:.0f} MiB of gradients, None "
        f"{kept[2]:.0f} MiB."
    )


def _true(records: Sequence[Record], measured: Sequence[Record]) -> Answer:
    found = claim_list(records, timed_steps(measured))
    counts = Counter(claim.verdict for claim in found)
    brief = f"{counts['confirmed']} yes, {counts['conditional']} under a condition, {counts['refuted']} no"
    sentence = (
        f"Of {len(found)} widely read claims {counts['confirmed']} are true (confirmed), {counts['conditional']} true "
        f"under a condition, {counts['refuted']} false (refuted)."
    )
    return Answer(
        "claims",
        "Which claims are true?",
        brief if found else "Not tested yet",
        sentence if found else "Not tested yet.",
        "claims",
        claims=found,
        sources=sources([r for r in records if "number" in r.data][-len(found) :] if found else ()),
    )


# Build the report from the records: the first screen's answers, the sections in order, the stored violations.


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
