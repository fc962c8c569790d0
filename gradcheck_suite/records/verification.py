"""Record one verification: a line for the report, and for a violation its case and its script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.records.counterexamples import store_counterexample
from gradcheck_suite.records.files import write_text
from gradcheck_suite.records.store import append_record
from gradcheck_suite.schema.options import VerifyOptions
from gradcheck_suite.schema.results import Result


@dataclass(frozen=True)
class Counterexample:
    """The files of one stored violation.

    Attributes:
        case: the JSON file that `gradcheck-suite replay` takes.
        script: the stand-alone script, None where none was written.
    """

    case: Path
    script: Path | None


def record_verification(
    reports: Path,
    result: Result,
    options: VerifyOptions,
    *,
    problem: str | None,
    reached: Mapping[str, Mapping[str, int]],
    environment: Mapping[str, Any],
    script: Callable[[], str] | None,
) -> Counterexample | None:
    """Append the record of one verification, and store the counterexample of a violation.

    Args:
        reports: the folder of records and counterexamples.
        result: of the verification.
        options: that it ran with.
        problem: the name of the user's problem; None for generated ones.
        reached: how many judged cases had each layer, loss and kind of split.
        environment: of the run, as `environment.environment()` returns it.
        script: returns the text of the script of a violation; None where no script can name the loop.

    Returns:
        The files of the counterexample, None where the loop holds.

    Raises:
        UsageError: a file cannot be written.
    """
    stored = None
    if result.violation is not None:
        case = store_counterexample(reports, result, environment)
        stored = Counterexample(case, None if script is None else case.with_suffix(".py"))
        if script is not None:
            write_text(case.with_suffix(".py"), script())
    data = {
        **asdict(options),
        **result.to_json(),
        "problem": problem,
        "reached": reached,
        "stored": None if stored is None else stored.case.name,
    }
    append_record(reports, "verify", data, environment=environment)
    return stored
