"""Records as the report reads them, and what they say of the steps of each mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from scipy.stats import binomtest, false_discovery_control

from gradcheck_suite.core.records import KINDS, Record, read_records
from gradcheck_suite.core.text import counted
from gradcheck_suite.page.content import Matrix, Section, sources

# What every section of the report shares: the records, the newest of each subject, and the record of a section.


DEVICES = {"cpu": "CPU", "cuda": "GPU"}
"""Device -> what a reader calls it."""
Data = Mapping[str, Any]
"""The data of a record, or a part of them."""
Pairs = tuple[tuple[str, str], ...]
Made = TypeVar("Made")
Place = TypeVar("Place", bound=Hashable)
Content = TypeVar("Content")
Tone = tuple[str, tuple[str, ...]]
"""A cell of a matrix: its class and its lines."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record raises that lacks a field or has one of another type."""
FINDINGS = "findings"
"""The folder of what people wrote down about trainers and frameworks, one Markdown file each."""


def device_name(device: str) -> str:
    """Return what a reader calls a device."""
    return DEVICES.get(device, device)


def run_of(data: Data) -> tuple[str, int]:
    """Return an audited script with its arguments, and the number of its ranks."""
    return " ".join([str(data["loop"]), *data.get("arguments", ())]), int(data.get("ranks") or 1)


SUBJECTS: dict[str, tuple[str, ...] | Callable[[Data], Hashable] | None] = {
    "verify": ("loop", "dtype", "device", "optimizer", "problem"),
    "claim": None,
    "zoo": ("dtype",),
    "calibration": (),
    "trainer": ("trainer", "version", "question"),
    "bridge": ("architecture", "version", "widened"),
    "benchmark": None,
    "memory": None,
    "atlas": (),
    "zero-or-none": ("optimizer", "variant"),
    "traffic": ("loop", "ranks", "accumulation_steps"),
    "step": None,
    "audit": run_of,
    "public-script": ("key",),
}
"""Kind of record -> the fields that name its subject, of which the newest record counts; no field: the last record;
None: every record."""


def latest(records: Iterable[Record], subject: Sequence[str] | Callable[[Data], Hashable]) -> list[Record]:
    """Return the last record of each subject, in the order in which the subjects first appear.

    Args:
        records: oldest first.
        subject: the names of the fields that tell subjects apart, or a function of a record's data.
    """
    kept: dict[Hashable, Record] = {}
    for record in records:
        key = subject(record.data) if callable(subject) else tuple(record.data.get(name) for name in subject)
        kept[key] = record
    return list(kept.values())


@dataclass(frozen=True)
class Records:
    """All records of a reports folder, by kind, oldest first, and what could not be read.

    Attributes:
        by_kind: the records.
        problems: a line for each that could not be read.
        findings: the texts of the folder's findings, as records that no command made.
    """

    by_kind: Mapping[str, list[Record]]
    problems: tuple[str, ...]
    findings: tuple[Record, ...] = ()

    def of(self, kind: str) -> list[Record]:
        """Return a kind's records."""
        return list(self.findings) if kind == FINDINGS else self.by_kind.get(kind, [])

    def newest(self, kind: str) -> list[Record]:
        """Return the last record of each subject of a kind."""
        subject = SUBJECTS.get(kind)
        return self.of(kind) if subject is None else latest(self.of(kind), subject)


Facts = Mapping[str, str | float]
"""Subject -> what a record says of it: a word, or a measured number."""


@dataclass(frozen=True)
class Part:
    """A section of the report, and what `report --compare` reads of the same records.

    Attributes:
        key: its anchor.
        tab: the page that it stands on.
        title: its heading.
        kind: of the records that it shows.
        content: newest records -> the section without key, tab and title, and without sources where it shows all of
            them; None where they say nothing that it shows.
        facts: data of a newest record -> what it says; None where another section has the facts of the kind.
        missing: what the section says where there are no records; empty where it is left out.
    """

    key: str
    tab: str
    title: str
    kind: str
    content: Callable[[list[Record]], Section | None]
    facts: Callable[[Data], Facts] | None = None
    missing: str = ""

    def section(self, records: Records) -> Section | None:
        """Return the section; None where nothing was recorded and the report does not say so."""
        newest = records.newest(self.kind)
        found = self.content(newest) if newest else None
        if found is None:
            return Section(self.key, self.title, self.tab, missing=self.missing) if self.missing else None
        made_by = found.sources or (sources(newest) if self.kind in records.by_kind else ())
        # without a row a table knows no column
        tables = tuple(table for table in found.tables if table.columns)
        return replace(found, key=self.key, title=self.title, tab=self.tab, tables=tables, sources=made_by)


def read_all(reports: Path) -> Records:
    """Read every kind's records, and the findings."""
    found: dict[str, list[Record]] = {}
    problems: list[str] = []
    for kind in KINDS:
        found[kind], trouble = read_records(reports, kind)
        problems += trouble
    texts = (path.read_text(encoding="utf-8") for path in sorted((reports / FINDINGS).glob("*.md")))
    return Records(found, tuple(problems), tuple(Record(FINDINGS, {"text": text}) for text in texts))


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
    records = replace(records, by_kind=kept, problems=tuple(problems))
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


