"""Verdicts, violations and results of a verification, and their JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradcheck_suite.core.case import SCHEMA, Case
from gradcheck_suite.core.text import live_lines, loop_lines, result_html, violation_title
from gradcheck_suite.errors import UsageError, ViolationFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradcheck_suite.core.comparison import Comparison


ViolationKind = Literal[
    "gradient", "step-count", "none-pattern", "non-finite", "parameters", "not-accumulable", "raised"
]


@dataclass(frozen=True)
class ItemWeight:
    """What a step gave each item of a micro-batch.

    Attributes:
        micro_batches: index of the micro-batch, or indices of equal ones, such as `"3-7"`.
        count: what the mean over the micro-batch divides by.
        expected: the right weight of each of its items.
        observed: the weight that the loop gave each of its items.
        rank: that gets the micro-batch; None for a plan of one rank.
    """

    micro_batches: str
    count: float
    expected: float
    observed: float
    rank: int | None = None

    @property
    def place(self) -> str:
        """The micro-batches, as a table shows them."""
        return self.micro_batches

    def to_json(self) -> dict[str, Any]:
        """Return the weight as JSON-ready data."""
        numbers = {"count": self.count, "expected": self.expected, "observed": self.observed}
        shown = {name: json_number(number) for name, number in numbers.items()}
        return {"micro_batches": self.micro_batches, "rank": self.rank, **shown}


@dataclass(frozen=True)
class Violation:
    """The first violation of the loop contract by a loop.

    Attributes:
        kind: the part of the contract that is violated.
        diagnosis: the name of the fault, such as `mean-of-means`.
        explanation: one or two sentences: what is wrong and what to do.
        case: the case on which the loop violates the contract.
        parameter: name of the parameter with the largest error, or None.
        epoch: index of the epoch of the step, from 0, or None.
        window: index of the window in its epoch, from 0, or None.
        error: largest `|observed - expected|` of an element, in the units of the gradient, or None.
        allowed: largest error of that element that rounding explains, or None.
        details: further lines for a reader: expected and observed values, a traceback.
        weights: what the step gave each item, by micro-batch; empty where the fault is not one of weights.
        evidence: observed and expected gradient of the step with the bound of each element, for the kinds `gradient`,
            `none-pattern` and `non-finite`; None for others. It is no part of the JSON, the repr or equality.
        moved: whether the gradient is that of other parameters than the initial ones. It is no part of the JSON.
        rank: the rank whose gradient or run it is, from 0; None for a plan of one rank.
        described: the violation and its case in words, which need the layers' definitions; filled in by `verify`. It is
            no part of the JSON, the repr or equality.
    """

    kind: ViolationKind
    diagnosis: str
    explanation: str
    case: Case
    parameter: str | None = None
    epoch: int | None = None
    window: int | None = None
    error: float | None = None
    allowed: float | None = None
    details: tuple[str, ...] = ()
    weights: tuple[ItemWeight, ...] = ()
    evidence: Comparison | None = field(default=None, repr=False, compare=False)
    rank: int | None = None
    moved: bool = False
    described: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """The violation in words, one line each."""
        return self.described or (violation_title(self.kind, self.diagnosis), self.explanation, *self.details)

    def to_json(self, found_after: int | None = None) -> dict[str, Any]:
        """Return the violation as JSON-ready data; NaN and infinities become strings."""
        place = {"epoch": self.epoch, "window": self.window, "rank": self.rank}
        weights = [weight.to_json() for weight in self.weights]
        return violation_to_json(self, **place, found_after=found_after, weights=weights, case=self.case.to_json())


@dataclass(frozen=True)
class Verdict:
    """The verdict of one case on a loop.

    Attributes:
        case: the case.
        violation: the violation, or None if the loop holds.
        finding: a finding about the problem or a framework, for which no loop is to blame, or None.
        ratio: largest ratio of error to allowed error among all compared elements.
        skipped: why the case could not be judged, such as an operation that torch lacks for the dtype, or None.
        windows: number of optimizer steps whose gradient was judged.
        windows_skipped: reason why gradients of steps were not judged -> number of such steps.
        moved_by_zeros: a sentence about a parameter that its window does not reach, and that a gradient of zeros let
            the optimizer move; None where there is none.
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


