"""Verify one loop and record the result: the same for the command line and for the pytest plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.generation.coverage import CaseCoverage, Coverage
from gradcheck_suite.records.verification import Counterexample, record_verification
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.options import VerifyOptions
from gradcheck_suite.schema.results import Result, Verdict


@dataclass(frozen=True)
class Subject:
    """A loop under test.

    Attributes:
        name: of the loop in the result.
        loop: the loop.
        problem: the user's problem that it trains; None for generated ones.
        problem_name: of that problem in the cases, None without one.
        importable: whether `name` is one that the command line takes, as a script must.
    """

    name: str
    loop: Loop
    problem: Problem | None = None
    problem_name: str | None = None
    importable: bool = True


@dataclass(frozen=True)
class Verified:
    """The result of one verification.

    Attributes:
        result: the verdict.
        reached: how many judged cases had each layer, loss and kind of split.
        unjudged: the most frequent reason where no case could be judged, else None.
    """

    result: Result
    reached: Coverage
    unjudged: str | None


def verify_subject(subject: Subject, options: VerifyOptions, progress: Callable[[Verdict], None]) -> Verified:
    """Verify a loop, and note what its cases reached.

    Args:
        subject: the loop.
        options: of the verification.
        progress: called with every verdict.
    """
    from gradcheck_suite.verification.verify import verify

    reach, reasons = CaseCoverage(), Counter[str]()

    def note(verdict: Verdict) -> None:
        if reason := verdict.skipped or verdict.finding:
            reasons[reason] += 1
        else:
            reach.note(verdict.case)
        progress(verdict)

    problem_name = subject.problem_name or "problem"
    result = verify(
        subject.loop, options, name=subject.name, problem=subject.problem, problem_name=problem_name, progress=note
    )
    unjudged = None
    if result.holds and not result.judged and not result.interrupted:
        ((reason, _),) = reasons.most_common(1) or [("none was drawn", 0)]
        unjudged = f"{result.loop}: none of {result.cases} cases could be judged: {reason}"
    return Verified(result, reach.to_json(), unjudged)


def record(
    subject: Subject, options: VerifyOptions, verified: Verified, reports: Path, environment: Mapping[str, Any]
) -> Counterexample | None:
    """Record a verification under a reports folder; return the files of its counterexample, None where it holds.

    Raises:
        UsageError: a file cannot be written.
    """
    violation = verified.result.violation
    # a script is one process
    has_script = subject.importable and not (violation and violation.case.plan.ranks)

    def script() -> str:
        from gradcheck_suite.report.scripts import script_text

        assert violation is not None
        # a weight probe that was checked beside the user's problem brings its own
        problem = None if violation.case.spec else subject.problem
        return script_text(subject.loop, subject.name, violation, problem=problem, time_limit_s=options.time_limit_s)

    def run_script(path: Path) -> str | None:
        from gradcheck_suite.report.scripts import unrepeatable

        assert violation is not None
        return unrepeatable(path, violation, options.time_limit_s)

    return record_verification(
        reports,
        verified.result,
        options,
        problem=subject.problem_name,
        reached=verified.reached,
        environment=environment,
        script=script if has_script else None,
        run_script=run_script,
    )