def current(records: Iterable[Record], measures: Sequence[str] = ()) -> list[Record]:
    """Return the measurements of each device that were made where its newest one was made.

    Times and bytes compare only within one machine and one set of versions, so older rows of another are left out.

    Args:
        records: oldest first.
        measures: what they measure; all of them without one.
    """
    records = [record for record in records if not measures or record.data.get("measures") in measures]
    newest = {record.data.get("device"): record for record in records}
    return [record for record in records if _made_where_made(record, newest[record.data.get("device")])]


def _made_where_made(record: Record, other: Record) -> bool:
    """Return whether two records come from one machine and one set of versions; a record may not say its device."""
    mine, others = record.environment, other.environment
    device = mine.get("device"), others.get("device")
    alike = all(mine.get(name) == others.get(name) for name in ("processor", "processor_count", "versions"))
    return alike and (device[0] == device[1] or None in device)


def by_device(rows: Iterable[Data]) -> dict[str, list[Data]]:
    """Return the rows of each device, in the order of the devices' names."""
    found: dict[str, list[Data]] = {}
    for row in rows:
        found.setdefault(str(row["device"]), []).append(row)
    return dict(sorted(found.items()))


def matrix_of(
    caption: str,
    corner: str,
    columns: Mapping[Place, str],
    cells: Mapping[str, Mapping[Place, Content]],
    cell: Callable[[Content | None], Tone],
    notes: Sequence[str] = (),
) -> Matrix:
    """Return a matrix with a row for each name and a column for each place.

    Args:
        caption: what a cell says.
        corner: the name of the rows.
        columns: place -> its header.
        cells: name of a row -> place -> what is known there.
        cell: what is known, or None -> class and lines.
        notes: under the matrix.
    """
    rows = tuple((name, tuple(cell(row.get(place)) for place in columns)) for name, row in cells.items())
    return Matrix(caption, corner, tuple(columns.values()), rows, tuple(notes))


def environments(records: Iterable[Record]) -> tuple[Pairs, ...]:
    """Return each distinct environment as pairs of a name and a value."""
    return tuple(dict.fromkeys(_pairs(record.environment) for record in records if record.environment))


def _pairs(environment: Data) -> Pairs:
    versions, devices, flags = (environment.get(name) or {} for name in ("versions", "devices", "precision"))
    return (
        ("processor", f"{environment.get('processor', 'unknown')}, {environment.get('processor_count', '?')} cores"),
        ("platform", str(environment.get("platform", "unknown"))),
        *((f"{name} devices", ", ".join(map(str, found))) for name, found in devices.items()),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("precision", ", ".join(f"{name} {value}" for name, value in flags.items())),
    )


# Whole steps under `zero_` and under `set_to_none`, from their records: which mode is faster where, in words.
#
# The claim about when zeroing may do (C1.8) and the report's section on steps both read this module, and so say the
# same.


LEVEL = 0.05
"""Expected share of wrong answers among the settings in which one mode is called faster (false discovery rate)."""
SETTING = ("device", "parameters", "items", "micro_batches")
MODES = {"none": "set_to_none", "zero": "zero_", "neither": "neither"}


@dataclass(frozen=True)
class StepTimes:
    """What was found over several settings.

    Attributes:
        faster: for each setting that was not disturbed, a key of `MODES`.
        rows: those settings.
        disturbed: settings that other load on the machine disturbed each time; they count for nothing.
    """

    faster: tuple[str, ...]
    rows: tuple[Data, ...]
    disturbed: tuple[Data, ...]

    def where(self, which: str) -> list[Data]:
        """Return the settings with this answer."""
        return [row for row, answer in zip(self.rows, self.faster, strict=True) if answer == which]


def pooled(rows: Sequence[Data]) -> list[Data]:
    """Return one row for each setting, from all runs that timed it.

    Pairs of one run share the places of their tensors in memory, and another run may find the opposite. `agree` says
    whether the majority of pairs is on the same side in every run. Times and savings are medians over the runs, the
    quartiles reach over those of all runs, and the pairs are added up. A disturbed run counts where there is no other.
    `each` has the rows of the runs.
    """
    settings: dict[tuple[Any, ...], list[Data]] = {}
    for row in rows:
        settings.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    found: list[Data] = []
    for mine in settings.values():
        runs = [row for row in mine if not row.get("disturbed")] or mine[-1:]
        bars = [row["saved_quartiles"] for row in runs if row.get("saved_quartiles")]
        found.append(
            {
                **runs[-1],
                **{name: median(row[name] for row in runs) for name in ("zero", "none", "saved")},
                **{name: sum(row[name] for row in runs) for name in ("faster", "pairs")},
                "saved_quartiles": (min(low for low, _ in bars), max(high for _, high in bars)) if bars else None,
                "runs": len(runs),
                "agree": len({2 * row["faster"] > row["pairs"] for row in runs}) == 1,
                "each": runs,
            }
        )
    return found


