"""Plots of one violation: the weights of the items, and the elements of the gradient that differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradcheck_suite.core.case import Plan
from gradcheck_suite.core.counterexamples import FOLDER
from gradcheck_suite.core.results import Violation, Weight, json_number, violation_from_json
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError
from gradcheck_suite.page.charts import (
    Rows,
    Spec,
    colour,
    colours,
    layer,
    layers,
    name,
    number,
    sized,
    tooltip,
)
from gradcheck_suite.page.content import Figure, Table, machine_text, table

WEIGHTS = {"weight": "c4", "expected": "c6"}
"""What is drawn and written of a micro-batch, in the words of the terminal -> its colour."""
SIZES = {
    "within the bound": "good-soft",
    "up to 1e3 bounds": "warn-soft",
    "up to 1e6 bounds": "c5",
    "more": "bad",
}
"""How far an element is off -> its colour."""
CELL = 24


def weights_plot(weights: Sequence[Weight]) -> Spec:
    """Return the expected and the observed weight of each item as bars."""
    rows = []
    for weight in weights:
        for which, value in _numbers_of_weight(weight).items():
            # JSON has no infinity and no NaN, and no plot can show them
            shown = value if math.isfinite(value) else None
            row = {"micro-batch": micro_batch(weight), "which": which, "weight": shown}
            rows.append({**row, "count": weight.count})
    bar = {
        "x": name("micro-batch", "micro-batch", axis={"labelAngle": 0}),
        # the two bars of a micro-batch stand beside each other, in the order of the legend
        "xOffset": {"field": "which", "sort": list(WEIGHTS)},
        "y": number("weight", "weight of each item", axis={"tickCount": 5}),
        "color": colours("which", WEIGHTS),
        "tooltip": tooltip(micro_batch="micro-batch", count="count", what="which", weight="weight"),
    }
    found = layers(
        rows,
        layer("bar", bar),
        # weights may be negative: the line says where 0 is
        layer("rule", {"y": {"datum": 0}}, color=colour("line")),
        height=200,
    )
    return sized(found, width=90 * len(weights) + 60)


def _numbers_of_weight(weight: Weight) -> dict[str, float]:
    return dict(zip(WEIGHTS, (weight.observed, weight.expected), strict=True))


def elements_plot(part: Mapping[str, Any]) -> Spec:
    """Return the heat map of a parameter's elements: how far each is off, in its bounds.

    Args:
        part: of a violation's evidence: `rows`, `columns`, `expected`, `observed`, `allowed`.
    """
    rows = []
    # the part is cut around the worst element, and is numbered as the whole parameter is
    for i, line in enumerate(part["expected"]):
        for j, expected in enumerate(line):
            observed = part["observed"][i][j]
            allowed = part["allowed"][i][j]
            rows.append(
                {
                    "row": part["rows"][0] + i,
                    "column": part["columns"][0] + j,
                    "expected": expected,
                    "observed": observed,
                    "allowed": allowed,
                    "off": deviation_size(expected, observed, allowed),
                }
            )
    quiet = {"ticks": False, "domain": False, "grid": False, "labelAngle": 0, "labelOverlap": True}
    cell = {
        "x": name("column", "column", axis={**quiet, "orient": "top"}),
        "y": name("row", "row", axis=quiet),
        "color": {
            **colours("off", SIZES),
            "legend": {
                "title": "off by",
                "columns": 2,
                "symbolStrokeColor": colour("soft"),
                "symbolStrokeWidth": 1,
            },
        },
        "tooltip": tooltip(
            row="row", column="column", expected="expected", observed="observed", allowed="allowed"
        ),
    }
    count = len(part["expected"])
    columns = part["columns"][1] - part["columns"][0]
    found = layers(
        rows, layer("rect", cell, stroke=colour("card"), strokeWidth=1), height=CELL * max(1, count)
    )
    return sized(found, width=max(320, 2 * CELL * columns + 40))


def deviation_size(expected: float | str, observed: float | str, allowed: float | str) -> str:
    """Return how far an element is off, a key of `SIZES`.

    Numbers that JSON does not have are strings.
    """
    within, small, large, above = SIZES
    # infinities and NaN are texts in JSON, and have no distance
    if isinstance(expected, str) or isinstance(observed, str) or isinstance(allowed, str):
        return within if expected == observed else above
    error = abs(observed - expected)
    if error <= allowed:
        return within
    return small if error <= 1e3 * allowed else large if error <= 1e6 * allowed else above


def micro_batch(weight: Weight) -> str:
    """Return the name of a micro-batch, with the rank that gets it where there are several."""
    return weight.place if weight.rank is None else f"{weight.place}, rank {weight.rank}"


# A violation as a page of its own: its explanation, its split in blocks, its plots, its script.


@dataclass(frozen=True)
class MicroBatchBlock:
    """A micro-batch of the split.

    Attributes:
        index: of the micro-batch.
        items: their number.
        masked: whether all its targets are ignored.
        rank: that gets it; None in a plan of one rank.
    """

    index: int
    items: int
    masked: bool
    rank: int | None = None


@dataclass(frozen=True)
class ViolationPage:
    """What the page of a violation shows.

    Attributes:
        key: its anchor.
        loop: as the user named it.
        title: kind and diagnosis.
        explanation: one or two sentences.
        facts: pairs of a name and a value: parameter, error and so on.
        figures: the weights as bars, the elements as heat maps.
        weights: the same weights as a table, or None.
        source: the user's lines, as `core.counterexamples` writes them; None where they are
            unknown.
        windows: the micro-batches of each window of an epoch; empty for a live run.
        wrong: index of the window in which the gradient is wrong, or None.
        details: further lines, as the console has them.
        case: the case in words, in pairs of lines.
        example: the decorator that makes Hypothesis try the case first.
        replay: the command that runs it again; empty where it is not stored.
        script: its stand-alone script; empty where there is none.
        machine: where it was found.
        stored: where its case is, seen from the folder of the records; empty where it is not there.
    """

    key: str
    loop: str
    title: str
    explanation: str
    facts: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    weights: Table | None
    source: Mapping[str, Any] | None = None
    windows: tuple[tuple[MicroBatchBlock, ...], ...] = ()
    wrong: int | None = None
    details: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    example: str = ""
    replay: str = ""
    script: str = ""
    machine: str = ""
    stored: str = ""


def read_violation(path: Path, shown: Path | None = None) -> ViolationPage:
    """Return the page of a stored counterexample, with the script beside it.

    Args:
        path: of the file.
        shown: the same path as the user knows it.

    Raises:
        UsageError: the file is not a counterexample.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        # the script of a case is stored beside it, under the same name
        script = path.with_suffix(".py")
        read = {name: data[name] for name in ("case", "source") if name in data}
        return violation_page(
            violation_from_json({**data["violation"], **read}),
            loop=str(data["loop"]),
            name=path.stem,
            evidence=data.get("evidence") or (),
            replay=f"gradcheck-suite replay {(shown or path).as_posix()}",
            script=script.read_text(encoding="utf-8") if script.is_file() else "",
            machine=machine_text(data.get("environment") or {}),
        )
    # a foreign JSON file may have anything where a case has something else
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path}: not a stored counterexample ({type(error).__name__}: {error})"
        ) from None


