"""Sections on verdicts: the environment, verification, audits, the bridge, trainers, findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gradcheck_suite.catalogue.description import violation_title
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import KINDS, Record, read_records
from gradcheck_suite.core.text import counted
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.trainer import MODEL
from gradcheck_suite.page.content import (
    Answer,
    Cell,
    Document,
    Figure,
    Matrix,
    Section,
    Source,
    Table,
    device_name,
    sources,
)
from gradcheck_suite.studies.report.charts import against_bound_plot, counts_plot
from gradcheck_suite.studies.trainers import cut_text

# Read the records for the report: the latest of each subject, and the machines that made them.


Pairs = tuple[tuple[str, str], ...]
Made = TypeVar("Made")
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record raises that lacks a field or has one of another type."""


@dataclass(frozen=True)
class Records:
    """All records of a reports folder, by kind, oldest first, and what could not be read."""

    by_kind: Mapping[str, list[Record]]
    problems: tuple[str, ...]

    def of(self, kind: str) -> list[Record]:
        """Return a kind's records."""
        return self.by_kind.get(kind, [])


def read_all(reports: Path) -> Records:
    """Read every kind's records."""
    found: dict[str, list[Record]] = {}
    problems: list[str] = []
    for kind in KINDS:
        found[kind], trouble = read_records(reports, kind)
        problems += trouble
    return Records(found, tuple(problems))


def made_from(records: Records, make: Callable[[Records], Made]) -> tuple[Made, Records]:
    """Return what `make` makes of the records, and the records without those that it cannot read.

    A record that lacks a field, or has one of another type, is left out and named in the problems.
    """
    try:
        return make(records), records
    except UNREADABLE:
        kept, problems = {}, list(records.problems)
        for kind, found in records.by_kind.items():
            kept[kind], trouble = _readable(kind, found, 1, make)
            problems += trouble
    records = Records(kept, tuple(problems))
    return make(records), records


def _readable(
    kind: str, found: list[Record], first: int, make: Callable[[Records], object]
) -> tuple[list[Record], list[str]]:
    """Return the records that can be read, and one line on each other; `first` is the number of the first of them."""
    try:
        make(Records({kind: found}, ()))
    except UNREADABLE as error:
        if len(found) == 1:
            return [], [f"{kind}, record {first}: cannot be read ({type(error).__name__}: {error}); left out"]
        half = len(found) // 2
        before, after = (
            _readable(kind, part, start, make) for part, start in ((found[:half], first), (found[half:], first + half))
        )
        return before[0] + after[0], before[1] + after[1]
    return found, []


