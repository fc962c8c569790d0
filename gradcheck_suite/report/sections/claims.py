"""The claims about gradient zeroing with their verdicts, and the loops that their sources print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.evidence.claims import CLAIMS
from gradcheck_suite.records.step_times import answer
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import bars_plot
from gradcheck_suite.report.content import Cell, Claim, Figure, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest

KEY, TITLE, TAB = "claims", "The claims", "claims"
OLDER = "Older than the code: the code that a figure speaks of has changed since the figure was recorded."
STEPS = "C1.8"
"""The claim about when zeroing may do, which steps under both modes in turn decide."""
LOOP_COLUMNS = ("loop", "what it does", "relies on", "with that", "on all splits", "why", "smallest case")
PAIR = re.compile(r"^([\d.,]+) / ([\d.,]+)$")
MODES = ("zero_", "None")


def claim_list(records: Sequence[Record], steps: Sequence[Mapping[str, Any]] = ()) -> tuple[Claim, ...]:
    """Return the claims with their last verdicts, by origin and number.

    Args:
        records: the claims' records.
        steps: the timed steps that the section on steps shows; the claim about them is answered from the same ones.
    """
    claimed = latest([r for r in records if "number" in r.data], lambda d: d["number"])
    found = []
    for record in sorted(claimed, key=lambda r: _order(str(r.data["number"]))):
        data = {**record.data, **answer(steps)} if record.data["number"] == STEPS and steps else record.data
        numbers, figures, series = _figures(str(data["number"]), data.get("figures") or {})
        found.append(
            Claim(
                number=str(data["number"]),
                origin=str(data.get("source", "")),
                text=str(data["text"]),
                short=_short(str(data["number"]), str(data["text"])),
                verdict=str(data["verdict"]),
                sentence=str(data["sentence"]),
                condition=str(data.get("condition") or ""),
                how=str(data["how"]),
                counterexample=str(data["counterexample"]),
                numbers=numbers,
                figures=figures,
                series=series,
                sources=sources([record]),
            )
        )
    return tuple(found)


def claims(records: Sequence[Record], steps: Sequence[Mapping[str, Any]] = ()) -> Section:
    """Return the section on the claims, and on the loops that the sources print."""
    found = claim_list(records, steps)
    loops = latest([r for r in records if "loop" in r.data], lambda d: d["loop"])
    if not found and not loops:
        return Section(KEY, TITLE, TAB, missing="The claims have not been tested yet: run `gradcheck-suite claims`.")
    rows = tuple(_loop_row(record.data) for record in loops)
    tables = (Table("The loops that the sources print", LOOP_COLUMNS, rows),) if rows else ()
    text = (
        "Three widely read explanations of gradient zeroing, put to the test. A verdict is `confirmed`, `refuted`, or "
        "`conditional`: true under the condition.",
        *_loops_text([record.data for record in loops]),
        *((OLDER,) if any(source.older for claim in found for source in claim.sources) else ()),
    )
    used = [record for record in records if "number" in record.data or "loop" in record.data]
    return Section(KEY, TITLE, TAB, text, claims=found, tables=tables, sources=sources(used[-len(found) - len(rows) :]))


def _figures(
    number: str, figures: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[Figure, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the figures of a claim that stay text, the plots of those that are numbers, and the rows of numbers."""
    pairs: dict[str, tuple[float, float]] = {}
    alone: dict[str, float] = {}
    series: dict[str, tuple[str, ...]] = {}
    texts: list[tuple[str, str]] = []
    for key, value in figures.items():
        name = str(key)
        if "zero_ / None" in name and isinstance(value, str) and (found := PAIR.match(value)):
            pairs[_stem(name)] = (_float(found[1]), _float(found[2]))
        elif _is_number(value):
            alone[name] = float(value)
        elif isinstance(value, list) and len(value) > 1 and all(_is_number(v) for v in value):
            series[name] = tuple(_value(v) for v in value)
        else:
            texts.append((name, _value(value)))
    if len(alone) == 1:
        texts += [(name, _value(value)) for name, value in alone.items()]
        alone = {}
    said = "; ".join(f"{name}: {_value(value)}" for name, value in figures.items())
    plots = []
    if pairs:
        rows = [
            {"group": name, "name": mode, "value": value, "text": _value(value)}
            for name, both in pairs.items()
            for mode, value in zip(MODES, both, strict=True)
        ]
        plots.append(Figure(f"claim-{number}-pairs", bars_plot(rows), said))
    if alone:
        rows = [
            {"group": name, "name": "", "value": abs(value), "text": _value(value)} for name, value in alone.items()
        ]
        plots.append(Figure(f"claim-{number}-values", bars_plot(rows), said))
    return tuple(texts), tuple(plots), tuple(series.items())


def _short(number: str, text: str) -> str:
    """Return the short form of a claim; its text where the record has another one than the suite."""
    known = CLAIMS.get(number)
    return known.short if known and known.text == text else text


def _stem(name: str) -> str:
    return re.sub(r"[,:]? *zero_ / None", "", name)


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _loop_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        str(data["loop"]),
        str(data["says"]),
        data.get("needs"),
        str(data["within"]),
        re.sub(r"\b1 cases\b", "1 case", str(data["bare"])),  # as earlier versions recorded it
        str(data["why"]) if data.get("why") else None,
        "\n".join(map(str, data.get("smallest", ()))),
    )


def _loops_text(loops: Sequence[Mapping[str, Any]]) -> list[str]:
    if not loops:
        return []
    within, bare = (sum(str(data[name]).startswith("holds") for data in loops) for name in ("within", "bare"))
    needs = Counter(str(data["needs"]) for data in loops if data.get("needs"))
    relied = "; ".join(f"{need} ({count} of them)" for need, count in needs.most_common())
    return [
        f"Of {len(loops)} loops that the sources print, {within} are right under what they rely on"
        f"{f': {relied}' if relied else ''}. On all splits, with accumulation and unequal micro-batches, {bare} are."
    ]


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value)