def step_times(rows: Sequence[Data]) -> StepTimes:
    """Answer for every setting which mode is faster.

    A sign test over the pairs of a setting gives its p-value. Since many settings are tested at once, the procedure of
    Benjamini and Hochberg (1995, J. R. Statist. Soc. B 57, 289-300) decides which of them are significant. In a setting
    that several runs timed, neither mode is faster unless they agree; see `pooled`.
    """
    kept = tuple(row for row in rows if not row.get("disturbed"))
    p_values = [binomtest(int(row["faster"]), int(row["pairs"])).pvalue if row["pairs"] else 1.0 for row in kept]
    adjusted = false_discovery_control(p_values) if kept else ()
    answers = (
        "neither"
        if p >= LEVEL or not row.get("agree", True)
        else "none"
        if 2 * row["faster"] > row["pairs"]
        else "zero"
        for row, p in zip(kept, adjusted, strict=True)
    )
    return StepTimes(tuple(answers), kept, tuple(row for row in rows if row.get("disturbed")))


def run_by_run(rows: Sequence[Data]) -> list[list[Data]]:
    """Return the rows of each run that `pooled` has put together; of a run that was not, the rows themselves."""
    runs = zip_longest(*(row.get("each", (row,)) for row in rows))
    return [[row for row in run if row is not None] for run in runs]


def summary(rows: Sequence[Data], device: str) -> str:
    """Return in how many settings each mode is faster, as a sentence or two.

    Args:
        rows: the settings of one device.
        device: what a reader calls the device, such as `"CPU"`.
    """
    found = step_times(rows)
    counts = {which: len(found.where(which)) for which in MODES}
    text = (
        f"On the {device}, of {len(found.rows)} settings releasing is faster in {counts['none']}, zeroing in "
        f"{counts['zero']}, neither in {counts['neither']} (sign test over pairs of steps in turn, corrected for the "
        f"number of settings, {LEVEL:.0%})."
    )
    runs = min((row.get("runs", 1) for row in found.rows), default=1)
    if runs > 1:
        text += f" Each setting was timed in {runs} runs or more, and one whose runs disagree counts as neither."
        each = [step_times(run) for run in run_by_run(rows)]
        counts_of = {which: ", ".join(str(len(run.where(which))) for run in each) for which in ("none", "zero")}
        text += f" Run by run, releasing is faster in {counts_of['none']} settings, zeroing in {counts_of['zero']}."
    best = max((row["saved"] / row["zero"] for row in found.where("none")), default=0.0)
    if best > 0:
        text += f" A release saves at most {best:.0%} of a step."
    if found.disturbed:
        text += f" {len(found.disturbed)} more settings were disturbed by other load and count for nothing."
    return text


def answer(rows: Sequence[Data]) -> dict[str, Any]:
    """Return what claim C1.8 says: verdict, sentence, condition, figures, counterexample; a device is judged by itself.

    The claim is confirmed where no setting is faster under a release, and refuted where all are.
    """
    devices = {device: [row for row in rows if row["device"] == device] for device in DEVICES}
    found = {device: step_times(mine) for device, mine in devices.items() if mine}
    figures = {
        f"{_setting(row)}: saved by releasing": (
            f"{1000 * row['saved']:+.3f} ms of {1000 * row['zero']:.3f} ({100 * row['saved'] / row['zero']:+.0f}%), "
            f"faster in {row['faster']} of {row['pairs']} pairs; {row['bytes_between'] / 2**20:.1f} MiB between steps"
        )
        for times in found.values()
        for row in times.rows
    }
    said = " ".join(summary(devices[device], DEVICES[device]) for device in found)
    verdict, faster, total = _verdict(rows)
    share = f"as in {total - len(faster)} of the {total} settings timed here"
    verdicts = Counter(_verdict(run)[0] for run in run_by_run(rows))
    if verdicts.total() > 1:
        times = ", ".join(f"{name} in {count}" for name, count in verdicts.most_common())
        said += f" Of {verdicts.total()} runs, each judged by itself, the claim is {times}."
    return {
        "verdict": verdict,
        "sentence": f"{said} Two things decide: the share of the gradients' traffic in a step, and the "
        "cost of memory that is given back and allocated again. A release saves the memory of all gradients "
        "between steps.",
        "figures": figures,
        "condition": f"memory between steps is no constraint, and releasing is not faster in the setting, {share}"
        if verdict == "conditional"
        else "",
        "counterexample": "; ".join(faster),
    }


def _verdict(rows: Sequence[Data]) -> tuple[str, list[str], int]:
    """Return the verdict on C1.8, the settings in which releasing is faster, and how many settings there are."""
    found = [step_times(mine) for mine in by_device(rows).values()]
    total = sum(len(times.rows) for times in found)
    faster = [_setting(row) for times in found for row in times.where("none")]
    mixed = not total or 0 < len(faster) < total
    return "conditional" if mixed else "refuted" if faster else "confirmed", faster, total


def _setting(row: Data) -> str:
    where = "" if row["device"] == "cpu" else f" on the {DEVICES[row['device']]}"
    return f"{row['parameters']:,} parameters, {counted(row['items'], 'item')}, K = {row['micro_batches']}{where}"