# What the results of `verify` and of `audit` share.


def _lines(result: Result | LiveResult) -> list[str]:
    return loop_lines(result) if isinstance(result, Result) else live_lines(result)


def _text(result: Result | LiveResult) -> str:
    """Return the verdict in words."""
    return "\n".join(_lines(result))


def _html(result: Result | LiveResult) -> str:
    """Return the verdict as a notebook shows it."""
    return result_html(_lines(result), result.verdict, result.violations)


def _raise_for_violation(result: Result | LiveResult) -> None:
    """Do nothing where something was judged and holds.

    Raises:
        ViolationFound: there is a violation; the message is the verdict in words.
        UsageError: nothing could be judged.
    """
    if result.violations:
        raise ViolationFound(_text(result))
    if result.unjudged is not None:
        raise UsageError(f"{_lines(result)[0]}: {result.unjudged}")


@dataclass(frozen=True)
class Result:
    """The result of verifying a loop on many cases.

    Attributes:
        loop: the loop's name as the user gave it.
        cases: number of cases drawn.
        seconds: wall-clock seconds of the verification.
        violation: the violation on the minimal case, or None.
        found_after: number of cases until the first violation, or None.
        assumes: the assumptions of the loop.
        autocast: the dtype in which the loop may compute its losses under autocast, or None.
        ratio: largest ratio of error to allowed error in cases that hold.
        findings: findings about problems and frameworks, for which no loop is to blame.
        skipped: reason why cases were not judged -> number of such cases.
        interrupted: whether the run was interrupted before its end.
        second_opinion: for a user's problem, a sentence about the windows that JAX computed; None otherwise.
        judged: number of cases that were judged; if it is 0, there is no verdict on the loop.
        windows: number of optimizer steps whose gradient was judged.
        windows_skipped: reason why gradients of steps were not judged, in cases that were -> number of such steps.
        traffic: what several ranks communicate in each window, of a loop that holds; None otherwise.
        moved_by_zeros: a sentence about the first parameter that a window does not reach, and that a gradient of zeros
            let the optimizer move; None where there is none. It is no violation: the loop contract allows zeros.
        moving_cases: number of cases with such a parameter.
        runs: how often the loop was run.
    """

    loop: str
    cases: int
    seconds: float
    violation: Violation | None = None
    found_after: int | None = None
    assumes: tuple[str, ...] = ()
    ratio: float = 0.0
    findings: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False
    second_opinion: str | None = None
    judged: int = 0
    autocast: str | None = None
    windows: int = 0
    windows_skipped: dict[str, int] = field(default_factory=dict)
    shrinking: str | None = None
    traffic: str | None = None
    moved_by_zeros: str | None = None
    moving_cases: int = 0
    runs: int = 0

    __str__ = _text
    _repr_html_ = _html
    raise_for_violation = _raise_for_violation

    @property
    def holds(self) -> bool:
        """Whether no violation was found."""
        return self.violation is None

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violation, if there is one."""
        return () if self.violation is None else (self.violation,)

    @property
    def unjudged(self) -> str | None:
        """Why no case could be judged; None where one was, or where the run was interrupted."""
        if self.judged or self.violation is not None or self.interrupted:
            return None
        reason = max(self.skipped, key=self.skipped.__getitem__, default=next(iter(self.findings), "none was drawn"))
        return f"none of {self.cases} cases could be judged: {reason}"

    @property
    def verdict(self) -> str:
        """`"holds"`, `"violated"` or `"unjudged"`."""
        return "violated" if self.violation is not None else "holds" if self.unjudged is None else "unjudged"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "loop": self.loop,
            "verdict": self.verdict,
            "cases": self.cases,
            "judged": self.judged,
            "runs": self.runs,
            "seconds": round(self.seconds, 3),
            "assumes": list(self.assumes),
            "autocast": self.autocast,
            "worst_error_over_allowed": json_number(self.ratio),
            "findings": list(self.findings),
            "second_opinion": self.second_opinion,
            "skipped": dict(self.skipped),
            "windows": self.windows,
            "windows_skipped": dict(self.windows_skipped),
            "interrupted": self.interrupted,
            "shrinking": self.shrinking,
            **({} if self.traffic is None else {"traffic": self.traffic}),
            "moved_by_zeros": self.moved_by_zeros and {"cases": self.moving_cases, "explanation": self.moved_by_zeros},
            "violation": self.violation and self.violation.to_json(self.found_after),
        }


ENDLESS = "the loop was stopped there"
"""Ends the explanation of a wrong number of steps of a loop that would not end."""


def is_endless(violation: Violation) -> bool:
    """Return whether the loop did not end by itself, so that each further run of it takes as long as it is given."""
    return violation.diagnosis == "timed-out" or violation.explanation.endswith(ENDLESS)


def results_to_json(results: Sequence[Result | LiveResult], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the document that `verify --json` and `audit --json` write."""
    return {"schema": SCHEMA, "environment": environment, "results": [result.to_json() for result in results]}


