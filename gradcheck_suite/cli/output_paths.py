"""The paths that a command writes to, refused before its work starts where they cannot be written."""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.cli.parsers import Parser
from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.files import expect_writable_folder
from gradcheck_suite.records.store import FOLDER


def add_reports(parser: Parser, what: str) -> None:
    """Add `--reports`; its help says what the command writes there."""
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), metavar="DIR", help=f"{what} (default %(default)s)"
    )


def expect_writable(reports: Path, *folders: str, json: Path | None = None) -> None:
    """Refuse paths that cannot be written: the records and other `folders` under a reports folder, and `--json`."""
    if json is not None:
        if json.is_dir() or not json.name:
            raise UsageError(f"--json {json}: expected the path of a file, got a folder")
        if not json.parent.is_dir():
            raise UsageError(f"--json {json}: there is no folder {json.parent}; make it first")
        expect_writable_folder(json.parent, f"--json {json}")
    for folder in (*folders, FOLDER):
        expect_writable_folder(reports / folder, f"--reports {reports}")
