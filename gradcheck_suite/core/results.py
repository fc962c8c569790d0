"""Verdicts, violations and results of `verify` and `audit`: their JSON, their words and their HTML."""

from __future__ import annotations

import html
import linecache
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from gradcheck_suite.core.case import SCHEMA, Case, case_from_json
from gradcheck_suite.core.causes import is_cause
from gradcheck_suite.core.contract import DECLARED
from gradcheck_suite.core.faults import FAULTS, FIX
from gradcheck_suite.core.findings import FINDINGS, Occurrence, finding
from gradcheck_suite.core.formats import Accepted, Judged, Notice, is_accepted, place_in
from gradcheck_suite.core.text import (
    aligned,
    cell_lines,
    counted,
    error_text,
    of_bound,
    percent,
    violation_title,
)
from gradcheck_suite.errors import UsageError, ViolationFound

if TYPE_CHECKING:
    from gradcheck_suite.core.comparison import Comparison


ViolationKind = Literal[
    "gradient",
    "step-count",
    "none-pattern",
    "non-finite",
    "parameters",
    "not-accumulable",
    "raised",
]
DifferenceKind = Literal["load", "forward", "gradient", "update", "state", "precision"]
"""What differs between a torch model and its port. `precision` is computed in a lower one, which is no fault."""
Command = Literal["verify", "audit", "port"]

# JSON: the fields of a dataclass under their names. `result.schema.json` describes it.


BOTH: tuple[Command, ...] = ("verify", "audit")
VERIFY = {"json": ("verify",)}
AUDIT = {"json": ("audit",)}
INTERNAL: dict[str, tuple[Command, ...]] = {"json": ()}
"""Metadata of a field: the commands in whose JSON it is; of one without any, both. `optional` has those that leave it
out where there is nothing to say."""

HEADLINE = 100
"""Characters of the longest sentence that stands in the first line of a violation."""
LONGEST_LINE = 80
"""Characters of a source line that are shown."""
T = TypeVar("T")


def json_number(value: float | None) -> float | str | None:
    """Return the number, or a string for a NaN or an infinity, which JSON has no numbers for."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def to_json(value: Any, command: Command) -> Any:
    """Return a result or a part of one as the JSON-ready data that a command writes."""
    if isinstance(value, float):
        return json_number(value)
    # a case writes itself: it leaves out fields that have their default, so that digests stay
    if isinstance(value, Case):
        return value.to_json()
    if is_dataclass(value):
        given = {
            part: getattr(value, part.name)
            for part in fields(value)
            if command in part.metadata.get("json", BOTH)
        }
        return {
            part.name: to_json(one, command)
            for part, one in given.items()
            if one or command not in part.metadata.get("optional", ())
        }
    if isinstance(value, Mapping):
        return {name: to_json(part, command) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(part, command) for part in value]
    return value


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return a result or a part of one that `to_json` wrote, also from a record, which has more
    beside it.

    Raises:
        TypeError, ValueError, UsageError: the data is something else.
    """
    given: dict[str, Any] = {}
    for part in fields(kind):  # type: ignore[arg-type]
        # what is missing has its default, so that a record of an earlier version can be read
        if (value := data.get(part.name)) is None:
            continue
        read = part.metadata.get("read")
        if read is not None:
            value = tuple(map(read, value)) if isinstance(value, list) else read(value)
        elif isinstance(value, list):
            value = tuple(value)
        # annotations are texts under `from __future__ import annotations`; JSON has no number for
        # NaN and infinities, and holds texts for them, which `float` reads
        elif str(part.type).startswith("float"):
            value = float(value)
        given[part.name] = value
    return kind(**given)


