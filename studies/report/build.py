"""The report put together: its answers first, then its sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradcheck_suite.core.records import Record
from gradcheck_suite.core.results import result_from_json
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.page.content import Answer, Figure, Report, Section, machine_text, sources
from gradcheck_suite.page.violation import ViolationPage, stored_violations, violation_page
from studies.report import charts, costs, evidence, reading, verdicts
from studies.report.reading import (
    Data,
    Part,
    Records,
    by_device,
    current,
    device_name,
    run_of,
    step_times,
)
from studies.report.verdicts import outcome

PARTS: tuple[Part, ...] = (
    verdicts.VERIFICATION, verdicts.AUDITS, verdicts.PUBLIC_SCRIPTS, costs.DECISION, costs.MEMORY,
    costs.COSTS, costs.COMPILED, costs.TRAFFIC,
    evidence.CLAIMED, evidence.ZOO, evidence.CALIBRATION, verdicts.BRIDGE, verdicts.REAL_TRAINERS, verdicts.FINDINGS,
    evidence.ATLAS, evidence.ZERO_OR_NONE, evidence.OPTIMIZER_STEPS,
)  # fmt: skip
"""The sections of the report, in order; where all figures come from is the last one."""

# The four answers of the first screen, each one sentence with its figure, and their pictures.


EQUIVALENCE = "C2.5"
"""The claim that zeroing by hand is equivalent to the optimizer's `zero_grad`."""
HEIGHT = 112
"""Pixels of the plots on the first screen."""


def answers(records: Records) -> tuple[Answer, ...]:
    """Return the answers of the first screen.

    Of a project with loops or scripts of its own these come first, then what else its records answer; otherwise there
    are the four main questions.
    """
    if not own(records):
        return _holds(records), _differs(records), _costs(records), _true(records)
    modes = any(record.data.get("loop") in MODES for record in records.of("verify"))
    asked = {
        _holds: modes,
        _differs: records.of("zero-or-none") or records.of("claim"),
        _costs: records.of("benchmark") or records.of("memory"),
        _true: records.of("claim"),
    }
    return _own(records), *(answer(records) for answer, found in asked.items() if found)


MOST_RUNS = 6
"""Commits whose verdicts on own loops and scripts are shown."""
MOST_NAMED = 3
"""Violated loops and scripts that the answer names."""


def own(records: Records) -> list[Record]:
    """Return the records of loops and scripts of a user's project, oldest first; none in this suite's own folder.

    This suite's folder has records of its known bugs and of its calibration, which are no user's.
    """
    if records.of("zoo") or records.of("calibration"):
        return []
    built_in = {*BUILT_IN, *JAX_MODES, *RANK_LOOPS, *TRAINERS}
    mine = [record for record in records.of("verify") if record.data.get("loop") not in built_in]
    return sorted([*mine, *records.of("audit")], key=lambda record: record.time)


def _own(records: Records) -> Answer:
    """Return the verdicts on the loops and scripts of a project, by commit, the worst first, and what changed."""
    found: dict[str, dict[str, Data]] = {}
    runs: dict[str, str] = {}
    for record in own(records):
        commit = record.commit[:7] or "no commit"
        runs.pop(commit, None)
        runs[commit] = f"{commit}, {record.time[:10]}"
        row, name = found.setdefault(run_of(record.data)[0], {}), commit
        row.pop(name, None)
        row[name] = record.data
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
        brief = f"{'Yes' if holding == len(found) else 'Not known'}: {holding} of {len(found)} {what} {verb}"
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
    return Answer(
        "own",
        "Do your loops and scripts hold?",
        brief,
        f"{brief}.{since}",
        "violations" if violated else "verification",
        matrix=reading.matrix_of(
            "The verdict at each commit, the newest first", "loop or script", columns,
            {name: found[name] for name in order}, verdicts.own_cell,
        ),
        sources=sources(own(records)),
    )  # fmt: skip


_RANKED = ("violated", "unjudged", "holds")


def _diagnosis(data: Data) -> str:
    violation = result_from_json(data).violation
    return violation.diagnosis if violation else "violated"


def _holds(records: Records) -> Answer:
    newest = records.newest("verify")
    shown = [record for record in newest if record.data.get("loop") in {**MODES, **JAX_MODES}]
    brief, sentence = _holds_sentence([record.data for record in shown])
    shown = shown or newest
    return Answer(
        "holds",
        "Does every mode hold?",
        brief,
        sentence,
        "verification",
        matrix=verdicts.verdict_matrix(shown, len(MODES) + len(JAX_MODES)) if newest else None,
        sources=sources(shown),
    )


