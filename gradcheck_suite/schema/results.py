"""What a check comes to, as data: verdicts, violations, results, and their JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradcheck_suite.schema.case import SCHEMA, Case

if TYPE_CHECKING:
    from gradcheck_suite.numerics.comparison import Comparison

ViolationKind = Literal[
    "gradient", "step-count", "none-pattern", "non-finite", "parameters", "not-accumulable", "raised"
]


@dataclass(frozen=True)
class Violation:
    """The first place where a loop does not do what it should.

    Attributes:
        kind: what was violated.
        diagnosis: the fault's name, where it could be read, such as `mean-of-means`.
        explanation: what happened, in a sentence or two.
        case: where it happened.
        parameter: whose gradient.
        epoch: of the step, from 0.
        window: of the step, from 0 in its epoch.
        error: `|observed - expected|` of the worst element.
        allowed: what rounding allows there.
        details: lines for a reader: expected and observed values, a traceback.
        evidence: the gradient at that step beside the expected one, for violations that show in a gradient: of kinds
            `gradient`, `none-pattern` and `non-finite`. No part of the JSON, of the repr or of equality.
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
    evidence: Comparison | None = field(default=None, repr=False, compare=False)

    def to_json(self, found_after: int | None = None) -> dict[str, Any]:
        """Return the violation as JSON-ready data; NaN and infinities become strings."""
        return {
            "kind": self.kind,
            "diagnosis": self.diagnosis,
            "explanation": self.explanation,
            "parameter": self.parameter,
            "epoch": self.epoch,
            "window": self.window,
            "error": json_number(self.error),
            "allowed": json_number(self.allowed),
            "found_after": found_after,
            "case": self.case.to_json(),
        }


@dataclass(frozen=True)
class Verdict:
    """What one case says about a loop.

    Attributes:
        case: the case.
        violation: None where the loop holds.
        finding: something about the problem or about a framework, for which no loop is to blame.
        ratio: the largest error over allowed among all compared elements.
        skipped: why the case could not be judged here, such as an operation that torch lacks for the dtype.
    """

    case: Case
    violation: Violation | None = None
    finding: str | None = None
    ratio: float = 0.0
    skipped: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the loop handed its optimizer the right gradients."""
        return self.violation is None


@dataclass(frozen=True)
class Result:
    """What all the cases together say about a loop.

    Attributes:
        loop: the loop's name as the user gave it.
        cases: how many were drawn before the verdict stood.
        seconds: wall-clock.
        violation: the smallest one found, or None.
        found_after: how many cases it took to find the first.
        assumes: what the loop relies on.
        ratio: the largest error over allowed in cases that hold.
        findings: about problems and frameworks.
        skipped: why cases were not judged -> how many.
        interrupted: whether the run was stopped before its end.
        second_opinion: on a user's problem: what JAX had a say in, in a sentence.
        judged: how many of the cases say anything about the loop; where none does, nothing is known of it.
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

    @property
    def holds(self) -> bool:
        """Whether no violation was found."""
        return self.violation is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "loop": self.loop,
            "verdict": "holds" if self.holds else "violated",
            "cases": self.cases,
            "judged": self.judged,
            "seconds": round(self.seconds, 3),
            "assumes": list(self.assumes),
            "worst_error_over_allowed": json_number(self.ratio),
            "findings": list(self.findings),
            "second_opinion": self.second_opinion,
            "skipped": dict(self.skipped),
            "interrupted": self.interrupted,
            "violation": self.violation and self.violation.to_json(self.found_after),
        }


def results_to_json(results: list[Result], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the document that `verify --json` writes."""
    return {"schema": SCHEMA, "environment": environment, "results": [result.to_json() for result in results]}


def json_number(value: float | None) -> float | str | None:
    """Return the number, or a string for a NaN or an infinity, which JSON has no numbers for."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
