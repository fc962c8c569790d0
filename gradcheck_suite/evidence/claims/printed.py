"""Verifying the loops that the sources print: as they stand, and with what they rely on."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.evidence.claims.loops import PRINTED, PrintedLoop
from gradcheck_suite.generation.strategies import plans
from gradcheck_suite.records.description import describe_case
from gradcheck_suite.schema.results import Result, json_number
from gradcheck_suite.verification.verify import verify


@dataclass(frozen=True)
class PrintedResult:
    """What `verify` says of one printed loop.

    Attributes:
        printed: the loop.
        bare: verified with nothing assumed.
        within: verified within what it needs.
    """

    printed: PrintedLoop
    bare: Result
    within: Result

    @property
    def as_expected(self) -> bool:
        """Whether it holds within what it needs, and needs it."""
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
    return f"violated, found after {result.found_after} cases"


def verify_printed(printed: PrintedLoop, *, examples: int = 200) -> PrintedResult:
    """Verify one printed loop twice."""
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


def printed_loops() -> tuple[PrintedLoop, ...]:
    """Return the loops in the order of their sources."""
    return PRINTED
