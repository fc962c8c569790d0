"""Violations on disk: the case, its gradients as evidence, and the record of a verification."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradcheck_suite.core.case import SCHEMA, Case, case_from_json
from gradcheck_suite.core.comparison import Comparison, Vector, elementwise_error
from gradcheck_suite.core.contract import checked_assumptions
from gradcheck_suite.core.records import PACKAGE, write_json
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.core.text import file_text
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
    worst = {
        name: float(part.max())
        for name in layout.names
        if (part := ratio[layout.elements(name)]).size
    }
    wrong = sorted(
        (name for name, value in worst.items() if value > 1), key=lambda name: -worst[name]
    )
    return [_parameter(comparison, name, layout.part(ratio, name)) for name in wrong[:MOST]]


def _parameter(comparison: Comparison, name: str, ratio: Vector) -> dict[str, Any]:
    layout = comparison.layout
    shape = layout.shapes[layout.names.index(name)]
    matrix = ratio.reshape(shape[0] if len(shape) > 1 else 1, -1)
    row, column = np.unravel_index(int(np.argmax(matrix)), matrix.shape)
    rows, columns = _around(int(row), matrix.shape[0]), _around(int(column), matrix.shape[1])

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


# The user's source lines, with what computes the loss, sends it backward and steps marked.


MARGIN = 3
"""Lines that are shown before the first and after the last marked one of a script."""
MOST_LINES = 60


def loop_source(loop: Any) -> dict[str, Any] | None:
    """Return the lines of a loop as JSON-ready data.

    None where it has no source, as a trainer's loop has none of one. `marks` has the number of each
    line that calls `backward` or `step`, and of those that assign what goes backward.
    """
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(loop))
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = file_text(inspect.getsourcefile(inspect.unwrap(loop)) or "")
    except (OSError, TypeError, SyntaxError):
        return None
    calls = [(n, getattr(n.func, "attr", "")) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    marks = {call.lineno: name for call, name in calls if name in ("backward", "step")}
    sent = [part for call, name in calls if name == "backward" for part in ast.walk(call)]
    backward = {part.id for part in sent if isinstance(part, ast.Name)}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign) and backward & {
            getattr(t, "id", "") for t in targets
        }:
            marks.setdefault(node.lineno, "loss")
    return _source(
        Path(file).name, first, lines, {first + line - 1: name for line, name in marks.items()}
    )


def loop_places(loop: Any) -> dict[str, Any]:
    """Return where a loop computes its loss, sends it backward and steps, under the names of
    `Violation`'s fields.

    Of several calls it is the last one, and the loop's first line where it calls neither itself.
    """
    source, place = loop_source(loop), loop_lines(loop)
    if source is None or place is None:
        return {}
    file, span = place
    lines = {mark: f"{file}:{number}" for number, _, mark in source["lines"] if mark}
    fields = {"where": "loss", "backward": "backward", "stepped": "step"}
    return (
        {name: lines.get(mark) for name, mark in fields.items()}
        if lines
        else {"where": f"{file}:{span.start}"}
    )


def loop_lines(loop: Any) -> tuple[str, range] | None:
    """Return the file of a loop, as seen from the working directory, and its lines.

    None for a loop of the suite.
    """
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(loop))
        path = inspect.getsourcefile(inspect.unwrap(loop)) or ""
    except (OSError, TypeError):
        return None
    if Path(path).is_relative_to(PACKAGE):
        return None
    file = file_text(path)
    if file == path and Path(path).is_relative_to(Path.cwd()):
        file = str(Path(path).relative_to(Path.cwd()))
    return file, range(first, first + len(lines))


def places_source(places: Mapping[str, str | None], folder: Path) -> dict[str, Any] | None:
    """Return the lines of a script around some places, which are all in the file of the first one.

    Args:
        places: `loss`, `backward` and `step` -> `file:line`, or None.
        folder: that the files are relative to.
    """
    marks: dict[int, str] = {}
    file = ""
    for name, place in places.items():
        where, _, line = (place or "").partition(" < ")[0].rpartition(":")
        if line.isdigit() and where == (file or where):
            file = where
            marks.setdefault(int(line), name)
    try:
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    first = max(1, min(marks) - MARGIN)
    return _source(file, first, lines[first - 1 : max(marks) + MARGIN], marks)


def _source(
    file: str, first: int, lines: Sequence[str], marks: Mapping[int, str]
) -> dict[str, Any]:
    """Return some lines; of more than `MOST_LINES` those around the marked ones."""
    shown = {n: line.rstrip() for n, line in enumerate(lines, first)}
    if len(shown) > MOST_LINES:
        shown = {
            n: line
            for n, line in shown.items()
            if any(abs(n - marked) <= MARGIN for marked in marks)
        }
    return {"file": file, "lines": [[n, line, marks.get(n, "")] for n, line in shown.items()]}


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
    return _named(data["case"], data)


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
    return _named(found["violation"].get("case"), found)


def _named(case: Any, about: Mapping[str, Any]) -> StoredCase:
    """Return a case with the loop that it violated and what that assumes."""
    read, name = case_from_json(case), about.get("loop")
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
