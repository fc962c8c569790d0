"""What the report of the studies is made of: the four answers of its first screen, and its
sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradcheck_suite.core.records import Data, Record
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.page import verdicts
from gradcheck_suite.page.content import Figure, HeadlineAnswer, sources
from gradcheck_suite.page.reading import Part, Records, device_name
from gradcheck_suite.page.report import ReportContents
from studies.records import KINDS
from studies.report import charts, costs, evidence, subjects
from studies.report.faster import step_times
from studies.report.measurements import by_device, current

PARTS: tuple[Part, ...] = (
    subjects.ON_GPUS, verdicts.VERIFICATION, verdicts.AUDITS, subjects.PUBLIC_SCRIPTS, costs.DECISION, costs.MEMORY,
    costs.COSTS, costs.COMPILED, costs.TRAFFIC,
    evidence.CLAIMED, evidence.ZOO, evidence.ZOO_COUNTS, evidence.CALIBRATION,
    subjects.BRIDGE, verdicts.REAL_TRAINERS, subjects.FINDINGS,
    evidence.ATLAS, evidence.ZERO_OR_NONE, evidence.OPTIMIZER_STEPS,
)  # fmt: skip
"""The sections of the report, in order; where all figures come from is the last one."""

# The four answers of the first screen, each one sentence with its figure, and their pictures.


EQUIVALENCE = "C2.5"
"""The claim that zeroing by hand is equivalent to the optimizer's `zero_grad`."""
HEIGHT = 112
"""Pixels of the plots on the first screen."""


def answers(records: Records) -> tuple[HeadlineAnswer, ...]:
    """Return the answers of the first screen."""
    return _holds(records), _differs(records), _costs(records), _true(records)


def _holds(records: Records) -> HeadlineAnswer:
    newest = records.newest("verify")
    shown = [record for record in newest if record.data.get("loop") in {**MODES, **JAX_MODES}]
    brief, sentence = _holds_sentence([record.data for record in shown])
    shown = shown or newest
    return HeadlineAnswer(
        "holds",
        "Does every mode hold?",
        brief,
        sentence,
        "verification",
        matrix=verdicts.verdict_matrix(shown, len(MODES) + len(JAX_MODES)) if newest else None,
        sources=sources(shown),
    )


def _holds_sentence(datas: Sequence[Data]) -> tuple[str, str]:
    """Return the answer in a few words, and as a sentence with its figures: on the modes of torch
    and of JAX.
    """
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
    disagreement = verdicts.disagreement_clause(datas)
    return (
        f"Yes, {', and '.join(where)}: the gradient is that of one large batch",
        (
            f"Yes, {', and '.join(hold)}: {', and '.join(cases)}, the gradient is that of one large"
            f" batch. The worst error is {verdicts.share_text(worst)} of what rounding"
            f" allows.{f' {disagreement}.' if disagreement else ''}"
        ),
    )


def _hold(count: int, known: int, of: str, *, first: bool) -> str:
    """Return how many modes hold of those that are known, such as "all 8 modes hold", or after that
    "all 5 of JAX".
    """
    share = f"all {known}" if count == known else f"{count} of {known}"
    if not first:
        return f"{share}{of}"
    verb = (
        "hold"
        if count == known
        else "was verified and holds"
        if count == 1
        else "were verified and hold"
    )
    return f"{share} modes{of} {verb}"


def _where_all(datas: Sequence[Data]) -> str:
    """Return the dtypes in which every mode was verified, by device; empty if there are none."""
    modes: dict[tuple[str, str], set[str]] = {}
    for data in datas:
        modes.setdefault(verdicts.dtype_and_device(data), set()).add(str(data["loop"]))
    most = max(len(mine) for mine in modes.values())
    devices: dict[str, list[str]] = {}
    for dtype, device in sorted(
        (p for p in modes if len(modes[p]) == most), key=verdicts.place_order
    ):
        devices.setdefault(device, []).append(dtype)
    return " and".join(
        f" in {', '.join(dtypes)} on the {device_name(device)}"
        for device, dtypes in devices.items()
    )


