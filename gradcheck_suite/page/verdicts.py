"""Sections on verdicts: verification, audits, trainers; and where all figures come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import Data, Record, audited_script
from gradcheck_suite.core.results import Violation, result_from_json
from gradcheck_suite.core.text import counted, cut_text, violation_title
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.trainer import MODEL
from gradcheck_suite.page.charts import counts_plot
from gradcheck_suite.page.content import (
    Cell,
    Figure,
    HeadlineAnswer,
    Matrix,
    Section,
    Source,
    Table,
    sources,
    table,
)
from gradcheck_suite.page.reading import (
    Facts,
    Pairs,
    Part,
    Records,
    Tone,
    device_name,
    environments,
    matrix_of,
)


def outcome(data: Data) -> str:
    """Return the verdict in a record, with the diagnosis of a violation."""
    result = result_from_json(data)
    if result.violation:
        return f"violated ({result.violation.diagnosis})"
    accepted = ", ".join(fault.diagnosis for fault in result.accepted)
    return f"{result.verdict}, accepted {accepted}" if accepted else result.verdict


# What was verified: the verdict on each loop, and the layers, losses and splits of its cases.


MOST_BARS = 14
NOT_RUN = (
    (
        "Not run: no record has this loop with this dtype on this device. `gradcheck-suite verify"
        " LOOP --dtype DTYPE` makes one, with `--device cuda` on a machine with a GPU, or with"
        " `--ranks N` for a loop of several ranks."
    ),
)


def _verification(newest: list[Record]) -> Section:
    datas = [record.data for record in newest]
    verdicts = table(
        "Every loop and its verdict",
        [_verification_row(data, datas) for data in datas],
        "The ratio is the largest difference from the float64 reference over what rounding allows,"
        " among cases that hold. A loop that is no built-in is a user's.",
    )
    tables = [verdicts]
    figures = []
    disagreements: list[tuple[Cell, ...]] = []
    for data in datas:
        loop = str(data.get("loop", "?"))
        dtype = str(data.get("dtype", ""))
        disagreements += [(loop, dtype, each) for each in found_by(data)]
    if disagreements:
        tables.append(
            Table(
                "Where torch and JAX disagree, and no loop is to blame",
                ("loop", "dtype", "finding"),
                tuple(disagreements),
            )
        )
    of = _judged_text(datas)
    for category, title in (
        ("splits", "Splits that the cases reached"),
        ("layers", "Layers"),
        ("losses", "Losses"),
    ):
        counts = _reached(datas, category)
        if counts:
            ordered = counts.most_common()
            tables.append(Table(f"{title} (cases, {of})", ("what", "cases"), tuple(ordered)))
            figures.append(_coverage(category, title, dict(ordered), of))
    text = [
        "Each loop trained random models on random splits. Every gradient that reached its"
        " optimizer was compared with the gradient of the whole window in one batch, computed"
        " in float64 by torch and by JAX."
    ]
    if disagreements:
        text.append(
            f"{disagreement_clause(datas)}, which is no loop's fault. A table below says where."
        )
    return Section(
        text=tuple(text),
        matrices=(verdict_matrix(newest),),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _verification_row(data: Data, datas: Sequence[Data]) -> dict[str, Cell]:
    skipped = "; ".join(f"{n}: {why}" for why, n in _items(data, "skipped"))
    return {
        "loop": str(data.get("loop", "?")),
        "verdict": str(data.get("verdict", "?")),
        "cases judged": _number_judged(data),
        "dtype": str(data.get("dtype", "")),
        "device": str(data.get("device", "")),
        "optimizer": data.get("optimizer"),
        "worst error / allowed": data.get("worst_error_over_allowed"),
        "diagnosis": title_of(data),
        **_accepted_column(data, datas),
        "counterexample": data.get("stored"),
        "cases not judged, and why": skipped or None,
    }


def _reached(datas: Sequence[Data], category: str) -> Counter[str]:
    """Return how many cases had each split, layer or loss, over all records."""
    counts = Counter[str]()
    for data in datas:
        counts.update({str(k): int(v) for k, v in _items(data.get("reached") or {}, category)})
    return counts


def _items(data: Data, name: str) -> Iterable[tuple[Any, Any]]:
    return (data.get(name) or {}).items()


Place = tuple[str, str]
"""The dtype and the device of a verdict."""
Row = Mapping[Place, Data]


def _worst_of_each_place(
    datas: Iterable[Data], together: Container[str], title: str
) -> dict[str, Row]:
    """Return the worst verdict of each row and place; the loops of `together` share the row `title`."""
    rows: dict[str, dict[Place, Data]] = {}
    for data in datas:
        loop = str(data.get("loop", "?"))
        place = dtype_and_device(data)
        row = rows.setdefault(title if loop in together else loop, {})
        # one place has several verdicts: several optimizers, problems, or modes in one row
        if place not in row or _badness(data) > _badness(row[place]):
            row[place] = data
    return dict(rows)


def _column_titles(rows: Sequence[Row], places: Sequence[Place]) -> dict[Place, str]:
    """Return the title of each place, with the fewest cases that a verdict below it rests on."""
    titles = {}
    for place in places:
        title = f"{place[0]} {device_name(place[1])}"
        below = [row[place] for row in rows if place in row]
        judged = {_number_judged(data) for data in below if _holds(data)}
        if judged:
            more = "+" if len(judged) > 1 else ""
            title += f"\N{NO-BREAK SPACE}({min(judged):,}{more})"
        titles[place] = title
    # an empty column says that no GPU was tried, which no column would not say
    if "cuda" not in {device for _, device in places}:
        titles["", "cuda"] = f"any {device_name('cuda')}"
    return titles


def _mode_cell(data: Data | None) -> Tone:
    if data is None:
        return "none", ("not run",)  # NOT_RUN says why
    if _holds(data):
        return "good", (f"\N{CHECK MARK} {share_text(_badness(data)[-1])}",)
    result = result_from_json(data)
    name = result.violation.diagnosis if result.violation else ""
    return "bad" if result.violations else "none", (result.verdict, name)


def verdict_matrix(records: Sequence[Record], most: int | None = None) -> Matrix:
    """Return the verdicts as a matrix: loop x dtype and device, violated loops first, then the
    built-in modes.

    Args:
        records: the last of each setting.
        most: rows at most; the built-in modes are first then, those of JAX in one row, and the
            caption says what is left out.
    """
    datas = [record.data for record in records]
    limited = most is not None
    loops = {str(data.get("loop", "?")) for data in datas}
    # the modes of JAX are many and alike: a short matrix has one row for the worst of them
    together = loops & {*JAX_MODES} if limited else set()
    of_jax = f"{counted(len(together), 'mode')} of JAX"
    rows = _worst_of_each_place(datas, together, of_jax)
    # a loop holds where no place of its row is violated or unjudged
    holding = {loop: all(map(_holds, row.values())) for loop, row in rows.items()}
    modes = {*MODES, *JAX_MODES, of_jax}
    order = sorted(
        rows,
        # False comes before True: in a short matrix the built-in modes first, then violated loops
        key=lambda loop: (limited and loop not in modes, holding[loop], loop not in modes),
    )
    shown = {loop: rows[loop] for loop in order[:most]}
    # all places, those of rows that are left out as well, so that short and long matrices have the
    # same columns
    places = sorted(set(chain.from_iterable(rows.values())), key=place_order)
    columns = _column_titles(list(shown.values()), places)
    caption = "Columns: dtype, device (cases). Cells: worst error / allowed"
    left_out = order[len(shown) :]
    if left_out:
        caption += f"; {len(left_out)} more loops"
        bad = sum(not holding[loop] for loop in left_out)
        caption += f", {bad} violated" if bad else ""
    lacks_a_place = any(columns.keys() - row.keys() for row in shown.values())
    return matrix_of(
        caption,
        "mode" if limited else "loop",
        columns,
        shown,
        cell=_mode_cell,
        notes=NOT_RUN if lacks_a_place and not limited else (),
    )


def found_by(data: Data) -> list[str]:
    """Return where torch and JAX disagree, as a record has it."""
    return [str(each) for each in data.get("findings") or ()]


def disagreement_clause(datas: Sequence[Data]) -> str:
    """Return in how many gradients torch and JAX disagree, as a clause; empty if they agree."""
    # several loops meet the same disagreement, which is counted once
    count = len(set(chain.from_iterable(map(found_by, datas))))
    return f"In {counted(count, 'gradient')} torch and JAX disagree" if count else ""


def share_text(ratio: float) -> str:
    """Return a share with two digits, or with as many as show that it is below 1."""
    # 0.996 with two digits is 1, which would say that the bound is reached
    texts = (f"{ratio:.{digits}g}" for digits in (2, 3, 4))
    return next((text for text in texts if ratio >= 1 or text != "1"), "almost 1")


def dtype_and_device(data: Data) -> tuple[str, str]:
    """Return the dtype and the device of a verdict."""
    return str(data.get("dtype", "?")), str(data.get("device", "?"))


def place_order(place: tuple[str, str]) -> tuple[bool, int, tuple[str, str]]:
    """Return what dtypes and devices are sorted by: the CPU first, then the dtypes as the suite
    lists them.
    """
    dtype, device = place
    # a dtype of a later version comes last
    return device != "cpu", DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), place


def _holds(data: Data) -> bool:
    return data["verdict"] == "holds"


def _badness(data: Data) -> tuple[bool, bool, float]:
    """Return whether a loop is violated, whether it does not hold, and its worst error over what is
    allowed.
    """
    return (
        data["verdict"] == "violated",
        not _holds(data),
        float(data.get("worst_error_over_allowed") or 0),
    )


def _number_judged(data: Data) -> int:
    # records of earlier versions say how many cases were drawn, and judged all of them
    return int(data.get("judged", data.get("cases", 0)))


def _judged_text(datas: Sequence[Data]) -> str:
    """Return of how many cases counts are.

    Each row judges cases of its own, which may reach a layer each.
    """
    judged = [_number_judged(data) for data in datas]
    what = "loops" if len({data.get("loop") for data in datas}) == len(datas) else "verdicts"
    each = f"{judged[0]:,} cases for each of" if len(set(judged)) == 1 else "the sum over"
    return f"of {sum(judged):,} judged: {each} {len(judged)} {what}"


def _coverage(category: str, title: str, counts: Mapping[str, int], of: str) -> Figure:
    # in the order of the table, the most frequent first
    shown = dict(list(counts.items())[:MOST_BARS])
    rest = f"; {len(counts) - MOST_BARS} more in the table" if len(counts) > MOST_BARS else ""
    return Figure(
        f"coverage-{category}",
        counts_plot(shown, "cases"),
        f"{title}: number of cases with each, {of}; "
        + ", ".join(f"{k} {v:,}" for k, v in shown.items()),
        f"{title}: cases with each, {of}{rest}.",
        in_story=category == "splits",
    )


def title_of(data: Data) -> str | None:
    """Return the kind and diagnosis of the violation in a record; None where it holds."""
    violation = result_from_json(data).violation
    return violation_title(violation.kind, violation.diagnosis) if violation else None


def accepted_in(data: Data) -> str | None:
    """Return the faults and findings in a record that the project accepts, and why; None without any."""
    result = result_from_json(data)
    faults = [(fault.diagnosis, fault.reason) for fault in result.accepted]
    findings = [(one.name, one.reason) for one in result.named_findings if one.reason is not None]
    told = (f"{name}: {why or '--accept'}" for name, why in (*faults, *findings))
    return "; ".join(told) or None


def _accepted_column(data: Data, datas: Sequence[Data]) -> dict[str, str | None]:
    """Return the cell on accepted faults; none where no record of the table accepts any."""
    return {"accepted": accepted_in(data)} if any(map(accepted_in, datas)) else {}


def _verification_facts(data: Data) -> Facts:
    names = ("loop", "dtype", "device", "optimizer", "problem")
    return {" ".join(str(data[name]) for name in names if data.get(name)): outcome(data)}


VERIFICATION = Part(
    "verified",
    "verification",
    "What was verified",
    "verify",
    _verification,
    _verification_facts,
    "Nothing has been verified yet: run `gradcheck-suite verify`.",
)


# The scripts that were audited: the last verdict on each.


def _audits(newest: list[Record]) -> Section:
    datas = [record.data for record in newest]
    violated = sum(data["verdict"] == "violated" for data in datas)
    runs: dict[str, dict[int, Data]] = {}
    for data in datas:
        script, ranks = audited_script(data)
        runs.setdefault(script, {})[ranks] = data
    numbers_of_ranks = sorted(set(chain.from_iterable(runs.values())))
    return Section(
        text=(
            (
                f"`gradcheck-suite audit` ran {counted(len(datas), 'script')} unchanged and judged"
                f" the optimizer steps; {violated} violated. Those on several ranks ran under"
                " `torchrun`."
            ),
        ),
        matrices=(
            matrix_of(
                "Verdict on each script: holds, or the diagnosis of the violation",
                "script",
                {n: counted(n, "rank") for n in numbers_of_ranks},
                runs,
                verdict_cell,
            ),
        ),
        tables=(
            table("Every script and its verdict", [_audit_row(data, datas) for data in datas]),
        ),
    )


def _audit_row(data: Data, datas: Sequence[Data]) -> dict[str, Cell]:
    script, ranks = audited_script(data)
    found = result_from_json(data).violation
    return {
        "script": script,
        "ranks": ranks,
        "verdict": str(data["verdict"]),
        "steps judged": data.get("windows"),
        "diagnosis": title_of(data),
        **_accepted_column(data, datas),
        "at step": found.step if found else None,
        "loss": found.where if found else None,
        "what is wrong": found.explanation if found else None,
    }


def verdict_cell(data: Data | None) -> Tone:
    """Return the verdict on a loop or script as a cell of a matrix."""
    if data is None:
        return "none", ("not run",)
    result = result_from_json(data)
    # a violation beside an accepted fault is what matters
    if result.accepted and not result.violation:
        return "warn", (
            result.verdict,
            *(f"accepted {fault.diagnosis}" for fault in result.accepted),
        )
    tone = {"holds": "good", "violated": "bad"}.get(result.verdict, "none")
    return tone, (result.violation.diagnosis if result.violation else result.verdict,)


def _audit_facts(data: Data) -> Facts:
    script, ranks = audited_script(data)
    return {f"{script} on {ranks} ranks" if ranks > 1 else script: outcome(data)}


AUDITS = Part("audits", "verification", "Audited scripts", "audit", _audits, _audit_facts)


# Verdicts on real trainers, one column per question.


Answers = Mapping[tuple[str, str], Mapping[str, Data]]
"""Trainer and version -> question -> the answer."""


def _trainers(newest: list[Record]) -> Section:
    models: list[Data] = []
    answers: dict[tuple[str, str], dict[str, Data]] = {}
    for data in (record.data for record in newest):
        if data["question"].startswith(MODEL):
            models.append(data)
        else:
            answers.setdefault((data["trainer"], _package_version(data)), {})[data["question"]] = (
                data
            )
    violated = sum(any(_violation_of(data) for data in row.values()) for row in answers.values())
    ran = sum(any(data["result"] is not None for data in row.values()) for row in answers.values())
    questions = list(dict.fromkeys(chain.from_iterable(answers.values())))
    asked = table(
        "Verdict of each trainer on each question",
        [
            {"trainer": trainer, "version": version, **{q: _verdict(row.get(q)) for q in questions}}
            for (trainer, version), row in answers.items()
        ],
        "A violated cell has the diagnosis and the smallest case: items of each micro-batch,"
        " windows separated by |, and K. A dash stands for a question that was not asked; the notes"
        " above say why. docs/found.md has the cause of each violation and a fix.",
    )
    of_models = table(
        "Models of transformers under its Trainer",
        map(_model_row, models),
    )
    return Section(
        text=(
            *_models_text(models),
            (
                f"{ran} of {len(answers)} trainers and versions ran, unpatched, as they are"
                f" installed; {violated} of them hand their optimizer a gradient that differs from"
                " the large batch's for some question."
            ),
        ),
        matrices=(_trainers_matrix(answers, questions),),
        tables=(asked, of_models) if models else (asked,),
    )


def _model_row(data: Data) -> dict[str, Cell]:
    violation = _violation_of(data)
    return {
        "model": data["question"].removeprefix(MODEL),
        "version": _package_version(data),
        "verdict": _verdict(data),
        "what its gradient is": violation.explanation.partition(": ")[0] if violation else None,
    }


def _trainers_matrix(answers: Answers, questions: Sequence[str]) -> Matrix:
    reasons: dict[str, str] = {}

    def cell(asked: tuple[str, str, Data | None] | None) -> Tone:
        assert asked is not None
        trainer, question, data = asked
        if data is None or data["result"] is None:
            # equal reasons have one mark
            why = _why_not_asked(trainer, question, data)
            return "none", (f"not asked ({reasons.setdefault(why, str(len(reasons) + 1))})",)
        violation = _violation_of(data)
        return ("good", ("holds",)) if violation is None else ("bad", (violation.diagnosis,))

    found = matrix_of(
        "Verdict of each trainer on each question: holds, or the diagnosis of the violation",
        "trainer",
        {question: question for question in questions},
        {
            f"{trainer}, {version}": {q: (trainer, q, row.get(q)) for q in questions}
            for (trainer, version), row in answers.items()
        },
        cell,
    )
    return replace(
        found, notes=tuple(f"Not asked ({mark}): {why}." for why, mark in reasons.items())
    )


def _why_not_asked(trainer: str, question: str, data: Data | None) -> str:
    """Return why a trainer has no verdict on a question."""
    if data is not None and data.get("why"):
        return str(data["why"])
    known = TRAINERS.get(trainer)
    own = [q.name for q in known.questions] if known is not None else []
    # a question may be one of several trainers, and says of which
    asked_of: dict[str, str] = {}
    for other in TRAINERS.values():
        asked_of |= {q.name: q.asked_of for q in other.questions}
    of = asked_of.get(question)
    if known is None or of is None or question in own:
        return f"no record has it; `gradcheck-suite trainers {trainer}` asks"
    if of:
        return f"this question is for {of}"
    return f"{trainer} is a variant for the question {', '.join(own)} alone"


def _models_text(models: Sequence[Data]) -> list[str]:
    """Return a sentence for each version: how many models hold, and how many get each wrong
    gradient.
    """
    versions: dict[str, list[Data]] = {}
    for data in models:
        if data["result"] is not None:
            versions.setdefault(_package_version(data), []).append(data)
    found = []
    for version, mine in versions.items():
        wrong = Counter(v.diagnosis for v in map(_violation_of, mine) if v is not None)
        sentence = (
            f"Of {len(mine)} models under the Trainer of {version}, {len(mine) - wrong.total()}"
            " hold"
        )
        if wrong:
            kinds = ", ".join(f"{name} {count}" for name, count in wrong.most_common())
            sentence += f" and {wrong.total()} get a wrong gradient (diagnosis: {kinds})"
        found.append(f"{sentence}.")
    return found


def _violation_of(data: Data) -> Violation | None:
    return data["result"] and result_from_json(data["result"]).violation


def _package_version(data: Data) -> str:
    return f"{data['package']} {data['version']}" if data["package"] else "own file"


def _verdict(data: Data | None) -> Cell:
    if data is None or data["result"] is None:
        return None
    violation = _violation_of(data)
    return (
        "holds" if violation is None else f"{violation.diagnosis} {cut_text(violation.case.plan)}"
    )


def _trainers_facts(data: Data) -> Facts:
    said = outcome(data["result"]) if data["result"] else "not asked"
    return {f"{data['trainer']} {data['version']}, {data['question']}": said}


REAL_TRAINERS = Part(
    "trainers",
    "trainers",
    "Real trainers",
    "trainer",
    _trainers,
    _trainers_facts,
    "No trainer has been asked yet: run `gradcheck-suite trainers`.",
)


# Where the figures come from: every run, its machine, and the parts of the report that show it.


FIRST_PAGE = "Overview"


def provenance(
    records: Records,
    answers: Sequence[HeadlineAnswer],
    sections: Iterable[Section],
    made_on: Sequence[Pairs],
) -> Section | None:
    """Return the section on all runs and machines; None without records.

    Args:
        records: all of them.
        answers: of the first screen.
        sections: the others.
        made_on: the distinct environments of the records.
    """
    screens = [(FIRST_PAGE, answer.sources) for answer in answers]
    screens += [(section.title, section.sources) for section in sections]
    shown_in = _titles_of_runs(screens)
    rows: list[dict[str, Cell]] = []
    for found in records.by_kind.values():
        # the last number stands for records that do not say on which machine they were made
        for number, made in enumerate((*made_on, ()), 1):
            on_this_machine = (made,) if made else ()
            for source in sources(r for r in found if environments([r]) == on_this_machine):
                titles = shown_in.get(_without_count(source), ())
                rows.append(_run_row(source, machine=number, titles=titles))
    runs = table(
        "Every run behind this report",
        rows,
        "Older: the code that the figures speak of has changed since, or the record does not say"
        " which it was. That code depends on the kind of record: benchmarks speak of the modes and"
        " of what measures them, verdicts and claims of what verifies. One command can write both"
        " kinds. A part of the report shows the newest record of each subject, so a later run can"
        " replace an earlier one, in whole or in part.",
    )
    if not runs.rows:
        return None
    # machines may know different things of themselves: a column for each name that some machine has
    names = dict.fromkeys(name for name, _ in chain.from_iterable(made_on))
    machines = table(
        "Machines, versions and precision flags",
        [
            {"machine": number, **dict.fromkeys(names), **dict(made)}
            for number, made in enumerate(made_on, 1)
        ],
        "The number of a machine is that of the table above. Two rows may be one machine with other"
        " versions.",
    )
    tables = (runs, machines) if made_on else (runs,)
    return Section(
        "provenance",
        "Where the figures come from",
        "environment",
        tables=tables,
    )


def _titles_of_runs(
    screens: Iterable[tuple[str, Iterable[Source]]],
) -> dict[Source, dict[str, None]]:
    """Return the titles of the screens that show each run, in order."""
    shown_in: dict[Source, dict[str, None]] = {}
    for title, parts in screens:
        for source in parts:
            shown_in.setdefault(_without_count(source), {})[title] = None
    return shown_in


def _run_row(source: Source, *, machine: int, titles: Iterable[str]) -> dict[str, Cell]:
    return {
        "records": source.kind,
        "number": source.records,
        "date": source.date or None,
        "commit": source.commit or None,
        "command": source.command or None,
        "machine": machine,
        "code": "older" if source.older else "current",
        "working tree": "unclean" if source.unclean else None,
        "shown in": ", ".join(titles) or "replaced by a newer run",
    }


def _without_count(source: Source) -> Source:
    """Return a source without its count and its day, which differ where a part of its records is
    shown.
    """
    return replace(source, date="", records=0)
