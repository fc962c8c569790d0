"""Sections on the suite itself: atlas, calibration, claims, optimizers, zero or None, the zoo."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.core.records import Record
from gradcheck_suite.core.text import counted
from gradcheck_suite.page.content import Cell, Claim, Figure, Section, Table, answer, sources
from gradcheck_suite.studies import tally as summary
from gradcheck_suite.studies.claims import CLAIMS
from gradcheck_suite.studies.report.charts import bars_plot, counts_plot, detection_plot, scoreboard_plot
from gradcheck_suite.studies.report.verdicts import latest
from gradcheck_suite.studies.rivals import RIVALS
from gradcheck_suite.studies.tally import OURS as TALLY_OURS
from gradcheck_suite.studies.tally import Curve, curve_from_json, exponents, share_found, spread_from_json
from gradcheck_suite.studies.zoo import NOT_EXPRESSED

# Where torch and JAX choose different derivatives: kinks, ties and limits.


ATLAS_COLUMNS = ("operation", "point", "dtype", "torch", "jax", "agree", "convention")


def atlas(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest atlas; None where there is none."""
    whole = [record for record in records if isinstance(record.data.get("rows"), list)]
    if not whole:
        return None
    rows = [row for row in whole[-1].data["rows"] if isinstance(row, dict)]
    agree = sum(bool(row.get("agree")) for row in rows)
    points = len({(row.get("operation"), row.get("point")) for row in rows})
    dtypes = {row.get("dtype") for row in rows}
    counts = {"torch and JAX agree": agree, "they choose differently": len(rows) - agree}
    return Section(
        "atlas",
        "Where torch and JAX choose different derivatives",
        "atlas",
        (
            f"{points:,} points at kinks, ties and limits, in {counted(len(dtypes), 'dtype')}: of these {len(rows):,} "
            f"derivatives, torch and JAX agree in {agree:,}.",
        ),
        figures=(
            Figure(
                "atlas-agreement",
                counts_plot(counts, "points"),
                "; ".join(f"{name}: {count:,}" for name, count in counts.items()),
                f"Derivatives at kinks, ties and limits: {points:,} points in {counted(len(dtypes), 'dtype')}.",
            ),
        ),
        tables=(
            Table(
                "Points and the derivatives that torch and JAX choose",
                ATLAS_COLUMNS,
                tuple(tuple(_cell(row.get(name)) for name in ATLAS_COLUMNS) for row in rows),
            ),
        ),
        sources=sources(whole[-1:]),
    )