def _holds_sentence(datas: Sequence[Data]) -> tuple[str, str]:
    """Return the answer in a few words, and as a sentence with its figures: on the modes of torch and of JAX."""
    datas = [d for d in datas if d["verdict"] != "unjudged"]
    if not datas:
        return "Not verified yet", "Not verified yet."
    modes = {str(d["loop"]) for d in datas}
    violated = {str(d["loop"]) for d in datas if d["verdict"] == "violated"}
    if violated:
        brief = f"No: {len(violated)} of {len(modes)} are violated"
        return brief, f"{brief} ({', '.join(sorted(violated))})."
    hold: list[str] = []
    where: list[str] = []
    cases: list[str] = []
    for known, of in ((MODES, ""), (JAX_MODES, " of JAX")):
        if mine := [d for d in datas if d["loop"] in known]:
            hold.append(_hold(len({d["loop"] for d in mine}), len(known), of, first=not hold))
            where.append(f"{hold[-1]}{_where_all(mine)}")
            judged = sorted({int(d.get("judged", 0)) for d in mine})
            count = " to ".join(f"{number:,}" for number in dict.fromkeys((judged[0], judged[-1])))
            cases.append(f"in {count}{of if cases else ' random cases each'}")
    worst = max(float(d.get("worst_error_over_allowed") or 0) for d in datas)
    disagreement = verdicts.disagreement(datas)
    return f"Yes, {', and '.join(where)}: the gradient is that of one large batch", (
        f"Yes, {', and '.join(hold)}: {', and '.join(cases)}, the gradient is that of one large batch. The worst "
        f"error is {verdicts.share_text(worst)} of what rounding allows.{f' {disagreement}.' if disagreement else ''}"
    )


def _hold(count: int, known: int, of: str, *, first: bool) -> str:
    """Return how many modes hold of those that are known, such as "all 8 modes hold", or after that "all 5 of JAX"."""
    share = f"all {known}" if count == known else f"{count} of {known}"
    if not first:
        return f"{share}{of}"
    verb = "hold" if count == known else "was verified and holds" if count == 1 else "were verified and hold"
    return f"{share} modes{of} {verb}"


def _where_all(datas: Sequence[Data]) -> str:
    """Return the dtypes in which every mode was verified, by device; empty if there are none."""
    modes: dict[tuple[str, str], set[str]] = {}
    for data in datas:
        modes.setdefault(verdicts.place_of(data), set()).add(str(data["loop"]))
    most = max(len(mine) for mine in modes.values())
    devices: dict[str, list[str]] = {}
    for dtype, device in sorted((p for p in modes if len(modes[p]) == most), key=verdicts.place_order):
        devices.setdefault(device, []).append(dtype)
    return " and".join(f" in {', '.join(dtypes)} on the {device_name(device)}" for device, dtypes in devices.items())


def _differs(records: Records) -> Answer:
    unused, kept = charts.unused_parameter(), charts.kept_gradient()
    moved = unused["None"][-1] - unused["zero_"][-1]
    also = evidence.moved_by_zeros(records)
    more = f" and {len(also) - 1} more" if len(also) > 1 else ""
    return Answer(
        "differs",
        "Where do they differ?",
        f"zero_ moves an unused parameter (momentum{', Adam' * ('Adam' in also)}) and clears a gradient that was kept; "
        "None does neither",
        f"Unused parameter: zero_ moves it on by momentum ({moved:.2f} in {charts.STEPS} steps)"
        f"{f', also under {also[0]}{more}' if also else ''}; None does not. Kept gradient: zero_ sets it to "
        f"{kept['zero_'][1]:g}; None keeps it.",
        "atlas" if records.of("zero-or-none") else "claims",
        figures=(
            Figure(
                "unused-parameter",
                charts.unused_parameter_plot(HEIGHT),
                "A parameter that only the first step uses, under SGD with momentum 0.9: under zero_ it moves on from "
                f"{unused['zero_'][0]:g} to {unused['zero_'][-1]:.2f}, under None it stays at {unused['None'][-1]:g}",
                "A parameter used in step 1 alone, SGD, momentum 0.9",
            ),
            Figure(
                "kept-gradient",
                charts.kept_gradient_plot(HEIGHT),
                "A kept reference to a gradient after the backward, the reset and the next backward: under zero_ "
                f"{', '.join(f'{v:g}' for v in kept['zero_'])}; under None {', '.join(f'{v:g}' for v in kept['None'])}",
                "A gradient given away: kept = p.grad[0]",
            ),
        ),
        sources=sources([r for r in records.of("claim") if r.data.get("number") == EQUIVALENCE][-1:]),
    )


def _costs(records: Records) -> Answer:
    measured, memory = records.of("benchmark"), records.of("memory")
    rows = costs.timed_steps(measured)
    window = costs.window_figure(memory, HEIGHT)
    figures = [*costs.ratio_figures(rows, HEIGHT), *([window] if window else [])]
    kept = _kept_gradients(memory)
    said = [*_time_sentences(rows)]
    found = step_times(rows)
    brief = []
    if found.rows:
        names = {device_name(str(row["device"])) for row in found.rows}
        device = f"{names.pop()} " if len(names) == 1 else ""
        settings = f"{_of(len(found.where('neither')), len(found.rows))} {device}settings"
        brief.append(f"Time: no difference shown in {settings}")
    if kept:
        parameters, zeroed, released = kept
        where = f"emory between steps, {parameters / 1e6:.0f} M parameters: zero_ keeps {zeroed} MiB"
        said.append(f"M{where} of gradients, None {released} MiB.")
        brief.append(f"{'m' if brief else 'M'}{where}, None {released}")
    return Answer(
        "costs",
        "What does each cost?",
        "; ".join(brief) or "Not measured yet",
        " ".join(said) or "Not measured yet.",
        "cost",
        figures=tuple(replace(figure, key=f"first-{figure.key}") for figure in figures[:3]),
        sources=sources([*current(measured, ["step"]), *memory]),
    )


