"""The verdict on a live run, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gradcheck_suite.schema.results import ViolationKind, json_number, violation_to_json

MAX_ROWS = 64
"""Rows of a table of weights that are kept."""


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

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return {
            "micro_batch": self.micro_batch,
            "where": self.where,
            "count": json_number(self.count),
            "expected": json_number(self.expected),
            "observed": json_number(self.observed),
            "rank": self.rank,
        }


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

    def again(self, other: LiveViolation) -> LiveViolation:
        """Return the violation with one more occurrence, which may be the first whose size is known."""
        error = self.gradient_error if self.gradient_error is not None else other.gradient_error
        return replace(self, occurrences=self.occurrences + 1, gradient_error=error)

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
    second_opinion: str | None = None
    disagreements: tuple[str, ...] = ()
    unjudged: str | None = None
    interrupted: bool = False
    raised: str | None = None
    rank: int | None = None
    ranks: int = 1

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