# What is written.


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What a step gave each item of a micro-batch.

    Attributes:
        micro_batches: index of the micro-batch, or indices of equal ones, such as `"3-7"`; None in
            an audit.
        micro_batch: in an audit, index of the backward pass in the window; else None.
        where: in an audit, `file:line` of the call of the loss; else None.
        count: what the mean over the micro-batch divides by, or its number of items.
        expected: the right weight of each of its items.
        observed: the weight that each of its items has.
        rank: that gets the micro-batch; None for one process.
    """

    micro_batches: str | None = field(default=None, metadata=VERIFY)
    micro_batch: int | None = field(default=None, metadata=AUDIT)
    where: str | None = field(default=None, metadata=AUDIT)
    count: float
    expected: float
    observed: float
    rank: int | None = None

    @property
    def place(self) -> str:
        """The micro-batch, or equal ones, as a table shows them."""
        return str(self.micro_batch) if self.micro_batches is None else self.micro_batches


def _weight_from_json(data: Mapping[str, Any]) -> Weight:
    return from_json(Weight, data)


@dataclass(frozen=True)
class Violation:
    """A violation of the loop contract: by a loop on a case, or at one optimizer step of an audited
    run. A difference of a port from its torch model is one, too (`port.result.PortFinding`).

    Attributes:
        kind: the part of the contract that is violated.
        diagnosis: the name of the fault, such as `mean-of-means`.
        explanation: one or two sentences: what is wrong and what to do.
        case: the case on which the loop violates the contract; None in an audit.
        parameter: name of the parameter with the largest error, or of one that shows it, or None.
        epoch: index of the epoch of the step, from 0, or None.
        window: index of the window in its epoch, from 0; in an audit that of the step; or None.
        rank: the rank whose gradient or run it is, from 0; None for a plan of one rank.
        error: largest `|observed - expected|` of an element, in the units of the gradient, or None;
            in an audit the largest relative error of a weight, or of a gradient's sum.
        allowed: the largest such error that rounding explains, or None.
        found_after: number of cases, or of steps, until it was found, or None.
        weights: what the step gave each item, by micro-batch; empty where the fault is not one of
            weights.
        step: in an audit, index of the step among all that were seen, from 0; None where none was
            about to come.
        where: in an audit, `file:line` of the line to change: of the call of the loss, or of what
            `change` names, else of what is nearest to the fault.
        change: in an audit, what is to be changed at `where`: a `reset`, an `edit`, a `division`,
            a `write`, a `checkpoint`; None for the loss.
        loss: in an audit, `file:line` of the call of the loss where `where` is another one; else
            None.
        backward: in an audit, `file:line` of the window's last call of backward, or None.
        stepped: in an audit, `file:line` of the call of the optimizer's step, or None.
        to_change: of `verify`, `file:line` of the line that must change, where it is known, or None.
        gradient_error: in an audit, 2-norm of the gradient's error over that of the gradient, where
            the window was computed again.
        occurrences: in an audit, number of steps with this diagnosis.
        details: further lines for a reader: expected and observed values, a traceback.
        evidence: observed and expected gradient of the step with the bound of each element, for the
            kinds `gradient`, `none-pattern` and `non-finite`; None for others.
        moved: whether the gradient is that of other parameters than the initial ones.
        refutes_weights: of `verify`, whether the case itself rules out names of weights.
        described: the case in words, which need the layers' definitions; filled in by `verify`.
        source: the user's lines, as `core.counterexamples` writes them, or None.
        command: that found it.
        reason: why the project accepts it, as `accept` in `pyproject.toml` says; None where it does
            not.

    `to_change`, `details`, `evidence`, `moved`, `described`, `source` and `command` are no part of
    the JSON.
    """

    kind: ViolationKind | DifferenceKind
    diagnosis: str
    explanation: str
    # an audit has none, which the type leaves out: whoever verifies would ask for it at every use
    case: Case = field(default=cast("Case", None), metadata={"read": case_from_json})
    parameter: str | None = None
    epoch: int | None = None
    window: int | None = None
    error: float | None = None
    allowed: float | None = None
    details: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    weights: tuple[Weight, ...] = field(default=(), metadata={"read": _weight_from_json})
    evidence: Comparison | None = field(default=None, repr=False, compare=False, metadata=INTERNAL)
    rank: int | None = field(default=None, metadata=VERIFY)
    found_after: int | None = None
    step: int | None = field(default=None, metadata=AUDIT)
    where: str | None = field(default=None, metadata=AUDIT)
    change: str | None = field(default=None, metadata=AUDIT)
    loss: str | None = field(default=None, metadata=AUDIT)
    backward: str | None = field(default=None, metadata=AUDIT)
    stepped: str | None = field(default=None, metadata=AUDIT)
    to_change: str | None = field(default=None, metadata=INTERNAL)
    gradient_error: float | None = field(default=None, metadata=AUDIT)
    occurrences: int = field(default=1, metadata=AUDIT)
    moved: bool = field(default=False, metadata=INTERNAL)
    refutes_weights: bool = field(default=False, repr=False, compare=False, metadata=INTERNAL)
    described: tuple[str, ...] = field(default=(), repr=False, compare=False, metadata=INTERNAL)
    source: Mapping[str, Any] | None = field(
        default=None, repr=False, compare=False, metadata=INTERNAL
    )
    command: Command = field(default="verify", repr=False, metadata=INTERNAL)
    reason: str | None = field(default=None, metadata={"optional": BOTH})

    @property
    def title(self) -> str:
        """Kind and diagnosis, and the steps of an audit that show it."""
        at = "" if self.step is None else f" at step {self.step}"
        more = f" and {self.occurrences - 1} more" if self.occurrences > 1 else ""
        return f"{violation_title(self.kind, self.diagnosis)}{at}{more}"

    @property
    def places(self) -> dict[str, str | None]:
        """What an audited script does where, the line to change first: the loss, its backward, the
        step; `file:line`.
        """
        others = {"backward": self.backward, "step": self.stepped}
        if self.change is None:
            return {"loss": self.where, **others}
        return {self.change: self.where, "loss": self.loss, **others}

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Where it is and how large, as pairs of a name and a text."""
        window = error = None
        # the step of an audit stands in the title; its errors are those of weights, which the
        # explanation has
        if self.command == "verify" and self.window is not None:
            members = self.case.plan.windows[self.window]
            window = f"{self.window} of epoch {self.epoch}: micro-batches {list(members)}"
        if self.command == "verify" and self.error is not None and self.allowed is not None:
            error = error_text(self.error, self.allowed)
        pairs = [
            *self.places.items(),
            ("window", window),
            ("rank", None if self.rank is None else str(self.rank)),
            ("parameter", self.parameter),
            ("error", error),
            (
                "gradient",
                None if self.gradient_error is None else f"off by {percent(self.gradient_error)}",
            ),
        ]
        return [(name, text) for name, text in pairs if text is not None]

    @property
    def sentence(self) -> str:
        """The explanation without what to do."""
        return self.explanation.partition(FIX)[0]

    @property
    def fix(self) -> str:
        """What to do; empty where nothing is known to help."""
        return self.explanation.partition(FIX)[2]

    @property
    def line(self) -> str | None:
        """The first place that is known, a file and a line.

        Of several the user's own file, not the library's.
        """
        if self.to_change is not None:
            return self.to_change
        known = [place for place in self.places.values() if place]
        # that of an audit's fault of steps is the first one already
        if self.command == "verify" and self.kind in ("step-count", "parameters"):
            known.reverse()
        # a place in a library is followed by the user's line that calls it
        return known[0].rpartition(" < ")[2] if known else None

    @property
    def place(self) -> str | None:
        """Where it is: the line, or the module of a port."""
        return self.line

    @property
    def notice(self) -> Notice:
        """The violation as CI systems show it."""
        # CI must not fail on a fault that the project accepts
        level: Literal["error", "note"] = "error" if self.reason is None else "note"
        return Notice(
            level,
            self.diagnosis,
            self.sentence,
            self.fix,
            self.line,
            self.reason,
        )

    @property
    def of_no_step(self) -> Violation:
        """The violation as one of micro-batches that no step came to."""
        return replace(
            self,
            window=None,
            found_after=None,
            step=None,
            stepped=None,
        )

    @property
    def anywhere(self) -> str:
        """Every place that it names, joined by ` < `."""
        return " < ".join(filter(None, self.places.values()))

    def is_accepted_by(self, accepted: str) -> bool:
        """Return whether `NAME`, `NAME@FILE` or `NAME@FILE:LINE` accepts the violation.

        Each file that it names will do; of lines, its own and that of the loss.
        """
        return is_accepted(
            accepted,
            self.diagnosis,
            " < ".join(filter(None, (self.where, self.loss, self.line))),
            beside=self.anywhere,
        )

    def accepted_by(self, entries: Iterable[Accepted]) -> list[Accepted]:
        """Return the entries that accept the violation."""
        return [one for one in entries if self.is_accepted_by(str(one))]

    @property
    def headline(self) -> str:
        """What is wrong in one line: the sentence where it is short, else what every fault of this
        name does.
        """
        known = [FAULTS[name].meaning for name in self.diagnosis.split(" or ") if name in FAULTS]
        return self.sentence if len(self.sentence) <= HEADLINE or not known else "; or ".join(known)

    @property
    def words(self) -> list[str]:
        """The violation in words, one line each, as compilers write them: the place first, what to
        do last.
        """
        headline = self.headline
        numbers = [
            (name, text) for name, text in self.facts if name not in (*self.places, "gradient")
        ]
        return [
            (
                f"{self.line}: {self.diagnosis}: {headline}"
                if self.line
                else f"{self.diagnosis}: {headline}"
            ),
            *self._source_lines,
            *([] if headline == self.sentence else [self.sentence]),
            *aligned(numbers),
            *self.shown_details,
            *([f"fix: {self.fix}"] if self.fix else []),
            *self.described,
        ]

    @property
    def _source_lines(self) -> list[str]:
        """The lines that compute the loss, send it backward and step, with what happened at each."""
        own = (self.line or "").rpartition(":")[0]
        rows = [_source_row(place, own, said) for place, said in self._notes_on_places().items()]
        # numbers alone are lines of one file, which a reader expects in the file's order
        if all(row.label.isdigit() for row in rows):
            rows.sort(key=lambda row: int(row.label))
        # the lines keep their indentation as seen from the leftmost one
        indents = (len(row.text) - len(row.text.lstrip()) for row in rows if row.text)
        indent = min(indents, default=0)
        rows = [replace(row, text=_cut_line(row.text[indent:])) for row in rows]
        labels = max((len(row.label) for row in rows), default=0)
        texts = max((len(row.text) for row in rows), default=0)
        return [
            f"  {row.label:>{labels}} | {row.text:<{texts}}   {row.said}".rstrip() for row in rows
        ]

    def _notes_on_places(self) -> dict[str, list[str]]:
        """Return what happened at each place, `FILE:LINE`."""
        happened = {"step": self._said_of_step}
        if not self.backward and not self.stepped:
            happened["loss"] = ""  # the one place is that of the fault, whatever is done there
        notes: dict[str, list[str]] = {}
        for name, places in self.places.items():
            if places:
                for place in places.split(" < "):
                    notes.setdefault(place, []).append(happened.get(name, name))
        if self.to_change is not None:
            notes.setdefault(self.to_change, ["to change"])
        return notes

    @property
    def _said_of_step(self) -> str:
        text = "step" if self.step is None else f"step {self.step}"
        if self.occurrences > 1:
            text += f" and {self.occurrences - 1} more"
        if self.gradient_error is not None:
            text += f": gradient off by {percent(self.gradient_error)}"
        return text

    @property
    def shown_details(self) -> list[str]:
        """The details and the table of weights, one line each."""
        return [*self.details, *weight_lines(self.weights)]

    def to_json(self) -> dict[str, Any]:
        """Return the violation as JSON-ready data; NaN and infinities become strings."""
        data: dict[str, Any] = to_json(self, self.command)
        return data


