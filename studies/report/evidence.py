"""Sections on the suite itself: atlas, calibration, claims, optimizers, zero or None, the zoo."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradcheck_suite.core.records import Data, Record
from gradcheck_suite.core.text import counted
from gradcheck_suite.page.charts import counts_plot
from gradcheck_suite.page.content import Cell, Claim, Figure, Section, Table, sources, table
from gradcheck_suite.page.reading import Facts, Part, Records, latest
from studies import tally
from studies.claims import ANSWERS, CLAIMS
from studies.report.charts import bars_plot, detection_plot, scoreboard_plot
from studies.report.faster import answer
from studies.tally import OURS as SUITE
from studies.tally import RIVALS, Curve, curve_from_json, exponents, share_found, spread_from_json

# The claims about gradient zeroing with their verdicts, and the loops that their sources print.


OLDER = (
    "Older than the code: the code that a figure speaks of has changed since the figure was"
    " recorded."
)
STEPS_CLAIM = "C1.8"
"""The claim about when zeroing may do, which steps under both modes in turn decide."""
PAIR = re.compile(r"^([\d.,]+) / ([\d.,]+)$")
MODES = ("zero_", "None")


def with_steps(records: Records, steps: Sequence[Data]) -> Records:
    """Return the records with `STEPS_CLAIM` answered from the timed steps that the section on steps
    shows.
    """
    said = {"text": CLAIMS[STEPS_CLAIM].text, "how": CLAIMS[STEPS_CLAIM].how}
    claims = [
        (
            replace(record, data={**record.data, **said, **answer(steps)})
            if steps and record.data.get("number") == STEPS_CLAIM
            else record
        )
        for record in records.of("claim")
    ]
    return replace(records, by_kind={**records.by_kind, "claim": claims})


def claim_list(records: Sequence[Record]) -> tuple[Claim, ...]:
    """Return the claims with their last verdicts, by origin and number."""
    found = []
    for record in latest((r for r in records if "number" in r.data), ["number"]):
        data = record.data
        number, text = str(data["number"]), str(data["text"])
        known = CLAIMS.get(number)
        numbers, figures, series = _figures_of_claim(number, data.get("figures") or {})
        short = known.short if known and known.text == text else text
        verdict, sentence, how, against = (
            str(data[name]) for name in ("verdict", "sentence", "how", "counterexample")
        )
        origin, condition, made_by = (
            str(data.get("source", "")),
            str(data.get("condition") or ""),
            sources([record]),
        )
        said = (verdict, sentence, condition, how, against)
        found.append(Claim(number, origin, text, short, *said, numbers, figures, series, made_by))
    return tuple(
        sorted(found, key=lambda claim: [int(part) for part in re.findall(r"\d+", claim.number)])
    )


def counted_verdicts(found: Sequence[Claim]) -> tuple[Counter[str], list[Claim]]:
    """Return how many claims have each verdict, and the questions, which are no claims."""
    questions = [claim for claim in found if claim.verdict in ANSWERS.values()]
    return Counter(claim.verdict for claim in found if claim not in questions), questions


def _claims(records: list[Record]) -> Section | None:
    found = claim_list(records)
    loops = [record.data for record in latest((r for r in records if "loop" in r.data), ["loop"])]
    used = [record for record in records if "number" in record.data or "loop" in record.data]
    if not found and not loops:
        return None
    printed = table(
        "The loops that the sources print",
        [
            {
                "loop": data["loop"], "what it does": data["says"], "relies on": data.get("needs"),
                "with that": data["within"],
                "on all splits": re.sub(r"\b1 cases\b", "1 case", data["bare"]),  # as earlier versions wrote it
                "why": data.get("why") or None, "smallest case": "\n".join(map(str, data.get("smallest", ()))),
            }
            for data in loops
        ],
    )  # fmt: skip
    return Section(
        text=(
            (
                "Three widely read explanations of gradient zeroing, put to the test: each claim as"
                " it was published, what is judged of it, and the verdict: `confirmed`, `refuted`,"
                " or `conditional`: true under the condition. A question that a source answers gets"
                " `always`, `sometimes` or `never`, and is counted apart."
            ),
            *_loops_text(loops),
            *((OLDER,) if any(source.older for claim in found for source in claim.sources) else ()),
        ),
        claims=found,
        tables=(printed,) if loops else (),
        sources=sources(used[-len(found) - len(loops) :]),
    )


def _figures_of_claim(
    number: str, figures: Data
) -> tuple[
    tuple[tuple[str, str], ...], tuple[Figure, ...], tuple[tuple[str, tuple[str, ...]], ...]
]:
    """Return the figures of a claim that stay text, the plots of those that are numbers, and the
    rows of numbers.
    """
    pairs: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    series: list[tuple[str, tuple[str, ...]]] = []
    texts: list[tuple[str, str]] = []
    for name, value in figures.items():
        if "zero_ / None" in name and isinstance(value, str) and (found := PAIR.match(value)):
            group = re.sub(r"[,:]? *zero_ / None", "", name)
            values = (float(text.replace(",", "")) for text in found.groups())
            pairs += [
                {"group": group, "name": mode, "value": v}
                for mode, v in zip(MODES, values, strict=True)
            ]
        elif _is_number(value):
            alone.append({"group": name, "name": "", "value": float(value)})
        elif isinstance(value, list) and len(value) > 1 and all(map(_is_number, value)):
            series.append((name, tuple(map(_value, value))))
        else:
            texts.append((name, _value(value)))
    if len(alone) == 1:
        texts.append((alone[0]["group"], _value(alone[0]["value"])))
        alone = []
    said = "; ".join(f"{name}: {_value(value)}" for name, value in figures.items())
    plots = tuple(
        Figure(
            f"claim-{number}-{kind}",
            bars_plot(
                [{**row, "value": abs(row["value"]), "text": _value(row["value"])} for row in rows]
            ),
            said,
        )
        for kind, rows in (("pairs", pairs), ("values", alone))
        if rows
    )
    return tuple(texts), plots, tuple(series)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _loops_text(loops: Sequence[Data]) -> list[str]:
    if not loops:
        return []
    within, bare = (
        sum(str(data[name]).startswith("holds") for data in loops) for name in ("within", "bare")
    )
    needs = Counter(str(data["needs"]) for data in loops if data.get("needs"))
    relied = "; ".join(f"{need} ({count} of them)" for need, count in needs.most_common())
    return [
        f"Of {len(loops)} loops that the sources print, {within} are right under what they rely"
        f" on{f': {relied}' if relied else ''}. On all splits, with accumulation and unequal"
        f" micro-batches, {bare} are."
    ]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value)


CLAIMED = Part(
    "claims", "claims", "The claims", "claim", _claims,
    lambda d: {f"claim {d['number']}": str(d["verdict"])} if "number" in d else {},
    "The claims have not been tested yet: run `python -m studies claims`.",
)  # fmt: skip


# The scoreboard of known bugs.


OURS = "gradcheck-suite"


NOT_EXPRESSED: dict[int, str] = {
    23: (
        "the gradient's values are right; properties/test_graph_hygiene.py checks that it keeps no"
        " graph alive"
    ),
    43: (
        "a loss that is 0/0 on a micro-batch breaks the Problem's contract: it is refused before"
        " any loop runs"
    ),
    46: (
        "None and zeros are both right by the contract; studies/properties/test_zero_or_none.py"
        " checks where they differ, and verify --optimizer says what zeros move"
    ),
}
"""Entries of the corpus that no loop or Problem can show as a violation of the contract, and why."""


def _zoo(newest: list[Record]) -> Section | None:
    exact = (None, "", "float64")
    coarser = [record for record in newest if record.data.get("dtype") not in exact]
    own = [record for record in newest if record.data.get("dtype") in exact]
    if not own:
        return None
    data = own[0].data
    every, sound = data["bugs"], data["sound"]
    bugs, planted = (
        [b for b in every if (b["number"] is None) == is_planted] for is_planted in (False, True)
    )
    found, found_planted = (sum(b["found"] == b["runs"] for b in some) for some in (bugs, planted))
    beside = f", and {found_planted} of {len(planted)} planted ones" if planted else ""
    others: dict[str, int] = Counter()
    for bug in bugs:
        others.update({name: int(hit) for name, hit in bug["others"].items()})
    totals = {OURS: found, **dict(sorted(others.items(), key=lambda item: -item[1]))}
    return Section(
        text=(
            f"{found} of {len(bugs)} reported bugs, re-created in a few lines each, are found in "
            f"{counted(data['seeds'], 'run')} each{beside}, {sum(b['rightly_named'] for b in every)} of "
            f"{sum(b['runs'] for b in every)} runs with the expected diagnosis. The sound loops were blamed in "
            f"{sum(bool(s['blamed']) for s in sound)} of {sum(s['cases'] for s in sound):,} cases.",
        ),
        figures=_zoo_figures(bugs, totals),
        tables=(
            table(
                "Known bugs",
                [
                    {
                        "number": b["number"], "bug": b["name"], "reported as": ", ".join(b["citations"]),
                        "mechanism": b["mechanism"], "found": f"{b['found']}/{b['runs']}",
                        "median cases": b["median_cases"], "median seconds": b["median_seconds"],
                        "smallest: windows, micro-batches, layers": f"{b['windows']}, {b['micro_batches']}, "
                        f"{b['layers']}",
                        "diagnosis": ", ".join(f"{name} ({count})" for name, count in b["names"].items()),
                        "missed by": ", ".join(name for name, hit in b["others"].items() if not hit) or None,
                    }
                    for b in every
                ],
            ),
            Table(
                "Bugs found by other rules and by fixed tests", ("rule or fixed test", f"bugs found, of {len(bugs)}"),
                tuple(totals.items()),
                "Rules compare the gradients of the case that first showed the bug, so they profit from the suite's "
                "search; each fixed test is one hand-written case, as trainers have them in their tests.",
            ),
            *([_coarser([record.data for record in coarser])] if coarser else []),
            Table("Reported bugs that are not in the zoo", ("number", "why"), tuple(NOT_EXPRESSED.items())),
        ),
        sources=sources((*own, *coarser)),
    )  # fmt: skip


def _coarser(datas: Sequence[Data]) -> Table:
    rows = []
    for data in datas:
        bugs, sound = data["bugs"], data["sound"]
        runs, found, within, right, unnamed = (
            sum(b[name] for b in bugs)
            for name in ("runs", "found", "within_rounding", "rightly_named", "unnamed")
        )
        rows.append({
            "dtype": data["dtype"], "runs": runs, "found": found, "within rounding": within, "right diagnosis": right,
            "no diagnosis": unnamed, "wrong diagnosis": found - right - unnamed,
            "sound cases": sum(s["cases"] for s in sound), "sound loops blamed": sum(bool(s["blamed"]) for s in sound),
            "without a right diagnosis": ", ".join(b["name"] for b in bugs if b["rightly_named"] < b["runs"]) or None,
        })  # fmt: skip
    return table(
        "The same bugs in other precisions",
        rows,
        "Within rounding: the bug's effect on the smallest case that shows it in float64 is smaller"
        " than what rounding explains in this dtype. No diagnosis: found, but rounding hides the"
        " weights of the items.",
    )


def _zoo_figures(bugs: Sequence[Data], totals: Mapping[str, int]) -> tuple[Figure, ...]:
    def finds(method: str, bug: Data) -> bool:
        return bool(bug["found"] == bug["runs"] if method == OURS else bug["others"].get(method))

    rows = [
        {
            "bug": f"{bug['number']} {bug['name']}",
            "method": m,
            "state": "found" if finds(m, bug) else "missed",
        }
        for bug in bugs
        for m in totals
    ]
    said = "; ".join(f"{method} {count}" for method, count in totals.items())
    return (
        Figure(
            "zoo-totals", counts_plot(totals, "bugs found"), f"Bugs found, of {len(bugs)}: {said}",
            f"Bugs found, of {len(bugs)}, by the suite, by the tolerance rules of others and by fixed tests.",
            in_story=True,
        ),
        Figure(
            "zoo-scoreboard", scoreboard_plot(rows, list(totals)),
            f"Which of {len(bugs)} known bugs each rule and fixed test finds. The table of known bugs has the same.",
            "Every bug, and what finds it.",
        ),
    )  # fmt: skip


def _zoo_facts(data: Data) -> Facts:
    dtype = f" {data['dtype']}" if data.get("dtype") else ""
    return {
        f"{bug['name']}{dtype}": (
            f"found {bug['found']} of {bug['runs']}, rightly named {bug['rightly_named']}"
        )
        for bug in data["bugs"]
    }


ZOO = Part(
    "zoo", "zoo", "The zoo of known bugs", "zoo", _zoo, _zoo_facts,
    "The zoo has not been run yet: run `python -m studies zoo`.",
)  # fmt: skip


def _zoo_counts(newest: list[Record]) -> Section:
    rows = sorted((record.data for record in newest), key=lambda data: -_most(data))
    return Section(
        text=(
            f"After how many cases {counted(len(rows), 'bug')} of the zoo were found, each with"
            f" {len(rows[0]['seeds'])} seeds: 0 is the first case. The rarest come first.",
        ),
        tables=(
            table(
                "Cases until a bug is found",
                [
                    {
                        "bug": data["bug"],
                        "median": statistics.median(_found(data)),
                        "most": _most(data),
                        "seeds without it": data["cases"].count(None),
                    }
                    for data in rows
                ],
            ),
        ),
    )


def _found(data: Data) -> list[int]:
    """Return after how many cases each seed has found a bug; for one that has not, all that it had."""
    return [data["examples"] if cases is None else cases for cases in data["cases"]]


def _most(data: Data) -> int:
    return max(_found(data))


def _zoo_count_facts(data: Data) -> Facts:
    return {data["bug"]: f"found after at most {_most(data)} cases"}


ZOO_COUNTS = Part(
    "zoo-counts",
    "zoo",
    "How rare each bug of the zoo is",
    "zoo-count",
    _zoo_counts,
    _zoo_count_facts,
)


# The error rates of the suite: how often it blames a sound loop, and how small an error it finds.


PLOTTED = "everywhere"


def _calibration(newest: list[Record]) -> Section:
    data = newest[0].data
    reached = ", ".join(
        f"{part['reached']} of {part['reached'] + len(part['missing'])} kinds of {what}"
        for what, part in data["coverage"].items()
    )
    return Section(
        text=(
            (
                f"False alarms: {tally.false_alarms(data)} in {tally.checks(data):,} checks. A"
                " check judges a training loop that is known to be right on a random case;"
                f" {data['loops']} such loops were judged. The cases reached {reached} that the"
                " suite could draw at that time."
            ),
            "Missed errors: right gradients were multiplied by 1 + s or 1 - s, and the suite was"
            " asked whether they are still right. The plots show in how many cases it says no,"
            " against s. A curve further left finds smaller errors. The other curves are tolerance"
            " rules of other tools. A rule is only worth comparing where it blames no right loop."
            f" The second table has the smallest s that is found in {tally.percent()} of the"
            " cases. " + ("; ".join(tally.better(data)) or _nothing_better(data)),
        ),
        figures=tuple(
            _detection_figure(dtype, curve, tally.rival_alarms(data, dtype))
            for dtype, found in data["curves"].items()
            if PLOTTED in (curve := curve_from_json(found)).smallest
        ),
        tables=(_alarms(data), _detection(data), _skipped(data), _ratios(data)),
    )


def _nothing_better(data: Data) -> str:
    """Return in which dtypes a rule can be compared and finds no smaller error, and what is found
    in the others.
    """
    alone = {row.dtype: row.sizes[SUITE] for row in tally.found(data) if row.place == PLOTTED}
    compared = [dtype for dtype in alone if not all(tally.rival_alarms(data, dtype).values())]
    said = []
    if compared:
        said.append(
            f"In {' and '.join(compared)} no rule that blames no right loop finds smaller errors."
        )
    for dtype, size in alone.items():
        if dtype not in compared:
            found = (
                "finds no error up to a factor of 2"
                if size is None
                else f"needs an error of {tally.shown(size)}"
            )
            said.append(
                f"In {dtype} every other rule blames right loops; the suite {found}, planted"
                f" {PLOTTED}."
            )
    return " ".join(said)


def _alarms(data: Data) -> Table:
    return table(
        "False alarms: right loops that were judged, and how many were blamed",
        [
            {
                "dtype": dtype,
                "checks": counts["judged"],
                "elements compared": counts["elements"],
                "false alarms": len(counts["alarms"]),
                "gradients that needed sampled rounding errors": sum(drawn.counts),
                "largest error over bound then": drawn.largest,
                "checks without autocast": counts["judged"] - counts["autocast"],
                **{
                    f"blamed by {rule}": alarms
                    for rule, alarms in tally.rival_alarms(data, dtype).items()
                },
            }
            for dtype, counts in data["alarms"].items()
            for drawn in (spread_from_json(counts["drawn_on"]),)
        ],
        "A check is one loop judged on one case. Most errors are within the part of the bound that"
        " is computed; only the others need rounding errors that are sampled (Monte Carlo). Other"
        " rules compare with the large batch in the same dtype; losses under an autocast are left"
        " out for them.",
    )


def _detection(data: Data) -> Table:
    return table(
        f"Smallest relative error found in {tally.percent()} of the cases",
        [
            {
                "dtype": row.dtype, "planted in": row.place, "cases": row.cases, SUITE: tally.shown(row.sizes[SUITE]),
                "of all cases at least": None if row.at_least is None else f"{100 * row.at_least:.1f}%",
                f"{SUITE}, in half of them": tally.shown(row.half),
                **{rule: tally.shown(row.sizes[rule]) + " *" * bool(blamed[rule]) for rule in RIVALS},
            }
            for row in tally.found(data)
            for blamed in (tally.rival_alarms(data, row.dtype),)
        ],
        "* also blames right loops in this dtype. Of all cases at least: the lower end of a 95% interval (Wilson) for "
        "the share in which the suite finds an error of that size. An element that is 0 stays 0 under a factor, so "
        "errors are planted in the largest element and in one drawn from those that are not 0, some of which are "
        "rounding errors only.",
    )  # fmt: skip


def _skipped(data: Data) -> Table:
    rows = [
        (dtype, why, n)
        for dtype, counts in data["alarms"].items()
        for why, n in counts["skipped"].items()
    ]
    return Table(
        "Checks that could not be made, because the gradient of the large batch cannot be computed",
        ("dtype", "why", "checks"),
        tuple(rows),
    )


def _ratios(data: Data) -> Table:
    alarms = data["alarms"]
    kinds = sorted({kind for counts in alarms.values() for kind in counts["over"] if kind})
    return table(
        "Largest error over bound, by kind of layer: median, 99% and largest of the checks whose"
        " case has it",
        [
            {
                "layer": kind,
                "checks": sum(int(counts["layers"].get(kind, 0)) for counts in alarms.values()),
                **{dtype: _spread(counts["over"].get(kind)) for dtype, counts in alarms.items()},
            }
            for kind in kinds
        ],
        "The bound is its deterministic part where the error is within that, otherwise the whole"
        " bound.",
    )


def _spread(counts: Data | None) -> str | None:
    if counts is None:
        return None
    spread = spread_from_json(counts)
    values = (spread.quantile(0.5), spread.quantile(0.99), spread.largest)
    return " / ".join(f"{value:.2f}" for value in values if value is not None)


def _detection_figure(dtype: str, curve: Curve, alarms: Mapping[str, int | None]) -> Figure:
    rules = curve.smallest[PLOTTED]
    names = {rule: f"{rule} *" if alarms.get(rule) else rule for rule in (SUITE, *RIVALS)}
    rows = [
        {"rule": name, "size": 2.0**-k, "share": 100 * share_found(rules[rule], k)}
        for rule, name in names.items()
        for k in exponents(dtype)
    ]
    return Figure(
        f"detection-{dtype}",
        detection_plot(rows, tuple(names.values())),
        "Share of cases in which an error of a size is found against the size, one line per rule,"
        f" {dtype}",
        f"{dtype}: how often a gradient that is wrong by the factor 1 + s or 1 - s is found, in "
        f"{sum(rules[SUITE].values())} cases. * also blames right loops.",
        in_story=dtype in ("float64", "bfloat16"),
    )


def _calibration_facts(data: Data) -> Facts:
    alarms = data["alarms"].items()
    return {
        f"false alarms {dtype}": f"{len(counts['alarms'])} of {counts['judged']}"
        for dtype, counts in alarms
    }


CALIBRATION = Part(
    "calibration", "trust", "How far the verdicts can be trusted", "calibration", _calibration, _calibration_facts,
    "The bounds have not been calibrated yet: run `python -m studies calibrate`.",
)  # fmt: skip


# Where torch and JAX choose different derivatives: kinks, ties and limits.


def _atlas(newest: list[Record]) -> Section:
    rows = newest[0].data["rows"]
    agree = sum(bool(row.get("agree")) for row in rows)
    points = len({(row.get("operation"), row.get("point")) for row in rows})
    dtypes = counted(len({row.get("dtype") for row in rows}), "dtype")
    counts = {"torch and JAX agree": agree, "they choose differently": len(rows) - agree}
    names = ("operation", "point", "dtype", "torch", "jax", "agree", "convention")
    return Section(
        text=(
            (
                f"{points:,} points at kinks, ties and limits, in {dtypes}: of these {len(rows):,}"
                f" derivatives, torch and JAX agree in {agree:,}."
            ),
        ),
        figures=(
            Figure(
                "atlas-agreement",
                counts_plot(counts, "points"),
                "; ".join(f"{name}: {count:,}" for name, count in counts.items()),
                f"Derivatives at kinks, ties and limits: {points:,} points in {dtypes}.",
                in_story=True,
            ),
        ),
        tables=(
            table(
                "Points and the derivatives that torch and JAX choose",
                ({name: _cell(row.get(name)) for name in names} for row in rows),
            ),
        ),
    )


def _cell(value: object) -> Cell:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_numbers(numbers)}" for name, numbers in value.items())
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _numbers(value: object) -> str:
    """Return nested lists of numbers without brackets, each inner list after a bar."""
    if isinstance(value, list):
        inner = any(isinstance(part, list) for part in value)
        return (" | " if inner else ", ").join(map(_numbers, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _atlas_facts(data: Data) -> Facts:
    return {
        f"{row.get('operation')} at {row.get('point')} {row.get('dtype')}": (
            f"torch {row.get('torch')}, jax {row.get('jax')}"
        )
        for row in data["rows"]
    }


ATLAS = Part(
    "atlas",
    "atlas",
    "Where torch and JAX choose different derivatives",
    "atlas",
    _atlas,
    _atlas_facts,
)


# What a gradient of zeros does to a parameter and its optimizer state that None does not, for every
# optimizer.


VARIANTS = {
    "plain": "Zeros alone move it",
    "momentum": "With momentum also",
    "weight decay": "With weight decay also",
}
"""The settings that have a column of their own -> how the sentence begins on those that move the parameter."""


def _zero_or_none(newest: list[Record]) -> Section:
    optimizers: dict[str, dict[str, Data]] = {}
    for record in newest:
        optimizers.setdefault(str(record.data["optimizer"]), {})[str(record.data["variant"])] = (
            record.data
        )
    every = [row for rows in optimizers.values() for row in rows.values()]
    predicted = sum(bool(row["as_predicted"]) for row in every)
    return Section(
        text=(
            "No item of the window uses this parameter. After a release its gradient is None and the optimizer skips "
            "it. After zeroing its gradient is zero, and the optimizer steps on it.", " ".join(_moved(optimizers)),
            f"torch did what the published step predicts in {predicted} of {len(every)} settings.",
        ),
        tables=(
            table(
                "One step on a parameter that no item of the window uses",
                [
                    {
                        "optimizer": name,
                        **{
                            f"zeros change, {variant}": _listed(rows.get(variant), "zero_changes")
                            for variant in VARIANTS
                        },
                        "None changes": _changed_by_none(rows.values()),
                        "same": _always({bool(row["same"]) for row in rows.values()}),
                        "law of zeros": next(iter(rows.values()))["law"],
                    }
                    for name, rows in optimizers.items()
                ],
                "Two windows reach the parameter before, so that averages and momentum are not zero.",
            ),
            table(
                "The same for all settings, with an element of the parameter",
                [
                    {
                        "optimizer": row["optimizer"],
                        "settings": ", ".join(f"{k}={v}" for k, v in row["settings"].items()) or "torch's defaults",
                        "before": float(row["before"]), "after zeros": float(row["after_zero"]),
                        "after None": float(row["after_none"]), "zeros change": _listed(row, "zero_changes"),
                        "to the bit": "yes" if row["to_the_bit"] else "no",
                        "as predicted": "yes" if row["as_predicted"] else "no",
                    }
                    for row in every
                ],
                "To the bit: every operation of the prediction is exact in float64, so that no error is allowed.",
            ),
        ),
    )  # fmt: skip


def moved_by_zeros(records: Records) -> list[str]:
    """Return the optimizers that by default step on a gradient of zeros and skip None, `Adam`
    first.
    """
    rows = [record.data for record in records.newest("zero-or-none")]
    plain = (
        str(row["optimizer"]) for row in rows if row.get("variant") == "plain" and _moves_alone(row)
    )
    return sorted(plain, key=lambda name: (name != "Adam", name))


def _moved(optimizers: Mapping[str, Mapping[str, Data]]) -> list[str]:
    """Return a sentence for each of `VARIANTS`: which optimizers move the parameter under zeros
    alone.
    """
    sentences, known = [], set[str]()
    for variant, start in VARIANTS.items():
        named = [
            name
            for name, rows in optimizers.items()
            if name not in known and _moves_alone(rows.get(variant))
        ]
        known |= set(named)
        sentences += [f"{start} under {', '.join(named)}."] if named else []
    return sentences


def _moves_alone(row: Data | None) -> bool:
    return (
        row is not None
        and "parameter" in row["zero_changes"]
        and "parameter" not in row["none_changes"]
    )


def _listed(row: Data | None, which: str) -> str | None:
    return None if row is None else ", ".join(row[which]) or "nothing"


def _changed_by_none(rows: Iterable[Data]) -> str | None:
    return next(
        (found for row in rows if (found := _listed(row, "none_changes")) != "nothing"), "nothing"
    )


def _always(answers: set[bool]) -> str:
    return "in some settings" if len(answers) > 1 else "always" if True in answers else "never"


def _zero_or_none_facts(data: Data) -> Facts:
    return {
        f"{data['optimizer']}, {data['variant']}: zeros change": (
            ", ".join(data["zero_changes"]) or "nothing"
        )
    }


ZERO_OR_NONE = Part(
    "zero-or-none",
    "atlas",
    "What zeros do that None does not",
    "zero-or-none",
    _zero_or_none,
    _zero_or_none_facts,
)


# The steps of torch's optimizers in optax: where the formulas differ, and how far the parameters
# are apart.


def _steps(every: list[Record]) -> Section:
    newest = {
        row["torch"]: (number, row)
        for number, record in enumerate(every)
        for row in record.data["rows"]
    }
    found = [row for _, row in newest.values()]
    agree = sum(bool(row.get("agree")) for row in found)

    rows = [
        {
            "torch.optim": row["torch"],
            "in optax": row.get("optax"),
            "what differs, mapped exactly": "; ".join(
                [
                    *row.get("differs", ()),
                    *([f"not compared: {row['outside']}"] if row.get("outside") else []),
                ]
            ),
            "cases": row.get("cases"),
            **{
                dtype: (row.get("error_over_allowed") or {}).get(dtype)
                for dtype in ("float64", "float32")
            },
            "source": row.get("source"),
        }
        for row in found
    ]
    return Section(
        text=(
            (
                f"Of {len(found)} optimizers of torch.optim, {agree} take the same steps as their"
                " counterpart in optax, within a bound on rounding errors that is derived through"
                " the step. Where the formulas differ by definition, the difference is computed,"
                " and no tolerance covers it. The dtypes' columns have the largest error over this"
                " bound: above 1, torch and optax differ."
            ),
        ),
        tables=(table("Optimizers and their counterparts", rows),),
        sources=sources(
            every[number] for number in sorted({number for number, _ in newest.values()})
        ),
    )


def _step_facts(data: Data) -> Facts:
    said = {True: "agrees with optax", False: "differs from optax"}
    return {f"step of {row['torch']}": said[bool(row["agree"])] for row in data["rows"]}


OPTIMIZER_STEPS = Part(
    "steps",
    "trust",
    "The step of each optimizer, by torch and by optax",
    "step",
    _steps,
    _step_facts,
)
