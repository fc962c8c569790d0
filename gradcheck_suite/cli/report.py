"""Build the report from the records: one HTML page that opens offline, the short story as Markdown,
and JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import FOLDER, expect_writable_folder, write_json, write_text
from gradcheck_suite.errors import UsageError

if TYPE_CHECKING:
    from gradcheck_suite.page.report import ReportContents

PICTURES = "pictures"


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parsers.add_reports(parser, "where the records are and the report goes", Path("reports"))
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="print what changed between the records of two folders, and write nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write `report.html`, `report.md` with its pictures and `report.json` beside the records, or
    compare records.
    """
    return run_report(arguments, _own)


def _own() -> ReportContents:
    from gradcheck_suite.page.report import OWN

    return OWN


def run_report(arguments: argparse.Namespace, contents_of: Callable[[], ReportContents]) -> int:
    """Write the report that is made of these contents, or compare records.

    Args:
        arguments: parsed by `add_arguments`.
        contents_of: imports the contents and, with them, torch, which takes seconds: what is not
            installed is said before.
    """
    from gradcheck_suite.page import render

    # a comparison prints lines and needs no templates
    if arguments.compare is None:
        render.expect_installed("the report")
    contents = contents_of()
    from gradcheck_suite.page import report
    from gradcheck_suite.page.content import report_json

    if arguments.compare is not None:
        old, new = arguments.compare
        for folder in (old, new):
            _expect_records(folder, "--compare")
        lines = report.compared(old, new, contents)
        print("\n".join(lines))
        left_out = any(line.startswith("left out: ") for line in lines)
        return exit_status.VIOLATED if left_out else exit_status.HOLDS
    reports: Path = arguments.reports
    _expect_records(reports, "--reports")
    _expect_room_for_report(reports)
    built = report.build(reports, contents)
    # all of them before anything is written: a picture that fails leaves the old report whole
    drawn = {figure.key: render.svg(figure.spec, figure.alt) for figure in render.pictures(built)}
    write_text(reports / "report.html", render.report_html(built))
    write_text(
        reports / "report.md",
        render.report_markdown(built, lambda figure: f"{PICTURES}/{figure.key}.svg"),
    )
    write_json(reports / "report.json", report_json(built))
    # pictures of an older report, to which nothing links any more
    for path in (reports / PICTURES).glob("*.svg"):
        if path.stem not in drawn:
            path.unlink()
    for key, svg in drawn.items():
        write_text(reports / PICTURES / f"{key}.svg", svg)
    for name in ("report.html", "report.md", "report.json"):
        print(f"{reports / name}  {(reports / name).stat().st_size / 1024:.0f} KiB")
    if drawn:
        print(f"{reports / PICTURES}  {len(drawn)} pictures")
    for problem in built.problems:
        print(f"left out: {problem.removesuffix('; left out')}")
    return exit_status.VIOLATED if built.problems else exit_status.HOLDS


def _expect_room_for_report(reports: Path) -> None:
    try:
        expect_writable_folder(reports, f"the report stands beside its records in {reports}")
    except UsageError as error:
        # another path would have no records
        raise UsageError(
            f"{parsers.without_advice(error)}; copy that folder to where you can write, and name the"
            " copy with --reports"
        ) from None


def _expect_records(folder: Path, option: str) -> None:
    if not (folder / FOLDER).is_dir():
        raise UsageError(
            f"{option} {folder}: there are no records in {folder / FOLDER}; `gradcheck-suite"
            " verify` and `audit` make them, with `--reports`"
        )
