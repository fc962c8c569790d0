"""Build the report from the records: one HTML page that opens offline, and the same as Markdown and JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradcheck_suite.cli import exit_status, output_paths, parsers
from gradcheck_suite.errors import UsageError
from gradcheck_suite.records.files import expect_writable_folder, write_json, write_text
from gradcheck_suite.records.store import FOLDER


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    output_paths.add_reports(parser, "where the records are and the report goes")


def run(arguments: argparse.Namespace) -> int:
    """Write `report.html`, `report.md` and `report.json` beside the records."""
    reports: Path = arguments.reports
    if not (reports / FOLDER).is_dir():
        raise UsageError(
            f"--reports {reports}: there are no records in {reports / FOLDER}; "
            "`gradcheck-suite verify`, `zoo`, `calibrate` and `claims` make them"
        )
    expect_writable_folder(reports, f"--reports {reports}")
    from gradcheck_suite.report import html, markdown
    from gradcheck_suite.report.build import build
    from gradcheck_suite.report.content import to_json

    report = build(reports)
    page = html.render(report)
    write_text(reports / "report.html", page)
    write_text(reports / "report.md", markdown.render(report))
    write_json(reports / "report.json", to_json(report))
    for name in ("report.html", "report.md", "report.json"):
        print(f"{reports / name}  {(reports / name).stat().st_size / 1024:.0f} KiB")
    for problem in report.problems:
        print(f"left out: {problem}")
    return exit_status.HOLDS