def stored_violations(reports: Path) -> tuple[tuple[ViolationPage, ...], tuple[str, ...]]:
    """Return the pages of all stored counterexamples, and one line for each file that cannot be
    read.
    """
    found = []
    problems = []
    for path in sorted((reports / FOLDER).glob("*.json")):
        try:
            found.append(replace(read_violation(path), stored=f"{FOLDER}/{quote(path.name)}"))
        except UsageError as error:
            problems.append(str(error))
    return tuple(found), tuple(problems)


def violation_page(
    violation: Violation,
    *,
    loop: str,
    name: str,
    evidence: Rows = (),
    replay: str = "",
    script: str = "",
    machine: str = "",
) -> ViolationPage:
    """Return the page of a violation.

    Args:
        violation: with its `source`, where that is known.
        loop: the loop or the script, as the user named it.
        name: unique on its page.
        evidence: the elements of its gradient, as `core.counterexamples` stores them.
        replay: the command that runs it again.
        script: the text of its script.
        machine: where it was found.
    """
    # the words that `verify` printed: describing a case anew would need the layers' definitions,
    # torch and JAX
    _, *case, example = violation.described or ("", "")
    after = violation.found_after
    found = (
        None if violation.command == "audit" or after is None else f"after {counted(after, 'case')}"
    )
    return ViolationPage(
        key=f"violation-{name}",
        loop=loop,
        title=violation.title,
        explanation=violation.explanation,
        facts=(
            *violation.facts,
            *([("found", found if after else "before any drawn case")] if found else ()),
        ),
        windows=_windows(violation.case.plan) if violation.command == "verify" else (),
        wrong=violation.window,
        figures=_figures(name, violation.weights, evidence),
        weights=_weights_table(violation.weights),
        details=violation.details,
        case=tuple(line.removeprefix("  ") for line in case),
        example=example,
        replay=replay,
        script=script,
        machine=machine,
        source=violation.source,
    )


def _weights_table(weights: Sequence[Weight]) -> Table | None:
    rows = [
        {
            "micro-batch": micro_batch(w),
            "count": json_number(w.count),
            **{name: json_number(value) for name, value in _numbers_of_weight(w).items()},
        }
        for w in weights
    ]
    return table("Weight of each item, by micro-batch", rows) if rows else None


def _windows(plan: Plan) -> tuple[tuple[MicroBatchBlock, ...], ...]:
    blocks = [
        MicroBatchBlock(
            j,
            items,
            j in plan.masked,
            plan.owners[j] if plan.ranks else None,
        )
        for j, items in enumerate(plan.micro_batches)
    ]
    return tuple(tuple(blocks[j] for j in window) for window in plan.windows)


def _figures(name: str, weights: Sequence[Weight], evidence: Rows) -> tuple[Figure, ...]:
    found = []
    if weights:
        sentence = "; ".join(
            f"micro-batch {micro_batch(w)}: weight {w.observed:.4g}, expected {w.expected:.4g}"
            for w in weights
        )
        caption = (
            "Weight of each item in the gradient of the step, and the expected one, by micro-batch."
        )
        found.append(
            Figure(
                f"{name}-weights",
                weights_plot(weights),
                f"{caption} {sentence}",
                caption,
            )
        )
    for i, part in enumerate(evidence):
        total = prod(part["shape"])
        shown = prod(part[which][1] - part[which][0] for which in ("rows", "columns"))
        cut = "" if shown == total else ", around the worst"
        caption = (
            f"{part['parameter']}: {part['wrong']} of {total} elements differ by more than rounding"
            f" allows{cut}."
        )
        if part.get("missing"):
            caption = (
                f"{part['parameter']}: its gradient is None at the step; {total} elements are"
                " expected."
            )
        found.append(
            Figure(
                f"{name}-elements-{i}",
                elements_plot(part),
                caption,
                caption,
            )
        )
    return tuple(found)
