"""Violations on disk: the case, its gradients as evidence, and the record of a verification."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradcheck_suite.core.case import SCHEMA, Case, case_from_json
from gradcheck_suite.core.comparison import Comparison, Vector, elementwise_error
from gradcheck_suite.core.contract import checked_assumptions
from gradcheck_suite.core.records import write_json
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.errors import UsageError

# The evidence of a violation as plain data: the elements of the gradient that differ, as many as a
# page can show.


SIDE = 24
"""Rows and columns of a parameter's elements that are kept, around the worst one."""
MOST = 4
"""Parameters whose elements are kept: those with the largest errors over their bounds."""


def evidence_to_json(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the wrong parameters, the worst first, with their elements seen as a matrix.

    Of a parameter with more than two dimensions the last ones are joined. `rows` and `columns` say
    which elements are kept: from the first index up to, without, the second.
    """
    layout = comparison.layout
    with np.errstate(invalid="ignore", divide="ignore"):
        error = elementwise_error(comparison.observed.copy(), comparison.expected)
        ratio: Vector = np.divide(
            error, comparison.allowed, out=np.zeros_like(error), where=error > 0
        )
    parts = {name: ratio[layout.elements(name)] for name in layout.names}
    worst = {name: float(part.max()) for name, part in parts.items() if part.size}
    wrong = sorted(
        (name for name, value in worst.items() if value > 1), key=lambda name: -worst[name]
    )
    return [_parameter(comparison, name, layout.part(ratio, name)) for name in wrong[:MOST]]


def _parameter(comparison: Comparison, name: str, ratio: Vector) -> dict[str, Any]:
    layout = comparison.layout
    shape = layout.shapes[layout.names.index(name)]
    # a page shows a matrix: axes after the first are laid out as columns, a vector is one row
    matrix = ratio.reshape(shape[0] if len(shape) > 1 else 1, -1)
    row, column = np.unravel_index(int(np.argmax(matrix)), matrix.shape)
    rows = _around(int(row), matrix.shape[0])
    columns = _around(int(column), matrix.shape[1])

    def kept(vector: Vector) -> list[list[float | str | None]]:
        part = layout.part(vector, name).reshape(matrix.shape)[rows, columns]
        return [[json_number(float(value)) for value in line] for line in part]

    return {
        "parameter": name,
        "shape": list(shape),
        "missing": name in comparison.missing,
        "wrong": int(np.count_nonzero(ratio > 1)),
        "rows": [rows.start, rows.stop],
        "columns": [columns.start, columns.stop],
        "expected": kept(comparison.expected),
        "observed": kept(comparison.observed),
        "allowed": kept(comparison.allowed),
    }


def _around(index: int, size: int) -> slice:
    """Return at most `SIDE` indices around one, all of them where they are no more."""
    start = max(0, min(index - SIDE // 2, size - SIDE))
    return slice(start, min(size, start + SIDE))


# Counterexamples on disk: one JSON file each, which `gradcheck-suite replay` takes, and a script
# beside it.


FOLDER = "counterexamples"
_LONGEST_NAME = 100


@dataclass(frozen=True)
class StoredCase:
    """The content of a case's file.

    Attributes:
        case: to run again.
        loop: that it violated, as the user named it; None for a bare case.
        assumes: what the loop was said to assume.
    """

    case: Case
    loop: str | None
    assumes: tuple[str, ...] = ()


def counterexample_path(reports: Path, loop: str, case: Case) -> Path:
    """Return where a loop's counterexample belongs: `reports/counterexamples/<loop>-<digest>.json`."""
    # the end of a name tells loops apart, its beginning is a folder; a leading dot would hide the
    # file
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", loop)[-_LONGEST_NAME:].lstrip("-.") or "loop"
    return reports / FOLDER / f"{name}-{case.digest}.json"


def store_counterexample(
    reports: Path,
    result: Result,
    environment: Mapping[str, Any],
    source: Mapping[str, Any] | None = None,
) -> Path:
    """Write a result's violation, with the lines of its loop, whole or not at all, and return
    where.

    Raises:
        UsageError: the file cannot be written.
    """
    violation = result.violation
    assert violation is not None, "only violations are stored"
    about = violation.to_json()
    case = about.pop("case")
    path = counterexample_path(reports, result.loop, violation.case)
    document = {
        "schema": SCHEMA,
        "loop": result.loop,
        "assumes": list(result.assumes),
        "case": case,
        "violation": {
            **about,
            "details": list(violation.details),
            "described": list(violation.described),
        },
        "evidence": [] if violation.evidence is None else evidence_to_json(violation.evidence),
        "source": source,
        "environment": dict(environment),
    }
    write_json(path, document)
    return path


def read_case_file(path: Path) -> StoredCase:
    """Read a stored counterexample, a bare case, or a `--json` result that holds exactly one
    violation.

    Raises:
        UsageError: there is no such file, it is truncated or foreign, or the case was edited.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror or error}): expected the JSON file of one case,"
            " which `verify` stores"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid JSON ({error}): it is truncated or no case file"
        ) from None
    try:
        return _stored(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    # a foreign JSON file may have anything where a case has something else
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path}: not a gradcheck-suite case ({type(error).__name__}: {error})"
        ) from None


def _stored(data: Any) -> StoredCase:
    if not isinstance(data, Mapping):
        raise UsageError(f"expected a JSON object that holds a case, got {type(data).__name__}")
    if "results" in data:
        return _only_violation(data)
    if "case" not in data:
        return StoredCase(case_from_json(data), None)
    if data.get("schema") != SCHEMA:
        raise UsageError(
            f"schema must be {SCHEMA}, got {data.get('schema')!r}: the file comes from another"
            " version"
        )
    return _stored_case(data["case"], data)


def _only_violation(data: Mapping[str, Any]) -> StoredCase:
    if data.get("schema") != SCHEMA or not isinstance(data["results"], list):
        raise UsageError(
            f"expected the results of schema {SCHEMA}, got schema {data.get('schema')!r}"
        )
    violated = [
        r
        for r in data["results"]
        if isinstance(r, Mapping) and isinstance(r.get("violation"), Mapping)
    ]
    if len(violated) != 1:
        raise UsageError(
            f"expected the results of exactly one violated loop, got {len(violated)}: "
            f"pass one of the files under {FOLDER}/ of the reports folder"
        )
    (found,) = violated
    return _stored_case(found["violation"].get("case"), found)


def _stored_case(case: Any, about: Mapping[str, Any]) -> StoredCase:
    """Return a case with the loop that it violated and what that assumes."""
    read = case_from_json(case)
    name = about.get("loop")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"loop must be a string, got {name!r}")
    return StoredCase(read, name, tuple(sorted(checked_assumptions(about.get("assumes", ())))))


@dataclass(frozen=True)
class Counterexample:
    """The files of one stored violation.

    Attributes:
        case: the JSON file that `gradcheck-suite replay` takes.
        script: the stand-alone script; None where there is none that shows the fault.
        no_script: why there is none, or why the script was not run to its end; None for a script
            that has shown the fault.
    """

    case: Path
    script: Path | None
    no_script: str | None = None
