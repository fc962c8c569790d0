"""Files that are written whole or not at all, and files of JSON lines that survive a run that is killed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import UsageError


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_text` does.

    Args:
        path: of the file; its folders are made where missing.
        document: JSON-ready data; NaN and infinities must be strings already.

    Raises:
        UsageError: the file cannot be written; nothing of it remains.
    """
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_document(path: Path | None, environment: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Write what a command found, under the environment that it comes from; nothing where there is no path."""
    if path is not None:
        write_json(path, {"schema": 1, "environment": environment, **data})


def write_text(path: Path, text: str) -> None:
    """Write text to a temporary file beside `path`, then rename it into place; write to a pipe or a device directly.

    Args:
        path: of the file, or of a link to it; its folders are made where missing.
        text: all of it.

    Raises:
        UsageError: the file cannot be written; nothing of it remains.
    """
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():
            # a pipe or a device, such as /dev/stdout: renaming a file over it would replace it
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name[:40]}-", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def append_line(path: Path, document: Any) -> None:
    """Append one line of JSON by one `write` call, flushed to disk: a run that is killed loses at most this line.

    Args:
        path: of the file; its folders are made where missing.
        document: JSON-ready data; NaN and infinities must be strings already.

    Raises:
        UsageError: the file cannot be written.
    """
    line = json.dumps(document, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # a torn line at the end, left by a run that was killed, must not swallow this one
            torn = file.tell() > 0 and not _ends_with_newline(path)
            file.write((("\n" if torn else "") + line).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line and its JSON value, None for a damaged line; nothing where there is no file.

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
            except (ValueError, RecursionError):
                yield number, None


def expect_writable_folder(folder: Path, what: str) -> None:
    """Raise `UsageError` where files could not be written into a folder, which may not exist yet; leaves no trace.

    Args:
        folder: to be written into, made with its parents when that happens.
        what: how the message calls it, such as `"--reports reports"`.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"{what}: {existing} is not a folder, so nothing can be written there; choose another path")
    try:
        # permission bits do not tell: root passes them all, a read-only file system fails them all
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f"{what}: cannot write into {existing} ({error.strerror or error}); choose another path"
        ) from None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
