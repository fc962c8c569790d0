"""Build the report of all studies from the records: one HTML page, the short story as Markdown, and
JSON.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gradcheck_suite.cli.report import add_arguments, run_report

if TYPE_CHECKING:
    from gradcheck_suite.page.report import ReportContents

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Write `report.html`, `report.md` with its pictures and `report.json` beside the records, or
    compare records.
    """
    return run_report(arguments, _contents)


def _contents() -> ReportContents:
    from studies.report.build import CONTENTS

    return CONTENTS