def _time_sentences(rows: Sequence[Data]) -> Iterable[str]:
    for device, mine in by_device(rows).items():
        found = step_times(mine)
        if found.rows:
            counts = {name: len(found.where(which)) for name, which in (("None", "none"), ("zero_", "zero"))}
            some = [f"{name} in {count}" for name, count in counts.items() if count]
            faster = f"; faster: {', '.join(some)}" * bool(some)
            settings = f"{_of(len(found.where('neither')), len(found.rows))} {device_name(device)} settings"
            yield f"Time: no difference shown in {settings} ({_medians(found.rows)}){faster}."


def _of(count: int, total: int) -> str:
    return f"any of {total}" if count == total else f"{count} of {total}"


def _medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of pairs behind each setting, and between which values the medians lie."""
    pairs = sorted({int(row["pairs"]) for row in rows})
    saved = sorted(float(row["saved"]) / float(row["zero"]) for row in rows)
    lowest, highest = (f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}" for share in (saved[0], saved[-1]))
    counted = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    return f"{counted} pairs of steps each; medians: None {lowest} to {highest}"


def _kept_gradients(records: Sequence[Record]) -> tuple[int, str, str] | None:
    """Return the largest measured number of parameters, and the MiB of gradients that zero_ and None keep there."""
    kept: dict[int, dict[str, str]] = {}
    for data in (record.data for record in records):
        size = f"{float(data['gradients_between']) / 2**20:.0f}"
        kept.setdefault(int(data["parameters"]), {})[str(data["mode"])] = size
    both = {parameters: modes for parameters, modes in kept.items() if {"zero_", "set_to_none"} <= modes.keys()}
    return (max(both), both[max(both)]["zero_"], both[max(both)]["set_to_none"]) if both else None


def _true(records: Records) -> Answer:
    found = evidence.claim_list(records.of("claim"))
    counts, questions = evidence.counted_verdicts(found)
    brief = f"{counts['confirmed']} yes, {counts['conditional']} under a condition, {counts['refuted']} no"
    sentence = (
        f"Of {counts.total()} widely read claims {counts['confirmed']} are true (confirmed), {counts['conditional']} "
        f"true under a condition, {counts['refuted']} false (refuted)."
        + "".join(f" One question: {question.text} {question.verdict.capitalize()}." for question in questions)
    )
    return Answer(
        "claims",
        "Which claims are true?",
        brief if found else "Not tested yet",
        sentence if found else "Not tested yet.",
        "claims",
        claims=found,
        sources=sources([r for r in records.of("claim") if "number" in r.data][-len(found) :] if found else ()),
    )


# Build the report from the records: the first screen's answers, the sections in order, the stored violations.


TITLE = "gradcheck-suite: what resetting gradients does, and what it costs"
SUBTITLE = "zero_ writes zeros to p.grad; None releases it: p.grad = None"


def build(reports: Path) -> Report:
    """Build the report from the records under a folder; a record that cannot be read is left out and named."""
    (answered, sections), records = reading.made_from(reading.read_all(reports), _parts)
    violations, unread = stored_violations(reports)
    mine = bool(own(records))
    project = reports.resolve().parent.name
    return Report(
        title=f"{project}: {answered[0].brief}" if mine else TITLE,
        name=project if mine else "gradcheck-suite",
        subtitle="verdicts of gradcheck-suite" if mine else SUBTITLE,
        made=datetime.now(UTC).isoformat(timespec="minutes"),
        answers=answered,
        sections=sections,
        environments=_made_on(records),
        problems=(*records.problems, *unread),
        violations=(*_live_violations(records), *violations),
    )


def _live_violations(records: Records) -> Iterable[ViolationPage]:
    """Yield the violations of the newest audit of each script, where a project of a user's has them."""
    for number, record in enumerate(records.newest("audit") if own(records) else ()):
        for i, violation in enumerate(result_from_json(record.data).violations):
            script, where = run_of(record.data)[0], machine_text(record.environment)
            name = f"audit-{number}-{i}"
            yield violation_page(violation, loop=script, name=name, machine=where)


def _parts(records: Records) -> tuple[tuple[Answer, ...], tuple[Section, ...]]:
    records = evidence.with_steps(records, costs.timed_steps(records.of("benchmark")))
    answered = answers(records)
    # a user's project has no section on what it never asked
    sections = tuple(s for part in PARTS if (s := part.section(records)) and not (s.missing and own(records)))
    last = verdicts.provenance(records, answered, sections, _made_on(records))
    return answered, (*sections, *([last] if last else []))


def _made_on(records: Records) -> tuple[reading.Pairs, ...]:
    return reading.environments(record for kind in records.by_kind.values() for record in kind)
