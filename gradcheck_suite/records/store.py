"""Records: append-only JSON lines, one file per kind, that the report is built from.

A run that is killed loses at most the record it was writing. The reader skips a damaged or foreign line and reports it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.files import append_line, read_lines
from gradcheck_suite.records.sources import code_digest

SCHEMA = 1
FOLDER = "records"
KINDS = (
    "verify",
    "benchmark",
    "memory",
    "claim",
    "zoo",
    "calibration",
    "bridge",
    "trainer",
    "audit",
    "atlas",
    "zero-or-none",
    "step",
    "traffic",
)


@dataclass(frozen=True)
class Record:
    """One line of a records file.

    Attributes:
        kind: one of `KINDS`; each kind has a file of its own, `records/<kind>.jsonl`.
        data: the result, JSON-ready; NaN and infinities are strings.
        environment: of the run, as `environment.environment()` returns it.
        command: the command that made the record.
        time: of writing, ISO 8601 in UTC.
        commit: of the repository in the working directory; empty where there is none.
        clean: whether that repository had no uncommitted change outside of the reports folder; None if unknown.
        judge: digest of the code that the record speaks of, as `code_digest(kind)` returns it; empty where it is
            unknown.
    """

    kind: str
    data: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    time: str = ""
    commit: str = ""
    clean: bool | None = None
    judge: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready data."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "time": self.time,
            "command": self.command,
            "commit": self.commit,
            "clean": self.clean,
            "judge": self.judge,
            "environment": dict(self.environment),
            "data": dict(self.data),
        }


def records_path(reports: Path, kind: str) -> Path:
    """Return where a kind's records are kept."""
    if kind not in KINDS:
        raise UsageError(f"record kind must be one of {', '.join(KINDS)}; got {kind!r}")
    return reports / FOLDER / f"{kind}.jsonl"


def append_record(
    reports: Path, kind: str, data: Mapping[str, Any], *, environment: Mapping[str, Any], command: str | None = None
) -> Path:
    """Append one record and return the file.

    Args:
        reports: the folder of all records.
        kind: one of `KINDS`.
        data: the result, JSON-ready.
        environment: of the run.
        command: that made it; the command of this process if None.

    Raises:
        UsageError: the file cannot be written.
    """
    path = records_path(reports, kind)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = Record(
        kind,
        data,
        environment,
        this_command() if command is None else command,
        now,
        this_commit(),
        is_clean(reports),
        code_digest(kind),
    )
    append_line(path, record.to_json())
    return path


def read_records(reports: Path, kind: str) -> tuple[list[Record], list[str]]:
    """Return a kind's records, oldest first, and what could not be read, one line each; nothing where there is no file.

    Raises:
        UsageError: the file cannot be opened.
    """
    path = records_path(reports, kind)
    records: list[Record] = []
    problems: list[str] = []
    for number, found in read_lines(path):
        where = f"{path.name}, line {number}"
        if found is None:
            problems.append(f"{where}: damaged; left out")
        elif not isinstance(found, dict) or not isinstance(found.get("data"), dict) or found.get("kind") != kind:
            problems.append(f"{where}: not a record of kind {kind!r}; left out")
        elif found.get("schema") != SCHEMA:
            problems.append(f"{where}: schema {found.get('schema')!r}, expected {SCHEMA}: another version; left out")
        else:
            environment = found.get("environment")
            records.append(
                Record(
                    kind,
                    found["data"],
                    environment if isinstance(environment, dict) else {},
                    str(found.get("command", "")),
                    str(found.get("time", "")),
                    str(found.get("commit", "")),
                    found.get("clean"),
                    str(found.get("judge", "")),
                )
            )
    return records, problems


def this_command() -> str:
    """Return the command of this process without its program's folder, so that a record has no path of the machine."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = f"python -m {Path(sys.argv[0]).parent.name}"
    return " ".join([program, *sys.argv[1:]])


@cache
def this_commit() -> str:
    """Return the commit of the repository in the working directory at the first call, empty where there is none."""
    return _git("rev-parse", "HEAD") or ""


@cache
def is_clean(reports: Path) -> bool | None:
    """Return whether the repository had no uncommitted change at the first call; None where there is none.

    Args:
        reports: the folder of all records, whose changes do not count.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None:
        return None
    folder = reports.resolve()
    others = [f":(exclude,top){folder.relative_to(top)}"] if folder.is_relative_to(top) and folder != Path(top) else []
    changes = _git("status", "--porcelain", "--", ":/", *others)
    return None if changes is None else not changes


def _git(*arguments: str) -> str | None:
    """Return what git prints in the working directory, None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
