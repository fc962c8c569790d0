"""The paths that a command writes to, refused before its work starts where they cannot be written."""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.cli.parsers import Parser, one_of
from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.files import expect_writable_folder
from gradcheck_suite.records.store import FOLDER
from gradcheck_suite.schema.case import DEVICES


def add_reports(parser: Parser, what: str) -> None:
    """Add `--reports`; its help says what the command writes there."""
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), metavar="DIR", help=f"{what} (default %(default)s)"
    )


def add_rows(parser: Parser) -> None:
    """Add `--device`, `--json` and `--reports` of a command that computes rows by torch and by JAX."""
    parser.add_argument(
        "--device", type=one_of(DEVICES), default="cpu", help="where torch computes (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here as JSON")
    add_reports(parser, "the rows are recorded in DIR/records")


def expect_writable(reports: Path, *folders: str, **files: Path | None) -> None:
    """Refuse paths that cannot be written.

    Args:
        reports: the reports folder, whose records are written.
        folders: others under it.
        files: option without its dashes, such as `json`, -> the file that it names, or None.
    """
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise UsageError(f"--{option} {path}: expected the path of a file, got a folder")
        if not path.parent.is_dir():
            raise UsageError(f"--{option} {path}: there is no folder {path.parent}; make it first")
        expect_writable_folder(path.parent, f"--{option} {path}")
    for folder in (*folders, FOLDER):
        expect_writable_folder(reports / folder, f"--reports {reports}")
