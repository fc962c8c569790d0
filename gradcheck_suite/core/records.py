"""Records of results on disk: their store, and the digests of the code that made them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from gradcheck_suite.core.formats import json_text
from gradcheck_suite.errors import UsageError

# Files that are written whole or not at all, and files of JSON lines that survive a run that is
# killed.


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_text` does.

    Args:
        path: of the file; its folders are made where missing.
        document: JSON-ready data; NaN and infinities must be strings already.

    Raises:
        UsageError: the file cannot be written; nothing of it remains.
    """
    write_text(path, json_text(document))


def write_document(
    path: Path | None, environment: Mapping[str, Any], data: Mapping[str, Any]
) -> None:
    """Write what a command found, under the environment that it comes from.

    Nothing where there is no path.
    """
    if path is not None:
        write_json(path, {"schema": 1, "environment": environment, **data})


def write_text(path: Path, text: str) -> None:
    """Write text to a temporary file beside `path`, then rename it into place.

    Write to a pipe or a device directly.

    Args:
        path: of the file, or of a link to it; its folders are made where missing.
        text: all of it.

    Raises:
        UsageError: the file cannot be written; nothing of it remains.
    """
    try:
        if path.exists() and not path.is_file():
            # a pipe or a device, such as /dev/stdout: renaming a file over it would replace it
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        # in the same folder, so that the rename stays within one file system and is atomic
        temporary = path.with_name(f".{path.name[:40]}-{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def append_line(path: Path, document: Any) -> None:
    """Append one line of JSON by one `write` call, flushed to disk: a run that is killed loses at
    most this line.

    Args:
        path: of the file; its folders are made where missing.
        document: JSON-ready data; NaN and infinities must be strings already.

    Raises:
        UsageError: the file cannot be written.
    """
    line = json.dumps(document, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # a torn line at the end, left by a run that was killed, must not swallow this one
            torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write((("\n" if torn else "") + line).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line and its JSON value, None for a damaged line.

    Nothing where there is no file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            # a run that was killed leaves a part of a line, and nested brackets exhaust the stack
            except (ValueError, RecursionError):
                yield number, None


def expect_writable_folder(folder: Path, what: str) -> None:
    """Raise `UsageError` where files could not be written into a folder, which may not exist yet.

    What is written to find that out is removed.

    Args:
        folder: to be written into, made with its parents when that happens.
        what: how the message calls it, such as `"--reports reports"`.
    """
    existing = folder
    # the folders that are missing are made later: the first one that exists decides
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(
            f"{what}: {existing} is not a folder, so nothing can be written there; choose another"
            " path"
        )
    try:
        # permission bits do not tell: root passes them all, a read-only file system fails them all
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f"{what}: cannot write into {existing} ({error.strerror or error}); choose another path"
        ) from None


# Digests of the suite's sources, by which a record is known to come from another version of the
# code that judges.


PACKAGE = Path(__file__).resolve().parents[1]
JUDGING = (
    "bridge",
    "catalogue",
    "core/case.py",
    "core/comparison.py",
    "core/contract.py",
    "core/options.py",
    "core/results.py",
    "judge",
    "reference",
    "run",
    "strategies",
    "verification",
)
"""The packages and modules that decide a verdict and its name."""


@cache
def judge_digest() -> str:
    """Return the digest of the code that judges."""
    return sources_digest(JUDGING)


def sources_digest(names: Iterable[str | Path], package: Path = PACKAGE) -> str:
    """Return a digest of the definitions and other statements of some modules and packages.

    Where a definition stands does not change the digest: neither its module nor its place there.
    Nor do comments, docstrings, annotations of arguments, imports and layout.

    Args:
        names: paths in the package, such as `"judge"` or `"run/runner.py"`, or absolute ones.
        package: the folder that has them.
    """
    found: set[str] = set()
    for name in names:
        place = package / name
        paths = place.rglob("*.py") if place.is_dir() else [place]
        for path in paths:
            # a set of statements: where they stand is no part of what they do
            found |= _statements(path.read_text())
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


@cache
def _statements(source: str) -> frozenset[str]:
    """Return the statements of a module, each without what does not change what it does."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # annotations change nothing that a function computes: a record stays current without them
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, block, None), list):
                kept = [statement for statement in statements if not _says_nothing(statement)]
                # a block without statements cannot be unparsed
                setattr(node, block, kept or ([ast.Pass()] if statements else []))
    # an import that has moved away leaves `if TYPE_CHECKING: pass`
    return frozenset(ast.unparse(node) for node in tree.body) - {
        "pass",
        "if TYPE_CHECKING:\n    pass",
    }


def _says_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# Records: append-only JSON lines, one file per kind, that the report is built from.
#
# A run that is killed loses at most the record it was writing. The reader skips a damaged or
# foreign line and reports it.


SCHEMA = 1
FOLDER = "records"
Data = Mapping[str, Any]
"""The data of a record, or a part of them."""


@dataclass(frozen=True)
class RecordKind:
    """A kind of record.

    Attributes:
        name: of the kind; its records are in `records/<name>.jsonl`.
        code: the packages and modules whose change makes its figures old, as `sources_digest` takes
            them.
        subject: the fields that name its subject, or a function of the data, of which the newest
            record counts; no field: the last record counts; None: every record does.
    """

    name: str
    code: tuple[str | Path, ...] = JUDGING
    subject: tuple[str, ...] | Callable[[Data], Hashable] | None = None

    @cache  # noqa: B019 - kinds live as long as the process
    def digest(self) -> str:
        """Return the digest of the code that its records speak of."""
        return sources_digest(self.code)


def audited_script(data: Data) -> tuple[str, int]:
    """Return an audited script with its arguments, and the number of its ranks."""
    command = [str(data["loop"]), *data.get("arguments", ())]
    return " ".join(command), int(data.get("ranks") or 1)


LOOPS = ("loops/ranks.py", "loops/reset_modes.py")
KINDS = {
    kind.name: kind
    for kind in (
        RecordKind(
            "verify", (*JUDGING, *LOOPS), ("loop", "dtype", "device", "optimizer", "problem")
        ),
        RecordKind("audit", (*JUDGING, "auditing"), audited_script),
        RecordKind("trainer", (*JUDGING, "loops/trainers"), ("trainer", "version", "question")),
    )
}
"""The kinds of records that the commands make, by name."""


@dataclass(frozen=True)
class Record:
    """One line of a records file.

    Attributes:
        kind: name of its kind.
        data: the result, JSON-ready; NaN and infinities are strings.
        environment: of the run, as `environment.environment()` returns it.
        command: the command that made the record.
        time: of writing, ISO 8601 in UTC.
        commit: of the repository in the working directory; empty where there is none.
        clean: whether that repository had no uncommitted change outside of the reports folder; None
            if unknown.
        judge: digest of the code that the record speaks of, as `Kind.digest` returns it; empty
            where it is unknown.
        older: of a record that was read, whether that code is another one today, or may be.
    """

    kind: str
    data: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    time: str = ""
    commit: str = ""
    clean: bool | None = None
    judge: str = ""
    older: bool = False

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
    """Return where the records of a kind, by its name, are kept."""
    return reports / FOLDER / f"{kind}.jsonl"


def expect_schema(path: Path) -> None:
    """Refuse to append to a file whose last record is of another schema.

    A damaged one is no reason.

    Raises:
        UsageError: it is.
    """
    documents = [found for _, found in read_lines(path)] if path.is_file() else []
    last = documents[-1] if documents else None
    if isinstance(last, dict) and last.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} holds records of schema {last.get('schema')!r}, and this version writes schema"
            f" {SCHEMA}: choose another folder by --reports"
        )


def append_record(
    reports: Path | None,
    kind: RecordKind,
    data: Data,
    *,
    environment: Mapping[str, Any],
    command: str | None = None,
) -> Path | None:
    """Append one record and return the file.

    Nothing where there is no folder, since no record was asked for.

    Args:
        reports: the folder of all records, or None.
        kind: of the record.
        data: the result, JSON-ready.
        environment: of the run.
        command: that made it; the command of this process if None.

    Raises:
        UsageError: the file cannot be written, or holds records of another schema.
    """
    if reports is None:
        return None
    path = records_path(reports, kind.name)
    expect_schema(path)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = Record(
        kind.name,
        data,
        environment,
        this_command() if command is None else command,
        now,
        this_commit(),
        is_clean(reports),
        kind.digest(),
    )
    append_line(path, record.to_json())
    return path


def read_records(reports: Path, kind: RecordKind) -> tuple[list[Record], list[str]]:
    """Return a kind's records, oldest first, and what could not be read, one line each.

    Nothing where there is no file.

    Raises:
        UsageError: the file cannot be opened.
    """
    path = records_path(reports, kind.name)
    records: list[Record] = []
    problems: list[str] = []
    for number, found in read_lines(path):
        where = f"{path.name}, line {number}"
        if found is None:
            problems.append(f"{where}: damaged; left out")
        elif (
            not isinstance(found, dict)
            or not isinstance(found.get("data"), dict)
            or found.get("kind") != kind.name
        ):
            problems.append(f"{where}: not a record of kind {kind.name!r}; left out")
        elif found.get("schema") != SCHEMA:
            problems.append(
                f"{where}: schema {found.get('schema')!r}, expected {SCHEMA}: another version;"
                " left out"
            )
        else:
            environment = found.get("environment")
            texts = {
                name: str(found.get(name, "")) for name in ("command", "time", "commit", "judge")
            }
            under = environment if isinstance(environment, dict) else {}
            older = texts["judge"] != kind.digest()
            records.append(
                Record(
                    kind.name, found["data"], under, clean=found.get("clean"), older=older, **texts
                )
            )
    return records, problems


def this_command() -> str:
    """Return the command of this process without its program's folder, so that a record has no path
    of the machine.
    """
    program = Path(sys.argv[0]).name
    # `python -m package` has the path of its `__main__.py` here
    if program == "__main__.py":
        program = f"python -m {Path(sys.argv[0]).parent.name}"
    return " ".join([program, *sys.argv[1:]])


@cache
def this_commit() -> str:
    """Return the commit of the repository in the working directory at the first call, empty where
    there is none.
    """
    return _git("rev-parse", "HEAD") or ""


@cache
def is_clean(reports: Path) -> bool | None:
    """Return whether the repository had no uncommitted change at the first call.

    None where there is none.

    Args:
        reports: the folder of all records, whose changes do not count.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None:
        return None
    folder = reports.resolve()
    others = (
        [f":(exclude,top){folder.relative_to(top)}"]
        if folder.is_relative_to(top) and folder != Path(top)
        else []
    )
    changes = _git("status", "--porcelain", "--", ":/", *others)
    return None if changes is None else not changes


def _git(*arguments: str) -> str | None:
    """Return what git prints in the working directory, None where it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