def latest(records: Iterable[Record], key: Callable[[Mapping[str, Any]], Hashable]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appear."""
    kept: dict[Hashable, Record] = {}
    for record in records:
        kept[key(record.data)] = record
    return list(kept.values())


def current(records: Iterable[Record]) -> list[Record]:
    """Return the measurements of each device that were made where its newest one was made.

    Times and bytes compare only within one machine and one set of versions, so older rows of another are left out.
    """
    records = list(records)
    newest = {record.data.get("device"): record for record in records}
    return [record for record in records if _made_where_made(record, newest[record.data.get("device")])]


def _made_where_made(record: Record, other: Record) -> bool:
    """Return whether two records come from one machine and one set of versions; a record may not say its device."""
    mine, others = record.environment, other.environment
    device = mine.get("device"), others.get("device")
    alike = all(mine.get(name) == others.get(name) for name in ("processor", "processor_count", "versions"))
    return alike and (device[0] == device[1] or None in device)


def environments(records: Iterable[Record]) -> tuple[Pairs, ...]:
    """Return each distinct environment as pairs of a name and a value."""
    return tuple(dict.fromkeys(_pairs(record.environment) for record in records if record.environment))


def _pairs(environment: Mapping[str, Any]) -> Pairs:
    versions = environment.get("versions") or {}
    devices = environment.get("devices") or {}
    precision = environment.get("precision") or {}
    pairs = [
        ("processor", f"{environment.get('processor', 'unknown')}, {environment.get('processor_count', '?')} cores"),
        ("platform", str(environment.get("platform", "unknown"))),
        *((f"{name} devices", ", ".join(map(str, found))) for name, found in devices.items()),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("precision", ", ".join(f"{name} {value}" for name, value in precision.items())),
    ]
    return tuple(pairs)


# Where the figures come from: every run, its machine, and the parts of the report that show it.


FIRST_PAGE = "Overview"
RUNS = ("records", "number", "date", "commit", "command", "machine", "code", "working tree", "shown in")


def environment(
    records: Records, answers: Sequence[Answer], sections: Iterable[Section], made_on: Sequence[Pairs]
) -> Section | None:
    """Return the section on all runs and machines; None without records.

    Args:
        records: all of them.
        answers: of the first screen.
        sections: the others.
        made_on: the distinct environments of the records.
    """
    shown_in: dict[Source, list[str]] = {}
    for title, parts in (*((FIRST_PAGE, answer.sources) for answer in answers),
                         *((section.title, section.sources) for section in sections)):  # fmt: skip
        for source in parts:
            titles = shown_in.setdefault(_run(source), [])
            titles += [title] if title not in titles else []
    rows = tuple(
        (kind, source.records, source.date or None, source.commit or None, source.command or None, number,
         "older" if source.older else "current", "unclean" if source.unclean else None,
         ", ".join(shown_in.get(_run(source), ())) or "replaced by a newer run")
        for kind, found in records.by_kind.items()
        for number, made in enumerate((*made_on, ()), 1)
        for source in sources(r for r in found if environments([r]) == ((made,) if made else ()))
    )  # fmt: skip
    if not rows:
        return None
    runs = Table(
        "Every run behind this report",
        RUNS,
        rows,
        "Older: the code that the figures speak of has changed since, or the record does not say which it was. That "
        "code depends on the kind of record: benchmarks speak of the modes and of what measures them, verdicts and "
        "claims of what verifies. One command can write both kinds. A part of the report shows the newest record of "
        "each subject, so a later run can replace an earlier one, in whole or in part.",
    )
    return Section("provenance", "Where the figures come from", "environment", tables=(runs, *_machines(made_on)))


def _run(source: Source) -> Source:
    """Return a source without its count and its day, which differ where a part of its records is shown."""
    return replace(source, date="", records=0)


def _machines(made_on: Sequence[Pairs]) -> tuple[Table, ...]:
    if not made_on:
        return ()
    names = tuple(dict.fromkeys(name for made in made_on for name, _ in made))
    rows = tuple((number, *(dict(made).get(name) for name in names)) for number, made in enumerate(made_on, 1))
    note = "The number of a machine is that of the table above. Two rows may be one machine with other versions."
    return (Table("Machines, versions and precision flags", ("machine", *names), rows, note),)


# Findings in trainers and frameworks that people wrote down: one Markdown file each under `findings/`.


FOLDER = "findings"


def findings(reports: Path) -> Section | None:
    """Return the section of all findings under a reports folder; None where there is none."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((reports / FOLDER).glob("*.md"))]
    if not texts:
        return None
    heads = [text.lstrip().partition("\n") for text in texts]
    documents = tuple(Document(head.lstrip("# ").strip(), rest.strip()) for head, _, rest in heads)
    text = f"{len(documents)} findings, each with a script that shows it without the suite, its cause and a fix."
    return Section("findings", "Findings", "trainers", (text,), documents=documents)


# What was verified: the verdict on each loop, and the layers, losses and splits of its cases.


VERIFICATION_KEY, VERIFICATION_TITLE, VERIFICATION_TAB = "verified", "What was verified", "verification"
MOST_BARS = 14
NOT_RUN = (
    "Not run: no record has this loop with this dtype on this device. `gradcheck-suite verify LOOP --dtype DTYPE` "
    "makes one, with `--device cuda` on a machine with a GPU, or with `--ranks N` for a loop of several ranks.",
)


def newest_verdicts(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each loop in each dtype, on each device, with each optimizer and problem."""
    return latest(
        records, lambda d: (d.get("loop"), d.get("dtype"), d.get("device"), d.get("optimizer"), d.get("problem"))
    )


def verification(records: Sequence[Record]) -> Section:
    """Return the section on verified loops."""
    newest = newest_verdicts(records)
    if not newest:
        return Section(
            VERIFICATION_KEY,
            VERIFICATION_TITLE,
            VERIFICATION_TAB,
            missing="Nothing has been verified yet: run `gradcheck-suite verify`.",
        )
    datas = [record.data for record in newest]
    verdicts = Table(
        "Every loop and its verdict",
        (
            "loop",
            "verdict",
            "cases judged",
            "dtype",
            "device",
            "optimizer",
            "worst error / allowed",
            "diagnosis",
            "cases not judged, and why",
        ),
        tuple(_verdict_row(data) for data in datas),
        "The ratio is the largest difference from the float64 reference over what rounding allows, among cases "
        "that hold. A loop that is no built-in is a user's.",
    )
    tables, figures = [verdicts], []
    disagreements = [(str(d.get("loop", "?")), str(d.get("dtype", "")), each) for d in datas for each in found_by(d)]
    if disagreements:
        tables.append(Table("Where torch and JAX disagree, and no loop is to blame", ("loop", "dtype", "finding"),
                            tuple(disagreements)))  # fmt: skip
    reached, of = _reached(datas), _judged_text(datas)
    for category, title in (("splits", "Splits that the cases reached"), ("layers", "Layers"), ("losses", "Losses")):
        if counts := dict(reached.get(category, Counter()).most_common()):
            caption = f"{title} (cases, {of})"
            tables.append(Table(caption, ("what", "cases"), tuple(counts.items())))
            figures.append(_coverage(category, title, counts, of))
    text = (
        "Each loop trained random models on random splits. Every gradient that reached its optimizer was compared "
        "with the gradient of the whole window in one batch, computed in float64 by torch and by JAX.",
        *([f"{disagreement(datas)}, which is no loop's fault. A table below says where."] if disagreements else []),
    )
    return Section(
        VERIFICATION_KEY,
        VERIFICATION_TITLE,
        VERIFICATION_TAB,
        text,
        (matrix(newest),),
        tuple(figures),
        tables=tuple(tables),
        sources=sources(newest),
    )


def matrix(records: Sequence[Record], most: int | None = None) -> Matrix:
    """Return the verdicts as a matrix: loop x dtype and device, violated loops first, then the built-in modes.

    Args:
        records: the last of each setting.
        most: rows at most; the built-in modes are first then, and the caption says what is left out.
    """
    cells: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in records:
        data = record.data
        place = (str(data.get("dtype", "?")), str(data.get("device", "?")))
        # one setting with several optimizers or problems: its worst
        known = cells.setdefault(str(data.get("loop", "?")), {}).get(place)
        if known is None or (data["verdict"] != "holds", _ratio(data)) > (known["verdict"] != "holds", _ratio(known)):
            cells[str(data.get("loop", "?"))][place] = data
    places = sorted({place for row in cells.values() for place in row}, key=place_order)
    names = [_place_name(*place) for place in places]
    if "cuda" not in {device for _, device in places}:
        places.append(("", "cuda"))
        names.append(_place_name("any", "cuda"))
    holding = {loop: all(d["verdict"] == "holds" for d in row.values()) for loop, row in cells.items()}
    order = sorted(cells, key=lambda loop: (most is not None and loop not in MODES, holding[loop], loop not in MODES))
    counts = [
        {
            _judged(row[place])
            for loop in order[:most]
            if place in (row := cells[loop]) and row[place]["verdict"] == "holds"
        }
        for place in places
    ]
    counted = any(len(mine) > 1 for mine in counts)
    if not counted:
        names = [f"{name}{''.join(map(_cases, mine))}" for name, mine in zip(names, counts, strict=True)]
    rows = tuple(
        (loop, tuple(_verification_cell(cells[loop].get(place), counted) for place in places)) for loop in order[:most]
    )
    left = order[len(rows) :]
    bad = sum(not holding[loop] for loop in left)
    more = f"; {len(left)} more loops{f', {bad} violated' if bad else ''}" if left else ""
    caption = f"{'Cases, worst' if counted else 'Columns: dtype, device (cases). Cells: worst'} error / allowed{more}"
    empty = most is None and any(kind == "none" for _, cells in rows for kind, _ in cells)
    return Matrix(caption, "loop" if most is None else "mode", tuple(names), rows, NOT_RUN if empty else ())


def found_by(data: Mapping[str, Any]) -> list[str]:
    """Return where torch and JAX disagree, as a record has it."""
    return [str(each) for each in data.get("findings") or ()]


def disagreement(datas: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many gradients torch and JAX disagree, as a clause; empty if they agree."""
    count = len({each for data in datas for each in found_by(data)})
    return f"In {counted(count, 'gradient')} torch and JAX disagree" if count else ""


def share_text(ratio: float) -> str:
    """Return a share with two digits, or with as many as show that it is below 1."""
    texts = (f"{ratio:.{digits}g}" for digits in (2, 3, 4))
    return next((text for text in texts if ratio >= 1 or text != "1"), "almost 1")


def _cases(number: int) -> str:
    return f"\N{NO-BREAK SPACE}({number:,})"


def place_order(place: tuple[str, str]) -> tuple[bool, int, tuple[str, str]]:
    """Return what dtypes and devices are sorted by: the CPU first, then the dtypes as the suite lists them."""
    dtype, device = place
    return device != "cpu", DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), place


def _place_name(dtype: str, device: str) -> str:
    """Return a dtype and a device as the header of a column."""
    return f"{dtype} {device_name(device)}"


def _verification_cell(data: Mapping[str, Any] | None, counted: bool) -> tuple[str, tuple[str, ...]]:
    if data is None:
        return "none", ("not run",)  # NOT_RUN says why
    if data["verdict"] != "holds":
        violation = data.get("violation") or {}
        return "bad", ("violated", str(violation.get("diagnosis", "")))
    said = (f"{_judged(data):,}", share_text(_ratio(data))) if counted else (share_text(_ratio(data)),)
    return "good", (f"\N{CHECK MARK} {said[0]}", *said[1:])


def _ratio(data: Mapping[str, Any]) -> float:
    ratio = data.get("worst_error_over_allowed")
    return float(ratio) if ratio is not None else 0.0


def _judged(data: Mapping[str, Any]) -> int:
    return int(data.get("judged", data.get("cases", 0)))


def _judged_text(datas: Sequence[Mapping[str, Any]]) -> str:
    """Return of how many cases counts are; each row judges cases of its own, which may reach a layer each."""
    judged = [_judged(data) for data in datas]
    what = "loops" if len({data.get("loop") for data in datas}) == len(datas) else "verdicts"
    rows = (
        f"{judged[0]:,} cases for each of {len(judged)} {what}"
        if len(set(judged)) == 1
        else f"the sum over {len(judged)} {what}"
    )
    return f"of {sum(judged):,} judged: {rows}"


def _coverage(category: str, title: str, counts: Mapping[str, int], of: str) -> Figure:
    shown = dict(list(counts.items())[:MOST_BARS])
    rest = f"; {len(counts) - MOST_BARS} more in the table" if len(counts) > MOST_BARS else ""
    return Figure(
        f"coverage-{category}",
        counts_plot(shown, "cases"),
        f"{title}: number of cases with each, {of}; " + ", ".join(f"{k} {v:,}" for k, v in shown.items()),
        f"{title}: cases with each, {of}{rest}.",
    )


def _verdict_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        str(data.get("loop", "?")),
        str(data.get("verdict", "?")),
        _judged(data),
        str(data.get("dtype", "")),
        str(data.get("device", "")),
        data.get("optimizer"),
        data.get("worst_error_over_allowed"),
        title_of(data.get("violation")),
        "; ".join(f"{count}: {why}" for why, count in (data.get("skipped") or {}).items()) or None,
    )