def _differs(records: Records) -> HeadlineAnswer:
    unused, kept = charts.unused_parameter(), charts.kept_gradient()
    moved = unused["None"][-1] - unused["zero_"][-1]
    also = evidence.moved_by_zeros(records)
    more = f" and {len(also) - 1} more" if len(also) > 1 else ""
    return HeadlineAnswer(
        "differs",
        "Where do they differ?",
        f"zero_ moves an unused parameter (momentum{', Adam' * ('Adam' in also)}) and clears a"
        " gradient that was kept; None does neither",
        f"Unused parameter: zero_ moves it on by momentum ({moved:.2f} in {charts.STEPS}"
        f" steps){f', also under {also[0]}{more}' if also else ''}; None does not. Kept gradient:"
        f" zero_ sets it to {kept['zero_'][1]:g}; None keeps it.",
        "atlas" if records.of("zero-or-none") else "claims",
        figures=(
            Figure(
                "unused-parameter",
                charts.unused_parameter_plot(HEIGHT),
                "A parameter that only the first step uses, under SGD with momentum 0.9: under"
                f" zero_ it moves on from {unused['zero_'][0]:g} to {unused['zero_'][-1]:.2f},"
                f" under None it stays at {unused['None'][-1]:g}",
                "A parameter used in step 1 alone, SGD, momentum 0.9",
            ),
            Figure(
                "kept-gradient",
                charts.kept_gradient_plot(HEIGHT),
                "A kept reference to a gradient after the backward, the reset and the next"
                f" backward: under zero_ {', '.join(f'{v:g}' for v in kept['zero_'])}; under None"
                f" {', '.join(f'{v:g}' for v in kept['None'])}",
                "A gradient given away: kept = p.grad[0]",
            ),
        ),
        sources=sources(
            [r for r in records.of("claim") if r.data.get("number") == EQUIVALENCE][-1:]
        ),
    )


def _costs(records: Records) -> HeadlineAnswer:
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
        where = (
            f"emory between steps, {parameters / 1e6:.0f} M parameters: zero_ keeps {zeroed} MiB"
        )
        said.append(f"M{where} of gradients, None {released} MiB.")
        brief.append(f"{'m' if brief else 'M'}{where}, None {released}")
    return HeadlineAnswer(
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
            counts = {
                name: len(found.where(which))
                for name, which in (("None", "none"), ("zero_", "zero"))
            }
            some = [f"{name} in {count}" for name, count in counts.items() if count]
            faster = f"; faster: {', '.join(some)}" * bool(some)
            settings = (
                f"{_of(len(found.where('neither')), len(found.rows))} {device_name(device)}"
                " settings"
            )
            yield f"Time: no difference shown in {settings} ({_medians(found.rows)}){faster}."


def _of(count: int, total: int) -> str:
    return f"any of {total}" if count == total else f"{count} of {total}"


def _medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of pairs behind each setting, and between which values the medians lie."""
    pairs = sorted({int(row["pairs"]) for row in rows})
    saved = sorted(float(row["saved"]) / float(row["zero"]) for row in rows)
    lowest, highest = (
        f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}" for share in (saved[0], saved[-1])
    )
    counted = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    return f"{counted} pairs of steps each; medians: None {lowest} to {highest}"


def _kept_gradients(records: Sequence[Record]) -> tuple[int, str, str] | None:
    """Return the largest measured number of parameters, and the MiB of gradients that zero_ and
    None keep there.
    """
    kept: dict[int, dict[str, str]] = {}
    for data in (record.data for record in records):
        size = f"{float(data['gradients_between']) / 2**20:.0f}"
        kept.setdefault(int(data["parameters"]), {})[str(data["mode"])] = size
    both = {
        parameters: modes
        for parameters, modes in kept.items()
        if {"zero_", "set_to_none"} <= modes.keys()
    }
    return (max(both), both[max(both)]["zero_"], both[max(both)]["set_to_none"]) if both else None


def _true(records: Records) -> HeadlineAnswer:
    found = evidence.claim_list(records.of("claim"))
    counts, questions = evidence.counted_verdicts(found)
    brief = (
        f"{counts['confirmed']} yes, {counts['conditional']} under a condition,"
        f" {counts['refuted']} no"
    )
    sentence = (
        f"Of {counts.total()} widely read claims {counts['confirmed']} are true (confirmed),"
        f" {counts['conditional']} true under a condition, {counts['refuted']} false (refuted)."
        + "".join(
            f" One question: {question.text} {question.verdict.capitalize()}."
            for question in questions
        )
    )
    return HeadlineAnswer(
        "claims",
        "Which claims are true?",
        brief if found else "Not tested yet",
        sentence if found else "Not tested yet.",
        "claims",
        claims=found,
        sources=sources(
            [r for r in records.of("claim") if "number" in r.data][-len(found) :] if found else ()
        ),
    )


def _prepared(records: Records) -> Records:
    return evidence.with_steps(records, costs.timed_steps(records.of("benchmark")))


TITLE = "gradcheck-suite: what resetting gradients does, and what it costs"
SUBTITLE = "zero_ writes zeros to p.grad; None releases it: p.grad = None"
CONTENTS = ReportContents(
    KINDS,
    PARTS,
    answers,
    lambda *_: (TITLE, "gradcheck-suite", SUBTITLE),
    prepared=_prepared,
    beside=subjects.written_down,
)
"""What the report of the studies is made of."""
