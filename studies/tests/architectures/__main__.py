"""Write the table of `studies/docs/architectures.md` from the records: `python -m
studies.tests.architectures`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradcheck_suite.core.records import read_records
from gradcheck_suite.page.reading import latest
from studies.records import KINDS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "studies" / "docs" / "architectures.md"
MARK = "<!-- the table, written by `python -m studies.tests.architectures` -->\n"


def table(reports: Path) -> str:
    """Return the tables of all kinds, from the latest record of each architecture."""
    found = [
        record.data
        for record in latest(
            read_records(reports, KINDS["bridge"])[0], lambda d: (*_key(d), d["widened"])
        )
    ]
    known = [data for data in found if "kind" in data]
    wide = {_key(data): data for data in known if data["widened"]}
    rows = [data for data in known if not data["widened"]]
    lines = []
    for kind in sorted({data["kind"] for data in rows}):
        lines += [
            f"## {kind if kind.startswith('torch.') else kind[0].upper() + kind[1:]}",
            "",
            "| architecture | operations | off by | bound | in float64 |",
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: |"]
        lines += sorted(line for data in rows if data["kind"] == kind for line in _row(data, wide))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _key(data: Any) -> tuple[Any, ...]:
    return data["architecture"], data["version"]


def _row(data: Any, wide: Any) -> Iterator[str]:
    if "refused" in data:
        yield f"| {data['architecture']} | refused | | | |"
        return
    other = wide.get(_key(data))
    throughout = "" if other is None else f"{other['gradient_error']:.0e}"
    errors = f"{data['gradient_error']:.0e} | {data['allowed']:.0e}"
    yield f"| {data['architecture']} | {data['operations']} | {errors} | {throughout} |"


if __name__ == "__main__":
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{table(ROOT / 'reports')}")
