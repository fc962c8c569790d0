"""Verify the loops that the sources print, as they stand and under what they rely on."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.evidence.claims.loops import PrintedLoop
from gradcheck_suite.generation.plans import plans
from gradcheck_suite.records.description import describe_case
from gradcheck_suite.schema.results import Result, json_number
from gradcheck_suite.verification.verify import verify


@dataclass(frozen=True)
class PrintedResult:
    """The results of verifying one printed loop twice.

    Attributes:
        printed: the loop.
        bare: result without assumptions.
        within: result under what the loop relies on.
    """

    printed: PrintedLoop
    bare: Result
    within: Result

    @property
    def as_expected(self) -> bool:
        """Whether the loop holds under what it relies on, and is violated without."""
        return self.within.holds and not self.bare.holds

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready data for a record."""
        violation = self.bare.violation
        return {
            "loop": self.printed.number,
            "says": (self.printed.loop.__doc__ or "").strip(),
            "needs": self.printed.needs,
            "assumes": list(self.printed.assumes),
            "within": _outcome(self.within),
            "bare": _outcome(self.bare),
            "diagnosis": None if violation is None else f"{violation.kind}: {violation.diagnosis}",
            "why": None if violation is None else violation.explanation,
            "smallest": [] if violation is None else describe_case(violation.case),
            "error": None if violation is None else json_number(violation.error),
        }


def _outcome(result: Result) -> str:
    if result.holds:
        return f"holds over {result.cases} cases"
    return f"violated, found after {result.found_after} case{'s' * (result.found_after != 1)}"


def verify_printed(printed: PrintedLoop, *, examples: int = 200) -> PrintedResult:
    """Verify one printed loop without assumptions, and under what it relies on."""
    name = printed.number
    bare = verify(printed.loop, name=name, examples=examples)
    within = verify(
        printed.loop,
        name=name,
        examples=examples,
        assumes=printed.assumes,
        plan=plans(**printed.plan) if printed.plan else None,
    )
    return PrintedResult(printed, bare, within)
