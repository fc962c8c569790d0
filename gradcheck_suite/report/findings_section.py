"""What was found about the frameworks, from the page that is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

from gradcheck_suite.report.content import Section, Table

FILE = "findings.md"
_CELLS = re.compile(r"(?<!\\)\|")


def findings(reports: Path) -> Section | None:
    """Return the section on findings: the text and the tables of the page beside the records, None without one."""
    path = reports / FILE
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [tuple(_plain(cell) for cell in _CELLS.split(line.strip())[1:-1]) for line in lines if line.startswith("|")]
    text = " ".join(line for line in lines if line and not line.startswith(("|", "#")))
    # the second row of a Markdown table is its rule
    tables = (Table("Findings", rows[0], tuple(row for row in rows[2:] if len(row) == len(rows[0]))),) if rows else ()
    return Section("findings", "What was found about torch and JAX", (text,), tables)


def _plain(cell: str) -> str:
    return cell.strip().replace("\\|", "|").replace("`", "")
