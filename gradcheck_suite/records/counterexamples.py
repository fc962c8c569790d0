"""Counterexamples on disk: one JSON file each, which `gradcheck-suite replay` takes, and a script beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.evidence import evidence_to_json
from gradcheck_suite.records.files import write_json
from gradcheck_suite.schema.case import SCHEMA, Case, case_from_json
from gradcheck_suite.schema.contract import checked_assumptions
from gradcheck_suite.schema.results import Result

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
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", loop)[-_LONGEST_NAME:].lstrip("-.") or "loop"
    return reports / FOLDER / f"{name}-{case.digest}.json"


def store_counterexample(reports: Path, result: Result, environment: Mapping[str, Any]) -> Path:
    """Write a result's violation, whole or not at all, and return where.

    Raises:
        UsageError: the file cannot be written.
    """
    violation = result.violation
    assert violation is not None, "only violations are stored"
    about = violation.to_json(result.found_after)
    case = about.pop("case")
    path = counterexample_path(reports, result.loop, violation.case)
    document = {
        "schema": SCHEMA,
        "loop": result.loop,
        "assumes": list(result.assumes),
        "case": case,
        "violation": {**about, "details": list(violation.details)},
        "evidence": [] if violation.evidence is None else evidence_to_json(violation.evidence),
        "environment": dict(environment),
    }
    write_json(path, document)
    return path


def read_case_file(path: Path) -> StoredCase:
    """Read a stored counterexample, a bare case, or a `--json` result that holds exactly one violation.

    Raises:
        UsageError: there is no such file, it is truncated or foreign, or the case was edited.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder: expected the JSON file of one case")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; `verify` prints where it stores a counterexample") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise UsageError(f"{path} is not valid JSON ({where}): it is truncated or no case file") from None
    try:
        return _stored(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a gradcheck-suite case ({type(error).__name__}: {error})") from None


def _stored(data: Any) -> StoredCase:
    if not isinstance(data, Mapping):
        raise UsageError(f"expected a JSON object that holds a case, got {type(data).__name__}")
    if "results" in data:
        return _only_violation(data)
    if "case" not in data:
        return StoredCase(case_from_json(data), None)
    if data.get("schema") != SCHEMA:
        raise UsageError(f"schema must be {SCHEMA}, got {data.get('schema')!r}: the file comes from another version")
    return StoredCase(case_from_json(data["case"]), _loop_name(data.get("loop")), _assumptions(data))


def _only_violation(data: Mapping[str, Any]) -> StoredCase:
    if data.get("schema") != SCHEMA or not isinstance(data["results"], list):
        raise UsageError(f"expected the results of schema {SCHEMA}, got schema {data.get('schema')!r}")
    violated = [r for r in data["results"] if isinstance(r, Mapping) and isinstance(r.get("violation"), Mapping)]
    if len(violated) != 1:
        raise UsageError(
            f"expected the results of exactly one violated loop, got {len(violated)}: "
            f"pass one of the files under {FOLDER}/ of the reports folder"
        )
    (found,) = violated
    return StoredCase(
        case_from_json(found["violation"].get("case")), _loop_name(found.get("loop")), _assumptions(found)
    )


def _assumptions(data: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(checked_assumptions(data.get("assumes", ()))))


def _loop_name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise UsageError(f"loop must be a string, got {name!r}")
    return name