def _cell(value: object) -> str | int | float | None:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_numbers(numbers)}" for name, numbers in value.items())
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _numbers(value: object) -> str:
    """Return nested lists of numbers without brackets, each inner list after a bar."""
    if isinstance(value, list):
        inner = any(isinstance(part, list) for part in value)
        return (" | " if inner else ", ").join(map(_numbers, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


# The error rates of the suite: how often it blames a sound loop, and how small an error it finds.


PLOTTED = "everywhere"
CALIBRATION_KEY, CALIBRATION_TITLE, CALIBRATION_TAB = "calibration", "How far the verdicts can be trusted", "trust"


def calibration(records: Sequence[Record]) -> Section:
    """Return the section on false alarms and on the detection of planted errors."""
    if not records:
        return Section(
            CALIBRATION_KEY,
            CALIBRATION_TITLE,
            CALIBRATION_TAB,
            missing="The bounds have not been calibrated yet: run `gradcheck-suite calibrate`.",
        )
    data = records[-1].data
    alarms, coverage = summary.false_alarms(data), data["coverage"]
    reached = ", ".join(
        f"{part['reached']} of {part['reached'] + len(part['missing'])} kinds of {what}"
        for what, part in coverage.items()
    )
    worse = summary.better(data)
    return Section(
        CALIBRATION_KEY,
        CALIBRATION_TITLE,
        CALIBRATION_TAB,
        (
            f"False alarms: {alarms} in {summary.checks(data):,} checks. A check judges a training loop that is known "
            f"to be right on a random case; {data['loops']} such loops were judged. The cases reached {reached} that "
            "the suite could draw at that time.",
            "Missed errors: right gradients were multiplied by 1 + s or 1 - s, and the suite was asked whether they "
            "are still right. The plots show in how many cases it says no, against s. A curve further left finds "
            "smaller errors. The other curves are tolerance rules of other tools. A rule is only worth comparing where "
            f"it blames no right loop. The second table has the smallest s that is found in {summary.percent()} of the "
            "cases. " + ("; ".join(worse) if worse else _nothing_better(data)),
        ),
        figures=_calibration_figures(data),
        tables=(_alarms(data), _detection(data), _skipped(data), _ratios(data)),
        sources=sources(records[-1:]),
    )


def _nothing_better(data: Mapping[str, Any]) -> str:
    """Return in which dtypes a rule can be compared and finds no smaller error, and what is found in the others."""
    alone = {row.dtype: row.sizes[TALLY_OURS] for row in summary.found(data) if row.place == PLOTTED}
    compared = [dtype for dtype in alone if not all(summary.rival_alarms(data, dtype).values())]
    said = []
    if compared:
        said.append(f"In {' and '.join(compared)} no rule that blames no right loop finds smaller errors.")
    for dtype, size in alone.items():
        if dtype not in compared:
            found = "finds no error up to a factor of 2" if size is None else f"needs an error of {summary.shown(size)}"
            said.append(f"In {dtype} every other rule blames right loops; the suite {found}, planted {PLOTTED}.")
    return " ".join(said)


def _alarms(data: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for dtype, tally in data["alarms"].items():
        drawn = spread_from_json(tally["drawn_on"])
        rows.append(
            (
                dtype,
                tally["judged"],
                tally["elements"],
                len(tally["alarms"]),
                sum(drawn.counts),
                drawn.largest,
                tally["judged"] - tally["autocast"],
                *summary.rival_alarms(data, dtype).values(),
            )
        )
    return Table(
        "False alarms: right loops that were judged, and how many were blamed",
        (
            "dtype",
            "checks",
            "elements compared",
            "false alarms",
            "gradients that needed sampled rounding errors",
            "largest error over bound then",
            "checks without autocast",
            *(f"blamed by {rule}" for rule in RIVALS),
        ),
        tuple(rows),
        "A check is one loop judged on one case. Most errors are within the part of the bound that is computed; only "
        "the others need rounding errors that are sampled (Monte Carlo). Other rules compare with the large batch in "
        "the same dtype; losses under an autocast are left out for them.",
    )


def _detection(data: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in summary.found(data):
        alarms = summary.rival_alarms(data, row.dtype)
        rivals = [summary.shown(row.sizes[rule]) + (" *" if alarms[rule] else "") for rule in RIVALS]
        sure = None if row.at_least is None else f"{100 * row.at_least:.1f}%"
        rows.append(
            (
                row.dtype,
                row.place,
                row.cases,
                summary.shown(row.sizes[TALLY_OURS]),
                sure,
                summary.shown(row.half),
                *rivals,
            )
        )
    return Table(
        f"Smallest relative error found in {summary.percent()} of the cases",
        (
            "dtype",
            "planted in",
            "cases",
            TALLY_OURS,
            "of all cases at least",
            f"{TALLY_OURS}, in half of them",
            *RIVALS,
        ),
        tuple(rows),
        "* also blames right loops in this dtype. Of all cases at least: the lower end of a 95% interval (Wilson) for "
        "the share in which the suite finds an error of that size. An element that is 0 stays 0 under a factor, so "
        "errors are planted in the largest element and in one drawn from those that are not 0, some of which are "
        "rounding errors only.",
    )


def _skipped(data: Mapping[str, Any]) -> Table:
    rows = [(dtype, why, n) for dtype, tally in data["alarms"].items() for why, n in tally["skipped"].items()]
    return Table(
        "Checks that could not be made, because the gradient of the large batch cannot be computed",
        ("dtype", "why", "checks"),
        tuple(rows),
    )


def _ratios(data: Mapping[str, Any]) -> Table:
    dtypes = list(data["alarms"])
    kinds = sorted({kind for tally in data["alarms"].values() for kind in tally["over"] if kind})
    rows = [(kind, _checks(data, kind), *(_spread(data, dtype, kind) for dtype in dtypes)) for kind in kinds]
    return Table(
        "Largest error over bound, by kind of layer: median, 99% and largest of the checks whose case has it",
        ("layer", "checks", *dtypes),
        tuple(rows),
        "The bound is its deterministic part where the error is within that, otherwise the whole bound.",
    )


def _checks(data: Mapping[str, Any], kind: str) -> int:
    return sum(int(tally["layers"].get(kind, 0)) for tally in data["alarms"].values())


def _spread(data: Mapping[str, Any], dtype: str, kind: str) -> str | None:
    if (counted := data["alarms"][dtype]["over"].get(kind)) is None:
        return None
    spread = spread_from_json(counted)
    values = (spread.quantile(0.5), spread.quantile(0.99), spread.largest)
    return " / ".join(f"{value:.2f}" for value in values if value is not None)


def _calibration_figures(data: Mapping[str, Any]) -> tuple[Figure, ...]:
    return tuple(
        _figure(dtype, curve, summary.rival_alarms(data, dtype))
        for dtype, found in data["curves"].items()
        if PLOTTED in (curve := curve_from_json(found)).smallest
    )


def _figure(dtype: str, curve: Curve, alarms: Mapping[str, int | None]) -> Figure:
    rules = curve.smallest[PLOTTED]
    names = {rule: f"{rule} *" if alarms.get(rule) else rule for rule in (TALLY_OURS, *RIVALS)}
    rows = [
        {"rule": name, "size": 2.0**-k, "share": 100 * share_found(rules[rule], k)}
        for rule, name in names.items()
        for k in exponents(dtype)
    ]
    return Figure(
        f"detection-{dtype}",
        detection_plot(rows, tuple(names.values())),
        f"Share of cases in which an error of a size is found against the size, one line per rule, {dtype}",
        f"{dtype}: how often a gradient that is wrong by the factor 1 + s or 1 - s is found, in "
        f"{sum(rules[TALLY_OURS].values())} cases. "
        "* also blames right loops.",
    )


# The claims about gradient zeroing with their verdicts, and the loops that their sources print.


CLAIMS_KEY, CLAIMS_TITLE, CLAIMS_TAB = "claims", "The claims", "claims"
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
        numbers, figures, series = _claims_figures(str(data["number"]), data.get("figures") or {})
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
        return Section(
            CLAIMS_KEY,
            CLAIMS_TITLE,
            CLAIMS_TAB,
            missing="The claims have not been tested yet: run `gradcheck-suite claims`.",
        )
    rows = tuple(_loop_row(record.data) for record in loops)
    tables = (Table("The loops that the sources print", LOOP_COLUMNS, rows),) if rows else ()
    text = (
        "Three widely read explanations of gradient zeroing, put to the test. A verdict is `confirmed`, `refuted`, or "
        "`conditional`: true under the condition.",
        *_loops_text([record.data for record in loops]),
        *((OLDER,) if any(source.older for claim in found for source in claim.sources) else ()),
    )
    used = [record for record in records if "number" in record.data or "loop" in record.data]
    return Section(
        CLAIMS_KEY,
        CLAIMS_TITLE,
        CLAIMS_TAB,
        text,
        claims=found,
        tables=tables,
        sources=sources(used[-len(found) - len(rows) :]),
    )


def _claims_figures(
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


# The steps of torch's optimizers in optax: where the formulas differ, and how far the parameters are apart.


STEPS_COLUMNS = ("torch.optim", "in optax", "what differs, mapped exactly", "cases", "float64", "float32", "source")


def steps(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest comparison of each optimizer; None where there is none."""
    newest: dict[str, tuple[Record, Mapping[str, Any]]] = {}
    for record in records:
        rows = record.data.get("rows")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and isinstance(row.get("torch"), str):
                newest[row["torch"]] = record, row
    if not newest:
        return None
    found = [row for _, row in newest.values()]
    agree = sum(bool(row.get("agree")) for row in found)
    used = [record for record in records if any(record is other for other, _ in newest.values())]
    return Section(
        "steps",
        "The step of each optimizer, by torch and by optax",
        "trust",
        (
            f"Of {len(found)} optimizers of torch.optim, {agree} take the same steps as their counterpart in optax, "
            "within a bound on rounding errors that is derived through the step. Where the formulas differ by "
            "definition, the difference is computed, and no tolerance covers it. The dtypes' columns have the largest "
            "error over this bound: above 1, torch and optax differ.",
        ),
        tables=(Table("Optimizers and their counterparts", STEPS_COLUMNS, tuple(map(_cells, found))),),
        sources=sources(used),
    )


def _cells(row: Mapping[str, Any]) -> tuple[str | int | float | None, ...]:
    outside = [f"not compared: {row['outside']}"] if row.get("outside") else []
    ratios = row.get("error_over_allowed") or {}
    texts = (row["torch"], row.get("optax"), "; ".join([*row.get("differs", ()), *outside]))
    return (*texts, row.get("cases"), ratios.get("float64"), ratios.get("float32"), row.get("source"))


# What a gradient of zeros does to a parameter and its optimizer state that None does not, for every optimizer.


COMMAND = "pytest properties/benchmarks/bench_zero_or_none.py --bench-records reports"
VARIANTS = ("plain", "momentum", "weight decay")
"""The settings that have a column of their own."""
Rows = Mapping[str, Mapping[str, Any]]


def zero_or_none(records: Sequence[Record]) -> Section | None:
    """Return the section of the newest row of each optimizer and settings; None where there is none."""
    newest = latest(records, lambda d: (d.get("optimizer"), d.get("variant")))
    if not newest:
        return None
    optimizers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in newest:
        optimizers.setdefault(str(record.data["optimizer"]), {})[str(record.data["variant"])] = record.data
    every = [row for rows in optimizers.values() for row in rows.values()]
    predicted = sum(bool(row["as_predicted"]) for row in every)
    return Section(
        "zero-or-none",
        "What zeros do that None does not",
        "atlas",
        (
            "No item of the window uses this parameter. After a release its gradient is None and the optimizer skips "
            "it. After zeroing its gradient is zero, and the optimizer steps on it.",
            " ".join(_moved(optimizers)),
            f"torch did what the published step predicts in {predicted} of {len(every)} settings.",
        ),
        tables=(
            Table(
                "One step on a parameter that no item of the window uses",
                ("optimizer", *(f"zeros change, {name}" for name in VARIANTS), "None changes", "same", "law of zeros"),
                tuple(_summary(name, rows) for name, rows in optimizers.items()),
                "Two windows reach the parameter before, so that averages and momentum are not zero.",
            ),
            Table(
                "The same for all settings, with an element of the parameter",
                ("optimizer", "settings", "before", "after zeros", "after None", "zeros change", "to the bit",
                 "as predicted"),
                tuple(_line(row) for row in every),
                "To the bit: every operation of the prediction is exact in float64, so that no error is allowed.",
            ),
        ),
        sources=sources(newest),
    )  # fmt: skip


def moved_by_zeros(records: Sequence[Record]) -> list[str]:
    """Return the optimizers that by default step on a gradient of zeros and skip None, `Adam` first."""
    newest = latest(records, lambda d: (d.get("optimizer"), d.get("variant")))
    plain = [record.data for record in newest if record.data.get("variant") == VARIANTS[0]]
    return sorted(
        (str(row["optimizer"]) for row in plain if _moves_alone(row)), key=lambda name: (name != "Adam", name)
    )


def _moved(optimizers: Mapping[str, Rows]) -> list[str]:
    """Return a sentence for each of `VARIANTS`: which optimizers move the parameter under zeros alone."""
    sentences, known = [], set[str]()
    for variant, start in zip(
        VARIANTS, ("Zeros alone move it", "With momentum also", "With weight decay also"), strict=True
    ):
        named = [name for name, rows in optimizers.items() if name not in known and _moves_alone(rows.get(variant))]
        known |= set(named)
        sentences += [f"{start} under {', '.join(named)}."] if named else []
    return sentences


def _moves_alone(row: Mapping[str, Any] | None) -> bool:
    return row is not None and "parameter" in row["zero_changes"] and "parameter" not in row["none_changes"]


def _listed(row: Mapping[str, Any] | None, which: str) -> str | None:
    return None if row is None else ", ".join(row[which]) or "nothing"


def _summary(name: str, rows: Rows) -> tuple[Cell, ...]:
    same = {bool(row["same"]) for row in rows.values()}
    words = {frozenset({True}): "always", frozenset({False}): "never"}.get(frozenset(same), "in some settings")
    none = next((found for row in rows.values() if (found := _listed(row, "none_changes")) != "nothing"), "nothing")
    changes = (_listed(rows.get(variant), "zero_changes") for variant in VARIANTS)
    return (name, *changes, none, words, str(next(iter(rows.values()))["law"]))


def _line(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    values = (float(row[name]) for name in ("before", "after_zero", "after_none"))
    settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items()) or "torch's defaults"
    exact, predicted = ("yes" if row[name] else "no" for name in ("to_the_bit", "as_predicted"))
    return (str(row["optimizer"]), settings, *values, _listed(row, "zero_changes"), exact, predicted)


# The scoreboard of known bugs.


ZOO_KEY, ZOO_TITLE, ZOO_TAB = "zoo", "The zoo of known bugs", "zoo"
OURS = "gradcheck-suite"
ZOO_COLUMNS = (
    "number",
    "bug",
    "reported as",
    "mechanism",
    "found",
    "median cases",
    "median seconds",
    "smallest: windows, micro-batches, layers",
    "diagnosis",
    "missed by",
)


def zoo(records: Sequence[Record]) -> Section:
    """Return the scoreboard of known bugs: the latest run in float64 and the latest in each other dtype."""
    coarser = latest([record for record in records if record.data.get("dtype")], lambda data: data["dtype"])
    records = [record for record in records if not record.data.get("dtype")]
    if not records:
        return Section(ZOO_KEY, ZOO_TITLE, ZOO_TAB, missing="The zoo has not been run yet: run `gradcheck-suite zoo`.")
    data = records[-1].data
    bugs, sound = data["bugs"], data["sound"]
    found = sum(b["found"] == b["runs"] for b in bugs)
    others: dict[str, int] = Counter()
    for bug in bugs:
        others.update({name: int(hit) for name, hit in bug["others"].items()})
    rows = tuple(
        (
            b["number"],
            b["name"],
            ", ".join(b["citations"]),
            b["mechanism"],
            f"{b['found']}/{b['runs']}",
            b["median_cases"],
            b["median_seconds"],
            f"{b['windows']}, {b['micro_batches']}, {b['layers']}",
            ", ".join(f"{name} ({count})" for name, count in b["names"].items()),
            ", ".join(name for name, hit in b["others"].items() if not hit) or None,
        )
        for b in bugs
    )
    return Section(
        ZOO_KEY,
        ZOO_TITLE,
        ZOO_TAB,
        (
            f"{found} of {len(bugs)} real bugs, re-created in a few lines each, are found in every one of "
            f"{data['seeds']} runs, {sum(b['rightly_named'] for b in bugs)} of {sum(b['runs'] for b in bugs)} runs "
            f"with a right diagnosis. The sound loops beside them were blamed in "
            f"{sum(bool(s['blamed']) for s in sound)} of {sum(s['cases'] for s in sound):,} cases.",
        ),
        figures=_zoo_figures(bugs, {OURS: found, **others}),
        tables=(
            Table("Known bugs", ZOO_COLUMNS, rows),
            Table(
                "Bugs found by other rules and by fixed tests",
                ("rule or fixed test", f"bugs found, of {len(bugs)}"),
                ((OURS, found), *sorted(others.items(), key=lambda item: -item[1])),
                "Rules compare the gradients of the case that first showed the bug, so they profit from the suite's "
                "search; each fixed test is one hand-written case, as trainers have them in their tests.",
            ),
            *([_coarser(coarser)] if coarser else []),
            Table("Reported bugs that are not in the zoo", ("number", "why"), tuple(NOT_EXPRESSED.items())),
        ),
        sources=sources((records[-1], *coarser)),
    )


def _coarser(records: Sequence[Record]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for data in (record.data for record in records):
        bugs, sound = data["bugs"], data["sound"]
        total = {name: sum(b[name] for b in bugs) for name in ("runs", "found", "within_rounding", "rightly_named")}
        unnamed = sum(b["unnamed"] for b in bugs)
        rows.append(
            (
                data["dtype"],
                *total.values(),
                unnamed,
                total["found"] - total["rightly_named"] - unnamed,
                sum(s["cases"] for s in sound),
                sum(bool(s["blamed"]) for s in sound),
            )
        )
    return Table(
        "The same bugs in other precisions",
        ("dtype", "runs", "found", "within rounding", "right diagnosis", "no diagnosis", "wrong diagnosis",
         "sound cases", "sound loops blamed"),
        tuple(rows),
        "Within rounding: the bug's effect on the smallest case that shows it in float64 is smaller than what rounding "
        "explains in this dtype. No diagnosis: found, but rounding hides the weights of the items.",
    )  # fmt: skip


def _zoo_figures(bugs: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> tuple[Figure, ...]:
    totals = dict(sorted(found.items(), key=lambda item: (item[0] != OURS, -item[1])))
    rows = [
        {"bug": f"{bug['number']} {bug['name']}", "method": method, "state": "found" if hit else "missed"}
        for bug in bugs
        for method, hit in _hits(bug, totals).items()
    ]
    said = "; ".join(f"{method} {count}" for method, count in totals.items())
    return (
        Figure(
            "zoo-totals",
            counts_plot(totals, "bugs found"),
            f"Bugs found, of {len(bugs)}: {said}",
            f"Bugs found, of {len(bugs)}, by the suite, by the tolerance rules of others and by fixed tests.",
        ),
        Figure(
            "zoo-scoreboard",
            scoreboard_plot(rows, list(totals)),
            f"Which of {len(bugs)} known bugs each rule and fixed test finds. The table of known bugs has the same.",
            "Every bug, and what finds it.",
        ),
    )


def _hits(bug: Mapping[str, Any], methods: Mapping[str, int]) -> dict[str, bool]:
    return {m: bug["found"] == bug["runs"] if m == OURS else bool(bug["others"].get(m)) for m in methods}
