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
        unrepeatable: why the script, run in a process of its own, does not show the fault; None where it does.
    """

    case: Path
    script: Path | None
    unrepeatable: str | None = None


def record_verification(
    reports: Path,
    result: Result,
    options: VerifyOptions,
    *,
    problem: str | None,
    reached: Mapping[str, Mapping[str, int]],
    environment: Mapping[str, Any],
    script: Callable[[], str] | None,
    run_script: Callable[[Path], str | None],
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
        run_script: runs a script and returns why it does not show the fault, or None.

    Returns:
        The files of the counterexample, None where the loop holds.

    Raises:
        UsageError: a file cannot be written.
    """
    stored = None
    if result.violation is not None:
        case = store_counterexample(reports, result, environment)
        stored = Counterexample(case, None)
        if script is not None:
            path = case.with_suffix(".py")
            write_text(path, script())
            stored = Counterexample(case, path, run_script(path))
    data = {
        **asdict(options),
        **result.to_json(),
        "problem": problem,
        "reached": reached,
        "stored": None if stored is None else stored.case.name,
        "unrepeatable": None if stored is None else stored.unrepeatable,
    }
    append_record(reports, "verify", data, environment=environment)
    return stored