def title_of(violation: Mapping[str, Any] | None) -> str | None:
    """Return the kind and diagnosis of a violation in a record."""
    return violation_title(str(violation["kind"]), str(violation["diagnosis"])) if violation else None


def _reached(datas: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for data in datas:
        for category, counts in (data.get("reached") or {}).items():
            found.setdefault(str(category), Counter()).update({str(k): int(v) for k, v in counts.items()})
    return found


# The scripts that were audited: the last verdict on each.


COLUMNS = ("script", "ranks", "verdict", "steps judged", "diagnosis", "at step", "loss", "what is wrong")


def audits(records: Sequence[Record]) -> Section | None:
    """Return the section on audited scripts; None where there is none."""
    newest = latest(records, run_of)
    if not newest:
        return None
    rows = tuple(_row(record.data) for record in newest)
    violated = sum(record.data["verdict"] == "violated" for record in newest)
    return Section(
        "audits",
        "Audited scripts",
        "verification",
        (
            f"`gradcheck-suite audit` ran {counted(len(rows), 'script')} unchanged and judged the optimizer "
            f"steps; {violated} violated. Those on several ranks ran under `torchrun`.",
        ),
        (_audits_matrix([record.data for record in newest]),),
        tables=(Table("Every script and its verdict", COLUMNS, rows),),
        sources=sources(newest),
    )


def run_of(data: Mapping[str, Any]) -> tuple[str, int]:
    """Return a script with its arguments, and the number of its ranks."""
    return " ".join([str(data["loop"]), *data.get("arguments", ())]), int(data.get("ranks") or 1)


def _audits_matrix(datas: Sequence[Mapping[str, Any]]) -> Matrix:
    """Return the verdict on each script by its number of ranks."""
    runs = {run_of(data): data for data in datas}
    scripts, ranks = dict.fromkeys(script for script, _ in runs), sorted({ranks for _, ranks in runs})
    return Matrix(
        "Verdict on each script: holds, or the diagnosis of the violation",
        "script",
        tuple(counted(n, "rank") for n in ranks),
        tuple((script, tuple(_audits_cell(runs.get((script, n))) for n in ranks)) for script in scripts),
    )


def _audits_cell(data: Mapping[str, Any] | None) -> tuple[str, tuple[str, ...]]:
    if data is None:
        return "none", ("not run",)
    tone = {"holds": "good", "violated": "bad"}.get(data["verdict"], "none")
    return tone, (str((data.get("violation") or {}).get("diagnosis", data["verdict"])),)


def _row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    violation = data.get("violation") or {}
    told = (violation.get(name) for name in ("step", "where", "explanation"))
    return (*run_of(data), str(data["verdict"]), data.get("windows"), title_of(data.get("violation")), *told)


# Which real architectures the bridge carries over to JAX, and how well torch and JAX agree there.


BRIDGE_KEY, BRIDGE_TITLE, BRIDGE_TAB = "bridge", "Your own model in JAX", "trust"
NARROW_SHOWN = 3


def bridge(records: Sequence[Record]) -> Section:
    """Return the table of architectures."""
    if not records:
        return Section(
            BRIDGE_KEY,
            BRIDGE_TITLE,
            BRIDGE_TAB,
            missing="No architecture has been carried over yet: run "
            "`pytest tests/bridge/test_architectures.py --full --bridge-records reports`, which needs transformers.",
        )
    current = latest(records, lambda d: (d["architecture"], d["version"], d["widened"]))
    refused = [record.data for record in current if "refused" in record.data]
    newest = [record.data for record in current if "refused" not in record.data]
    rows = _rows(newest, refused)
    agree = sum(data["gradient_error"] <= data["allowed"] for data in newest if not data["widened"])
    return Section(
        BRIDGE_KEY,
        BRIDGE_TITLE,
        BRIDGE_TAB,
        (
            "`verify --problem` asks JAX about your own model, too: torch exports the loss, the suite translates it to "
            f"JAX operation by operation, and JAX alone differentiates it. Tried on {len(rows)} architectures of "
            f"transformers and torch.nn, small, with random weights, in float64: {agree} gradients agree with torch's "
            f"within the bound, and {len(refused)} are refused by name.",
        ),
        figures=(_figure(newest),),
        tables=(
            Table(
                "Architectures",
                (
                    "architecture",
                    "version",
                    "operations",
                    "loss off by",
                    "gradient off by",
                    "bound",
                    "with float32 parts in float64",
                    "computed in float32 by the model",
                ),
                rows,
                "Gradients' differences are those of the worst entry, over the largest entry of all gradients. Where a "
                "model computes parts in float32 whatever its own dtype, the bound is two float32 roundoffs for each "
                "such operation, and the model is held to 1e-10 with these parts in float64.",
            ),
        ),
        sources=sources(current),
    )


def _rows(newest: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of the table: first the architectures that JAX computes, then those that are refused."""
    wide = {(d["architecture"], d["version"]): d for d in newest if d["widened"]}
    rows: list[tuple[Any, ...]] = []
    for data in (d for d in newest if not d["widened"]):
        other = wide.get((data["architecture"], data["version"]))
        narrow = data["narrow"]
        shown = ", ".join(narrow[:NARROW_SHOWN]) + (f" and {len(narrow) - NARROW_SHOWN} more" if narrow[3:] else "")
        rows.append(
            (
                data["architecture"],
                f"{data['package']} {data['version']}",
                data["operations"],
                data["loss_error"],
                data["gradient_error"],
                data["allowed"],
                None if other is None else other["gradient_error"],
                shown or None,
            )
        )
    for data in refused:
        nothing = (None,) * 5
        rows.append(
            (data["architecture"], f"{data['package']} {data['version']}", *nothing, f"refused: {data['refused']}")
        )
    return tuple(rows)


def _figure(datas: Sequence[Mapping[str, Any]]) -> Figure:
    rows = [
        {
            "name": f"{data['architecture']} {data['version']}",
            "error": float(data["gradient_error"]),
            "bound": float(data["allowed"]),
        }
        for data in datas
        if not data["widened"]
    ]
    return Figure(
        "architectures",
        against_bound_plot(rows, "difference of the gradients"),
        "Difference between torch's and JAX's gradient for each architecture, beside its bound: "
        + "; ".join(f"{row['name']} {row['error']:.1e} of {row['bound']:.0e}" for row in rows),
        "Points: difference between torch's and JAX's gradient. Ticks: the bound.",
    )


# Verdicts on real trainers, one column per question.


TRAINERS_KEY, TRAINERS_TITLE, TRAINERS_TAB = "trainers", "Real trainers", "trainers"


def trainers(records: Sequence[Record]) -> Section:
    """Return a table of trainers and questions, and one of transformers' models."""
    if not records:
        return Section(
            TRAINERS_KEY,
            TRAINERS_TITLE,
            TRAINERS_TAB,
            missing="No trainer has been asked yet: run `gradcheck-suite trainers`.",
        )
    current = latest(records, lambda d: (d["trainer"], d["version"], d["question"]))
    newest = [record.data for record in current]
    models = [data for data in newest if data["question"].startswith(MODEL)]
    answers: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for data in newest:
        if data not in models:
            answers.setdefault((data["trainer"], _version(data)), {})[data["question"]] = data
    violated = sum(any(_violation(data) for data in row.values()) for row in answers.values())
    ran = sum(any(data["result"] is not None for data in row.values()) for row in answers.values())
    text = (
        *_models_text(models),
        f"{ran} of {len(answers)} trainers and versions ran, unpatched, as they are installed; {violated} of them hand "
        "their optimizer a gradient that differs from the large batch's for some question.",
    )
    tables = (_questions(answers), _models(models)) if models else (_questions(answers),)
    return Section(
        TRAINERS_KEY,
        TRAINERS_TITLE,
        TRAINERS_TAB,
        text,
        (_trainers_matrix(answers),),
        tables=tables,
        sources=sources(current),
    )


def _questions(answers: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> Table:
    questions = list(dict.fromkeys(question for row in answers.values() for question in row))
    rows = tuple(
        (*name, *(_trainers_cell(row.get(question)) for question in questions)) for name, row in answers.items()
    )
    return Table(
        "Verdict of each trainer on each question",
        ("trainer", "version", *questions),
        rows,
        "A violated cell has the diagnosis and the smallest case: items of each micro-batch, windows separated by |, "
        "and K. A dash stands for a question that was not asked; the notes above say why. "
        "docs/found-in-trainers.md has the cause of each violation and a fix.",
    )


def _trainers_matrix(answers: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> Matrix:
    questions = list(dict.fromkeys(question for row in answers.values() for question in row))
    reasons: dict[str, str] = {}
    rows = []
    for (trainer, version), row in answers.items():
        cells: list[tuple[str, tuple[str, ...]]] = []
        for question in questions:
            if (data := row.get(question)) is None or data["result"] is None:
                why = _why_not_asked(trainer, question, data)
                cells.append(("none", (f"not asked ({reasons.setdefault(why, str(len(reasons) + 1))})",)))
            else:
                cells.append(_mark(data["result"]["violation"]))
        rows.append((f"{trainer}, {version}", tuple(cells)))
    return Matrix(
        "Verdict of each trainer on each question: holds, or the diagnosis of the violation",
        "trainer",
        tuple(questions),
        tuple(rows),
        tuple(f"Not asked ({mark}): {why}." for why, mark in reasons.items()),
    )


def _why_not_asked(trainer: str, question: str, data: Mapping[str, Any] | None) -> str:
    """Return why a trainer has no verdict on a question."""
    if data is not None and data.get("why"):
        return str(data["why"])
    known = TRAINERS.get(trainer)
    of = {q.name: q.asked_of for other in TRAINERS.values() for q in other.questions}.get(question)
    if known is None or of is None or question in (own := [q.name for q in known.questions]):
        return f"no record has it; `gradcheck-suite trainers {trainer}` asks"
    return f"this question is for {of}" if of else f"{trainer} is a variant for the question {', '.join(own)} alone"


def _mark(violation: Mapping[str, Any] | None) -> tuple[str, tuple[str, ...]]:
    return ("good", ("holds",)) if violation is None else ("bad", (str(violation["diagnosis"]),))


def _models(answers: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (data["question"].removeprefix(MODEL), _version(data), _trainers_cell(data), _explanation(data))
        for data in answers
    )
    return Table(
        "Models of transformers under its Trainer", ("model", "version", "verdict", "what its gradient is"), rows
    )


def _models_text(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each version: how many models hold, and how many get each wrong gradient."""
    versions: dict[str, list[Mapping[str, Any]]] = {}
    for data in models:
        if data["result"] is not None:
            versions.setdefault(_version(data), []).append(data)
    found = []
    for version, mine in versions.items():
        wrong = Counter(str(v["diagnosis"]) for data in mine if (v := _violation(data)) is not None)
        sentence = f"Of {len(mine)} models under the Trainer of {version}, {len(mine) - wrong.total()} hold"
        if wrong:
            kinds = ", ".join(f"{name} {count}" for name, count in wrong.most_common())
            sentence += f" and {wrong.total()} get a wrong gradient (diagnosis: {kinds})"
        found.append(f"{sentence}.")
    return found


def _violation(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    result = data["result"]
    return None if result is None else result["violation"]


def _explanation(data: Mapping[str, Any]) -> str | None:
    violation = _violation(data)
    return None if violation is None else str(violation["explanation"]).partition(": ")[0]


def _version(data: Mapping[str, Any]) -> str:
    return f"{data['package']} {data['version']}" if data["package"] else "own file"


def _trainers_cell(data: Mapping[str, Any] | None) -> Cell:
    if data is None or data["result"] is None:
        return None
    violation = data["result"]["violation"]
    return "holds" if violation is None else f"{violation['diagnosis']} {cut_text(violation['case']['plan'])}"