@dataclass(frozen=True)
class _SourceRow:
    """A line of a user's file: its number or place, its text and what happened there."""

    label: str
    text: str
    said: str


def _source_row(place: str, own: str, said: Iterable[str]) -> _SourceRow:
    """Return the row of a place, which has its number alone where it is in the file `own`."""
    file, _, line = place.rpartition(":")
    # a notebook may have edited it since, or gone to another folder
    linecache.checkcache(file)
    text = _line_of(file, int(line)) if line.isdigit() else ""
    return _SourceRow(line if file == own else place, text, ", ".join(said))


def _line_of(file: str, number: int) -> str:
    """Return a line of a file or of a notebook's cell, empty where it is not known."""
    cell = () if (line := linecache.getline(file, number)) else cell_lines(file)
    return (cell[number - 1] if number <= len(cell) else line).rstrip()


def _cut_line(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def violation_from_json(data: Mapping[str, Any]) -> Violation:
    """Return a violation from its JSON."""
    # only `verify` draws cases
    return from_json(Violation, {**data, "command": "verify" if data.get("case") else "audit"})


@dataclass(frozen=True)
class Verdict:
    """The verdict of one case on a loop.

    Attributes:
        case: the case.
        violation: the violation, or None if the loop holds.
        finding: a finding about the problem or a framework, for which no loop is to blame, or None.
        ratio: largest ratio of error to allowed error among all compared elements.
        skipped: why the case could not be judged, such as an operation that torch lacks for the
            dtype, or None.
        windows: number of optimizer steps whose gradient was judged.
        windows_skipped: reason why gradients of steps were not judged -> number of such steps.
        moved_by_zeros: a sentence about a parameter that its window does not reach, and that a
            gradient of zeros let the optimizer move; None where there is none.
        runs: how often the loop was run, the runs that named a fault included.
    """

    case: Case
    violation: Violation | None = None
    finding: str | None = None
    ratio: float = 0.0
    skipped: str | None = None
    windows: int = 0
    windows_skipped: dict[str, int] = field(default_factory=dict)
    moved_by_zeros: str | None = None
    runs: int = 1

    @property
    def holds(self) -> bool:
        """Whether the case shows no violation."""
        return self.violation is None


@dataclass(frozen=True)
class Unknown:
    """A part of an audited run that could not be judged.

    Attributes:
        what: `weights`, or `sums and weights`.
        where: `file:line` of the call of backward, or of the step.
        reason: why.
        remedy: what to do, or None where nothing helps.
        steps: in how many steps.
        name: of the reason.
    """

    what: str
    where: str
    reason: str
    remedy: str | None = None
    steps: int = 1
    name: str = "unreadable-loss"

    @property
    def found(self) -> Occurrence:
        """It as a reason."""
        left = (
            "the weights of this loss are unknown"
            if self.what == "weights"
            else "neither sums nor weights were judged"
        )
        return finding(self.name, f"{self.reason}: {left}", self.where, self.remedy or "")

    def __str__(self) -> str:
        return str(self.found)


def _unknown(data: Mapping[str, Any]) -> Unknown:
    return from_json(Unknown, data)


def _occurrence_from_json(data: Mapping[str, Any]) -> Occurrence:
    return from_json(Occurrence, data)


OTHER_RANK = "other-rank"
"""The reason of a rank whose steps another rank judges."""


@dataclass(frozen=True)
class MovedByZeros:
    """Parameters that a window does not reach, and that a gradient of zeros let the optimizer move.

    It is no violation: the loop contract allows zeros.

    Attributes:
        cases: number of cases with such a parameter.
        explanation: a sentence about the first one.
    """

    cases: int
    explanation: str


def _notice_of(one: Occurrence) -> Notice:
    """Return a finding as CI systems show it."""
    times = f" ({one.steps} times)" if one.steps > 1 else ""
    level = "error" if one.fails else one.severity
    return Notice(
        level,
        one.name,
        f"{one.sentence}{times}",
        one.remedy,
        one.place,
        one.reason,
    )


def _moved_from_json(data: Mapping[str, Any]) -> MovedByZeros:
    return from_json(MovedByZeros, data)


@dataclass(frozen=True)
class Result:
    """The verdict on a loop that was verified on many cases, or on a run that was audited; that on
    a port is one, too (`port.result.PortResult`).

    Attributes:
        loop: the loop's or the script's name as the user gave it.
        cases: of `verify`, number of cases drawn.
        seconds: wall-clock seconds of the verification or the run.
        violations: of `verify` the one on the minimal case; of `audit` the first one of each
            diagnosis that is not accepted, in the order in which they were found.
        unjudged: why nothing could be judged, and what to do; None where something was.
        judged: of `verify`, number of cases that were judged; if it is 0, there is no verdict on
            the loop.
        runs: of `verify`, how often the loop was run.
        steps: of `audit`, number of steps seen.
        windows: number of optimizer steps that were judged.
        windows_skipped: reason why gradients of steps were not judged, of `verify` in cases that
            were, of `audit` where steps were only counted -> number of such steps.
        assumes: of `verify`, the assumptions of the loop.
        is_uncast: of `verify`, whether the cases had a dtype that autocast leaves alone.
        autocast: of `verify`, the dtype in which the loop may compute its losses under autocast, or
            None.
        worst_error_over_allowed: of `verify`, largest ratio of error to allowed error in cases that
            hold.
        again: of `audit`, how windows were computed again -> how many.
        findings: of `verify`, what problems and frameworks are to blame for, and no loop is; of
            `audit`, what could not be seen or judged, what is worth knowing, and where torch and
            JAX differ.
        named_findings: of `audit`, the findings with their names, places and remedies.
        unjudged_reason: of `audit`, the name of the reason why nothing could be judged.
        disagreements: those of an audit's findings in which torch and JAX differ. They are no part
            of the JSON.
        unknown: of `audit`, what could not be judged; the findings have it in words.
        second_opinion: a sentence about what JAX computed of a user's problem or run; None where it
            was not asked.
        skipped: of `verify`, reason why cases were not judged -> number of such cases.
        interrupted: whether the run was interrupted before its end.
        shrinking: of `verify`, how shrinking ended where it was not by itself, or None.
        traffic: of `verify`, what several ranks communicate in each window, of a loop that holds;
            None otherwise.
        moved_by_zeros: of `verify`, parameters that a gradient of zeros let the optimizer move;
            None where none is.
        accepted: the first violation of each diagnosis that the user accepts.
        raised: of `audit`, the exception that ended the run, or None.
        rank: of `audit`, that of the process, where there are several.
        ranks: of `audit`, number of ranks that were judged together.
        command: that made it.
        files: what was judged: the loop's lines, or the files of an audited run that are on the way
            to a backward or a step. They are no part of the JSON.
    """

    loop: str
    cases: int = field(default=0, metadata=VERIFY)
    seconds: float = 0.0
    violations: tuple[Violation, ...] = field(
        default=(), metadata={**AUDIT, "read": violation_from_json}
    )
    unjudged: str | None = field(default=None, metadata=AUDIT)
    judged: int = field(default=0, metadata=VERIFY)
    runs: int = field(default=0, metadata=VERIFY)
    steps: int = field(default=0, metadata=AUDIT)
    windows: int = 0
    windows_skipped: dict[str, int] = field(default_factory=dict)
    assumes: tuple[str, ...] = field(default=(), metadata=VERIFY)
    autocast: str | None = field(default=None, metadata=VERIFY)
    is_uncast: bool = field(default=False, metadata=INTERNAL)
    worst_error_over_allowed: float = field(default=0.0, metadata=VERIFY)
    again: dict[str, int] = field(default_factory=dict, metadata=AUDIT)
    # a port's are no sentences
    findings: tuple[Any, ...] = ()
    named_findings: tuple[Occurrence, ...] = field(
        default=(), metadata={**AUDIT, "read": _occurrence_from_json}
    )
    unjudged_reason: str | None = field(default=None, metadata=AUDIT)
    disagreements: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    unknown: tuple[Unknown, ...] = field(default=(), metadata={**AUDIT, "read": _unknown})
    second_opinion: str | None = None
    skipped: dict[str, int] = field(default_factory=dict, metadata=VERIFY)
    interrupted: bool = False
    shrinking: str | None = field(default=None, metadata=VERIFY)
    traffic: str | None = field(default=None, metadata={**VERIFY, "optional": ("verify",)})
    moved_by_zeros: MovedByZeros | None = field(
        default=None, metadata={**VERIFY, "read": _moved_from_json}
    )
    accepted: tuple[Violation, ...] = field(
        default=(), metadata={"optional": ("verify",), "read": violation_from_json}
    )
    raised: str | None = field(default=None, metadata=AUDIT)
    rank: int | None = field(default=None, metadata=AUDIT)
    ranks: int = field(default=1, metadata=AUDIT)
    command: Command = field(default="verify", metadata=INTERNAL)
    files: tuple[Judged, ...] = field(default=(), compare=False, metadata=INTERNAL)

    @property
    def violation(self) -> Violation | None:
        """The first violation that is not accepted."""
        return self.violations[0] if self.violations else None

    @property
    def verdict(self) -> str:
        """`"holds"`, `"violated"` or `"unjudged"`."""
        return "violated" if self.violations else "holds" if self.unjudged is None else "unjudged"

    @property
    def holds(self) -> bool:
        """Whether something was judged and no violation was found."""
        return self.verdict == "holds"

    @property
    def is_another_ranks(self) -> bool:
        """Whether another rank judges what this one recorded."""
        return self.rank is not None and self.unjudged_reason == OTHER_RANK

    @property
    def notices(self) -> list[Notice]:
        """What the result says, as CI systems show it."""
        # accepted faults are shown, as notes: a reader sees what is lived with
        faults = [
            replace(fault.notice, accepted=fault.reason or "--accept", level="note")
            for fault in self.accepted
        ]
        rule = self.unjudged_reason or "unjudged"
        found = [*(fault.notice for fault in self.violations), *faults, *self.finding_notices]
        is_unjudged = self.unjudged and not self.violations
        return [*found, Notice("error", rule, self.unjudged or "")] if is_unjudged else found

    @property
    def finding_notices(self) -> list[Notice]:
        """What it says beside faults, as CI systems show it."""
        named = [_notice_of(one) for one in self.named_findings]
        if named:
            return named
        places = [(place_in(text), text) for text in self.findings]
        return [
            Notice(
                "warning",
                "finding",
                text.removeprefix(f"{at}: "),
                place=at,
            )
            for at, text in places
        ]

    @property
    def lines(self) -> list[str]:
        """The verdict in words, one line each."""
        return result_lines(self)

    def accepting(self, entries: Iterable[Accepted]) -> Result:
        """Return the result with the faults that some entries accept, and why, apart from its
        violations, and its findings with why they are accepted.
        """
        accepted = list[Violation]()
        violations = list[Violation]()
        for fault in (*self.accepted, *self.violations):
            fits = fault.accepted_by(entries)
            # a fault that `--accept` has taken already stays accepted, whether an entry takes it
            # too
            is_kept = fault in self.violations and not fits
            (violations if is_kept else accepted).append(
                replace(fault, reason=fits[0].reason if fits else None)
            )
        findings = [_accepting(one, entries) for one in self.named_findings]
        return replace(
            self,
            accepted=tuple(accepted),
            violations=tuple(violations),
            named_findings=tuple(findings),
        )

    @property
    def failing(self) -> list[Occurrence]:
        """The findings and reasons that the user wants to fail."""
        return [one for one in self.named_findings if one.fails]

    def matching_nothing(self, declared: Iterable[str]) -> list[str]:
        """Return a line for each `NAME`, `NAME@FILE` or `NAME@FILE:LINE` that accepts nothing here.

        It says where a fault of that name is, if there is one elsewhere.
        """
        lines = []
        for one in declared:
            if any(fault.is_accepted_by(one) for fault in self.accepted) or any(
                is_accepted(one, found.name, found.where) for found in self.named_findings
            ):
                continue
            name = one.partition("@")[0]
            others = [fault.line for fault in self.violations if fault.diagnosis == name]
            elsewhere = f"; {name} is at {others[0]}" if others and others[0] else ""
            lines.append(f"--accept {one} matches nothing{elsewhere}")
        return lines

    @property
    def is_unjudged_accepted(self) -> bool:
        """Whether the user accepts why nothing could be judged."""
        return any(
            one.name == self.unjudged_reason and one.reason is not None
            for one in self.named_findings
        )

    def raise_for_violation(self) -> None:
        """Do nothing where something was judged and holds.

        Raises:
            ViolationFound: there is a violation, or a finding that is to fail; the message is the
                verdict in words.
            UsageError: nothing could be judged.
        """
        if self.violations or self.failing:
            raise ViolationFound(str(self))
        if self.unjudged is not None and not self.is_unjudged_accepted:
            raise UsageError(f"{self.lines[0]}: {self.unjudged}")

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        data: dict[str, Any] = to_json(self, self.command)
        derived = {
            "verdict": self.verdict,
            "violation": self.violation,
            "seconds": round(self.seconds, 3),
        }
        return {**data, **to_json(derived, self.command)}

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        return result_html(self)


def result_from_json(data: Mapping[str, Any]) -> Result:
    """Return a result from its JSON, or from a record of kind `verify`, `audit` or `trainer`."""
    # `verify` writes its one violation alone, `audit` a list of them
    first = data.get("violation")
    command = "verify" if "cases" in data else "audit"
    violations = data.get("violations") or ([first] if first else [])
    # that of `verify` does not say why
    unjudged = data.get("unjudged") or ("not known" if data.get("verdict") == "unjudged" else None)
    return from_json(
        Result, {**data, "violations": violations, "unjudged": unjudged, "command": command}
    )


def results_to_json(
    results: Sequence[Result], environment: dict[str, Any], stale: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the document that `verify`, `audit` and `port` write with `--json`.

    Args:
        results: of the command.
        environment: of the run.
        stale: a line for each accepted fault that was not found again.
    """
    more = {"no_longer_found": list(stale)} if stale else {}
    return {
        "schema": SCHEMA,
        "environment": environment,
        "results": [one.to_json() for one in results],
        **more,
    }


def notices_of(results: Sequence[Result], stale: Sequence[str] = ()) -> list[Notice]:
    """Return what results say, at the loop's or script's file where they know no place.

    Args:
        results: of a command.
        stale: a line for each accepted fault that was not found again.
    """
    notices = [
        Notice(
            "error",
            "no-longer-found",
            line,
            place="pyproject.toml",
        )
        for line in stale
    ]
    # each result's notices go before those of the results after it, since they are put in front
    for result in reversed(results):
        # an audited script is named by its file, a loop as `FILE.py:NAME`
        file = result.loop if result.loop.endswith(".py") else result.loop.rpartition(":")[0]
        anywhere = file if file.endswith(".py") else None
        named = (
            replace(one, text=f"{result.loop}: {one.text}", place=one.place or anywhere)
            for one in result.notices
        )
        notices = [*named, *notices]
    return notices


def _entries_of(one: Occurrence, entries: Iterable[Accepted]) -> list[Accepted]:
    """Return the entries that accept a finding."""
    return [entry for entry in entries if is_accepted(str(entry), one.name, one.where)]


def _accepting(one: Occurrence, entries: Iterable[Accepted]) -> Occurrence:
    """Return a finding with why an entry accepts it, where one does."""
    fits = _entries_of(one, entries)
    return replace(one, reason=fits[0].reason, fails=False) if fits else one


def _commands_of(diagnosis: str) -> set[str]:
    """Return the commands that can find a fault, one of several, a finding or a reason."""
    commands: set[str] = set()
    for name in diagnosis.split(" or "):
        if name in FAULTS:
            commands.update((FAULTS[name].command,) if FAULTS[name].command else BOTH)
        if name in FINDINGS:
            commands.add("audit")
        if is_cause(name):
            commands.add("port")
    return commands


def _used_entries(entries: Sequence[Accepted], results: Iterable[Result]) -> set[Accepted]:
    used: set[Accepted] = set()
    for result in results:
        for fault in result.accepted:
            used.update(fault.accepted_by(entries))
        for found in result.named_findings:
            used.update(_entries_of(found, entries))
    return used


def _has_judged(result: Result, entry: Accepted) -> bool:
    """Whether a result would have what an entry accepts, if that were still there."""
    # a run that did not get to the end has not shown that anything is gone
    if result.unjudged or result.interrupted or result.raised:
        return False
    # what `verify` cannot find is not gone where `verify` has judged the file, and vice versa
    if result.command not in _commands_of(entry.fault):
        return False
    spans = [span for file, span in result.files if file == entry.file]
    # an entry for a line is only stale where the lines that were judged include it
    return any(entry.line is None or span is None or entry.line in span for span in spans)


def no_longer_found(entries: Sequence[Accepted], results: Sequence[Result]) -> list[str]:
    """Return a line for each entry that accepts nothing, although its file was judged to the end."""
    used = _used_entries(entries, results)
    lines = []
    for entry in entries:
        if entry not in used and any(_has_judged(result, entry) for result in results):
            place = str(entry).partition("@")[2]
            lines.append(
                f"accept: {entry.fault} was not found again in {place}: remove the entry from"
                " pyproject.toml"
            )
    return lines


ENDLESS = "the loop was stopped there"
"""Ends the explanation of a wrong number of steps of a loop that would not end."""


def is_endless(violation: Violation) -> bool:
    """Return whether the loop did not end by itself, so that each further run of it takes as long
    as it is given.
    """
    return violation.diagnosis == "timed-out" or violation.explanation.endswith(ENDLESS)


# The table of expected and observed weights on a console, with bars.


WIDTH = 24
"""Characters of the longest bar."""
SHOWN_ROWS = 12
BARS = "weight (bar), expected (|)"
"""The title of the column with bars."""


def _weight_cells(weights: Sequence[Weight]) -> list[list[str]]:
    """Return the cells of a table of weights, its titles first; ranks only where there are some."""
    ranks = any(weight.rank is not None for weight in weights)
    rows = [["micro-batch", *(["rank"] if ranks else []), "count", "weight", "expected"]]
    for weight in weights:
        rank = [str(weight.rank)] if ranks else []
        numbers = (weight.count, weight.observed, weight.expected)
        rows.append([weight.place, *rank, *(f"{value:.6g}" for value in numbers)])
    return rows


def weight_lines(weights: Sequence[Weight]) -> list[str]:
    """Return the lines of a table of the weights of a window, `SHOWN_ROWS` at most.

    None where there are none.
    """
    if not weights:
        return []
    top = _largest_weight(weights)
    rows = _weight_cells(weights)[: SHOWN_ROWS + 1]
    bars = [BARS, *(_bar(w.expected, w.observed, top) for w in weights[:SHOWN_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, bar in zip(rows, bars, strict=True):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(["", *cells, bar]).rstrip())
    if len(weights) > SHOWN_ROWS:
        lines.append(f"  and {len(weights) - SHOWN_ROWS} more")
    return lines


def _largest_weight(weights: Iterable[Weight]) -> float:
    """Return the largest magnitude of a finite weight; 0 where there is none."""
    # a weight of an infinite or missing gradient has no bar
    values = [weight.expected for weight in weights] + [weight.observed for weight in weights]
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)


def _bar(expected: float, observed: float, top: float) -> str:
    """Return a bar as long as the observed weight, of `-` where it is negative, with a mark at the
    expected one.
    """
    if not top or not math.isfinite(expected) or not math.isfinite(observed):
        return ""
    bar = ("#" if observed > 0 else "-") * _bar_length(observed, top)
    mark = _bar_length(expected, top)
    return f"{bar[:mark]:<{mark}}|{bar[mark:]}"


def _bar_length(weight: float, top: float) -> int:
    # rounding must not decide between two lengths
    return math.floor(round(WIDTH * abs(weight) / top, 6) + 0.5)


# Results in words, which `print(result)` and the commands print.


def result_lines(result: Result, *, width: int = 0, shown: bool = False) -> list[str]:
    """Return a result in words: its line, and below it what it rests on, findings and violations.

    Args:
        result: the result.
        width: of the column of names, in characters.
        shown: whether violations were printed when they were found, and why nothing was judged is
            said elsewhere.
    """
    below = _below_loop(result) if result.command == "verify" else _below_run(result, shown=shown)
    return [_verdict_line(result, width), *(f"    {line}".rstrip() for line in below)]


def _verdict_line(result: Result, width: int) -> str:
    """Return the verdict in one line."""
    verdict = "VIOLATED" if result.violations else result.verdict
    if result.interrupted and result.holds:
        verdict = "no violation so far (interrupted)"
    if result.command == "audit":
        over = f" over {result.ranks} ranks" if result.ranks > 1 else ""
        accepted = f", {counted(len(result.accepted), 'fault')} accepted" if result.accepted else ""
        judged = f"{counted(result.windows, 'step')} judged of {result.steps}"
        # with a budget, most windows are only counted, and the number that was judged comes first
        for budget in result.windows_skipped:
            judged = f"judged {result.windows:,} of {result.steps:,} windows ({budget})"
        judged += f"{over}{accepted}"
        return f"{result.loop}  {verdict}  {judged}  {result.seconds:.1f} s"
    worst = (
        f"worst error {of_bound(result.worst_error_over_allowed)}"
        if result.holds and result.cases
        else ""
    )
    worst = f"{counted(len(result.accepted), 'fault')} accepted" if result.accepted else worst
    cases = counted(result.cases, "case")
    return f"{result.loop:<{width}}  {verdict:<8}  {cases:>9}  {result.seconds:6.1f} s  {worst}".rstrip()


def _below_run(result: Result, *, shown: bool) -> Iterator[str]:
    """Yield what an audit found."""
    for how, count in result.again.items():
        yield f"{counted(count, 'window')} computed again, {how}"
    for violation in result.violations:
        yield from [violation.title] if shown else violation.words
    yield from map(_accepted, result.accepted)
    if result.second_opinion:
        yield result.second_opinion
    yield from map(_finding_line, result.named_findings)
    if result.unjudged is not None and not shown:
        yield f"unjudged: {result.unjudged} [{result.unjudged_reason}]"


def _below_loop(result: Result) -> Iterator[str]:
    """Yield the assumptions of a loop, what was found beside its verdict, and its violation."""
    if drawn := [name for name in result.assumes if name not in DECLARED]:
        yield f"assumes {', '.join(drawn)}: nothing else was tried"
    yield from (
        f"assumes {name}: {meaning}" for name, meaning in DECLARED.items() if name in result.assumes
    )
    if result.autocast:
        uncast = (
            "; nothing of the cast was judged: it leaves float64 alone, so say --dtype float32"
            if result.is_uncast
            else ""
        )
        yield f"losses may be computed under torch.autocast in {result.autocast}{uncast}"
    if result.traffic:
        yield result.traffic
    if moved := result.moved_by_zeros:
        yield (
            f"in {counted(moved.cases, 'case')} zeros moved a parameter that None leaves:"
            f" {moved.explanation}"
        )
    yield from (result.second_opinion or "").splitlines()
    for said in result.findings:
        yield f"finding, for which no loop is to blame: {said}"
    yield from _below_skipped(result)
    for violation in result.violations:
        yield from [*violation.words, _how_found(result, violation)]
    for violation in result.accepted:
        yield f"{_accepted(violation)}; the search ended there"


def _below_skipped(result: Result) -> Iterator[str]:
    for reason, count in result.skipped.items():
        yield f"{counted(count, 'case')} could not be judged here: {' '.join(reason.split())}"
    steps = result.windows + sum(result.windows_skipped.values())
    for reason, count in result.windows_skipped.items():
        yield f"{count} of {steps} steps could not be judged: {reason}"


def _finding_line(one: Occurrence) -> str:
    """Return a finding or a reason in one line: its name last, as mypy has the code of an error."""
    if one.reason is not None:
        return f"accepted: {one} [{one.name}], {one.reason}"
    label = f"{one.kind}, which fails" if one.fails else one.kind
    return f"{label}: {one} [{one.name}]"


def _accepted(violation: Violation) -> str:
    why = (
        violation.explanation
        if violation.reason is None
        else f"{violation.sentence}; accepted: {violation.reason}"
    )
    return f"accepted: {violation.title.removeprefix(f'{violation.kind}: ')}, {why}"


def _how_found(result: Result, violation: Violation) -> str:
    first = "the weight probe"
    spec = violation.case.spec
    after = violation.found_after
    if spec is None:
        first = "the case that is tried first, two whole windows"
    # the weight probe is a `readout`; what has other layers and was found before any case is the
    # linear model
    elif after is None and spec.layer_kinds != ["readout"]:
        first = "a linear model"
    runs = f"; the loop was run {counted(result.runs, 'time')}"
    if after == 0:
        return f"found on {first}, then shown on this small case{runs}"
    if not result.cases:
        return f"found on {first}, before any case was drawn{runs}"
    if after is None:
        return f"found on {first}; none of {counted(result.cases, 'case')} drawn shows it{runs}"
    if result.shrinking:
        return f"found after {counted(after, 'case')}; {result.shrinking}{runs}"
    return f"found after {counted(after, 'case')}, then shrunk to this one{runs}"


# The same as HTML, for a notebook, which runs no script and has no style sheet of ours.


_GROUND = {"good": "#0a6b2d", "bad": "#a4161a", "warn": "#7a4d00"}
_CELL = "padding:0 .8em;text-align:right"
_OBSERVED = "left:0;top:.2em;height:.8em;width:{}%;background:#a8487f"
_MARK = "left:{}%;top:0;height:1.2em;border-left:2px solid currentColor"


def result_html(result: Result) -> str:
    """Return a verdict as HTML: its first line, each violation with its weights as bars, and all
    words, folded.
    """
    lines = result.lines
    # `differs` is the verdict on a port
    tone = {"holds": "good", "violated": "bad", "differs": "bad"}.get(result.verdict, "warn")
    style = f"background:{_GROUND[tone]};color:#fff;padding:.1em .5em;border-radius:.3em"
    parts = [f'<p><b style="{style}">{result.verdict}</b> <code>{html.escape(lines[0])}</code></p>']
    for violation in result.violations:
        parts.append(
            f"<p><b>{html.escape(violation.title)}</b>. {html.escape(violation.explanation)}</p>"
        )
        parts.append(f"<pre>{html.escape(chr(10).join(aligned(violation.facts)))}</pre>")
        parts.append(_weights_html(violation.weights))
    words = html.escape("\n".join(lines))
    return (
        f"<div>{''.join(parts)}<details><summary>in"
        f" words</summary><pre>{words}</pre></details></div>"
    )


def _bar_html(weight: float, top: float, style: str) -> str:
    if not math.isfinite(weight):
        return ""
    placed = style.format(round(100 * abs(weight) / top))
    return f'<div style="position:absolute;{placed}"></div>'


def _weights_html(weights: Sequence[Weight]) -> str:
    if not weights:
        return ""
    # with weights of 0 alone, every bar has no length, and nothing is divided by 0
    top = _largest_weight(weights) or 1.0
    titles, *rows = _weight_cells(weights)
    head = "".join(f'<th style="{_CELL}">{title}</th>' for title in [*titles, BARS])
    body = []
    for weight, row in zip(weights, rows, strict=True):
        bar = _bar_html(weight.observed, top, _OBSERVED) + _bar_html(weight.expected, top, _MARK)
        drawn = f'<td><div style="position:relative;width:16em;height:1.2em">{bar}</div></td>'
        cells = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row)
        body.append(f"<tr>{cells}{drawn}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"