def violation_to_json(violation: Violation | LiveViolation, **place: Any) -> dict[str, Any]:
    """Return what the JSON of each violation has, and its place in the run."""
    return {
        "kind": violation.kind,
        "diagnosis": violation.diagnosis,
        "explanation": violation.explanation,
        "parameter": violation.parameter,
        "error": json_number(violation.error),
        "allowed": json_number(violation.allowed),
        **place,
    }


def json_number(value: float | None) -> float | str | None:
    """Return the number, or a string for a NaN or an infinity, which JSON has no numbers for."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


# The verdict on a live run, and its JSON.


@dataclass(frozen=True)
class WeightRow:
    """What one call of a loss gave each of its items in a window.

    Attributes:
        micro_batch: index of the backward pass in the window.
        where: `file:line` of the call.
        count: what the call's mean divides by, or its number of items.
        expected: the weight that each item should have.
        observed: the weight that each item has.
        rank: of the process, where there are several.
    """

    micro_batch: int
    where: str
    count: float
    expected: float
    observed: float
    rank: int | None = None

    @property
    def place(self) -> int:
        """The micro-batch, as a table shows it."""
        return self.micro_batch

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return {name: json_number(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class LiveViolation:
    """A violation of the promise at one optimizer step of a live run.

    Attributes:
        kind: the part of the promise that is violated.
        diagnosis: the name of the fault, such as `mean-of-means`.
        explanation: one or two sentences: what is wrong and what to do.
        step: index of the step among all that were seen, from 0, or None where none was about to come.
        where: `file:line` of the call of the loss, or of what is nearest to the fault.
        backward: `file:line` of the window's last call of backward, or None.
        stepped: `file:line` of the call of the optimizer's step, or None.
        parameter: name of a parameter that shows it, or None.
        error: relative size: the largest relative error of a weight, or of a gradient's sum.
        allowed: the largest relative error that rounding explains, or None.
        weights: what each call of the loss gave its items; empty where the weights are not what is wrong.
        gradient_error: 2-norm of the gradient's error over that of the gradient, where the window was computed again.
        occurrences: number of steps with this diagnosis.
    """

    kind: ViolationKind
    diagnosis: str
    explanation: str
    step: int | None = None
    where: str | None = None
    backward: str | None = None
    stepped: str | None = None
    parameter: str | None = None
    error: float | None = None
    allowed: float | None = None
    weights: tuple[WeightRow, ...] = ()
    gradient_error: float | None = None
    occurrences: int = 1

    @property
    def places(self) -> dict[str, str | None]:
        """Where the loss is computed, goes backward and is stepped on: `file:line`."""
        return {"loss": self.where, "backward": self.backward, "step": self.stepped}

    def to_json(self) -> dict[str, Any]:
        """Return the violation as JSON-ready data: the fields of `verify`, and those of a live run."""
        found_after = None if self.step is None else self.step + 1
        return {
            **violation_to_json(self, epoch=None, window=self.step, found_after=found_after, case=None),
            "step": self.step,
            "where": self.where,
            "backward": self.backward,
            "stepped": self.stepped,
            "weights": [row.to_json() for row in self.weights],
            "gradient_error": json_number(self.gradient_error),
            "occurrences": self.occurrences,
        }


@dataclass(frozen=True)
class Unknown:
    """A part of a live run that could not be judged.

    Attributes:
        what: `weights`, or `sums and weights`.
        where: `file:line` of the call of backward, or of the step.
        reason: why.
        remedy: what to do, or None where nothing helps.
    """

    what: str
    where: str
    reason: str
    remedy: str | None = None

    def __str__(self) -> str:
        left = (
            "the weights of this loss are unknown" if self.what == "weights" else "neither sums nor weights were judged"
        )
        return f"{self.where}: {self.reason}: {left}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class LiveResult:
    """The verdict on a live run.

    Attributes:
        script: as the user named it.
        windows: number of steps judged.
        steps: number of steps seen.
        seconds: wall-clock seconds of the run.
        violations: the first violation of each diagnosis that is not accepted, in the order in which they were found.
        accepted: likewise of the diagnoses that the user accepts.
        again: how windows were computed again -> how many.
        findings: what could not be seen or judged, and what is worth knowing.
        unknown: what could not be judged -> in how many steps; the findings have it in words.
        second_opinion: a sentence about the calls that JAX computed, where it was asked.
        disagreements: gradients in which torch and JAX differ, one sentence for each call.
        unjudged: why nothing could be judged, and what to do; None where something was.
        interrupted: whether Ctrl-C ended the run.
        raised: the exception that ended the run, or None.
        rank: of the process, where there are several.
        ranks: number of ranks that were judged together.
    """

    script: str
    windows: int
    steps: int
    seconds: float
    violations: tuple[LiveViolation, ...] = ()
    accepted: tuple[LiveViolation, ...] = ()
    again: dict[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    unknown: dict[Unknown, int] = field(default_factory=dict)
    second_opinion: str | None = None
    disagreements: tuple[str, ...] = ()
    unjudged: str | None = None
    interrupted: bool = False
    raised: str | None = None
    rank: int | None = None
    ranks: int = 1

    __str__ = _text
    _repr_html_ = _html
    raise_for_violation = _raise_for_violation

    @property
    def is_another_ranks(self) -> bool:
        """Whether another rank judges what this one recorded."""
        return self.rank is not None and (self.unjudged or "").startswith("rank ")

    @property
    def violation(self) -> LiveViolation | None:
        """The first violation that is not accepted."""
        return self.violations[0] if self.violations else None

    @property
    def verdict(self) -> str:
        """`"holds"`, `"violated"` or `"unjudged"`."""
        if self.violations:
            return "violated"
        return "unjudged" if self.unjudged is not None else "holds"

    @property
    def holds(self) -> bool:
        """Whether something was judged and no violation was found."""
        return self.verdict == "holds"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "loop": self.script,
            "verdict": self.verdict,
            "windows": self.windows,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "again": dict(self.again),
            "findings": [*self.findings, *self.disagreements],
            "unknown": [{**asdict(part), "steps": steps} for part, steps in self.unknown.items()],
            "second_opinion": self.second_opinion,
            "unjudged": self.unjudged,
            "accepted": [violation.to_json() for violation in self.accepted],
            "interrupted": self.interrupted,
            "raised": self.raised,
            "rank": self.rank,
            "ranks": self.ranks,
            "violation": self.violation and self.violation.to_json(),
            "violations": [violation.to_json() for violation in self.violations],
        }
