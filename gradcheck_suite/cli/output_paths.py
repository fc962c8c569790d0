"""Where a command's results go: refused before the work starts where they could not be written."""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.cli.parsers import Parser
from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.files import expect_writable_folder
from gradcheck_suite.records.store import FOLDER


def add_reports(parser: Parser, what: str) -> None:
    """Add `--reports`, whose help says what of the command's goes to the folder."""
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), metavar="DIR", help=f"{what} (default %(default)s)"
    )


def expect_writable(reports: Path, *folders: str, json: Path | None = None) -> None:
    """Refuse a reports folder whose records, or other `folders` in it, and a `--json` path that cannot be written."""
    if json is not None:
        if json.is_dir() or not json.name:
            raise UsageError(f"--json {json}: expected the path of a file, got a folder")
        if not json.parent.is_dir():
            raise UsageError(f"--json {json}: there is no folder {json.parent}; make it first")
        expect_writable_folder(json.parent, f"--json {json}")
    for folder in (*folders, FOLDER):
        expect_writable_folder(reports / folder, f"--reports {reports}")
