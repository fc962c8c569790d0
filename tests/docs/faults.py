"""Write the tables of faults into `docs/read-a-verdict.md`: `python -m tests.docs.faults`."""

from __future__ import annotations

import re

from gradcheck_suite.core.faults import TABLES, table_of
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "read-a-verdict.md"


def written(text: str) -> str:
    """Return the page's text with the tables as they are now."""
    for title, kinds in TABLES.items():
        head, section, rest = text.partition(f"### {title}\n")
        rest = re.sub(r"(?:^\|.*\n)+", lambda _, kinds=kinds: table_of(kinds), rest, count=1, flags=re.MULTILINE)
        text = head + section + rest
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
