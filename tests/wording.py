"""Texts that users read, kept in files that a person reviews as a diff: `--full --write-golden`
writes them again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def rows_text(rows: Mapping[str, str]) -> str:
    """Return titled texts, one below the other."""
    return "".join(f"## {title}\n{text}\n\n" for title, text in rows.items())


def _titled(text: str) -> dict[str, str]:
    """Return what `rows_text` was given."""
    return dict(
        each.rstrip("\n").split("\n", 1)
        for each in re.split("^## ", text, flags=re.MULTILINE)
        if each
    )


def compare(name: str, text: str, *, write: bool, part: bool = False) -> None:
    """Compare a text with `tests/golden/NAME.txt`, or write it there.

    Args:
        name: of the file.
        text: what is to be there.
        write: whether to write it.
        part: whether the text has some of the file's titled texts alone; a part is not written.

    Raises:
        AssertionError: where they differ, with the lines that do.
    """
    __tracebackhide__ = True
    path = FOLDER / f"{name}.txt"
    if write and not part:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if part:
        titles = set(_titled(text))
        kept = rows_text({title: said for title, said in _titled(kept).items() if title in titles})
    lines = difflib.unified_diff(
        kept.splitlines(), text.splitlines(), str(path.name), "now", lineterm="", n=1
    )
    difference = "\n".join(lines)
    assert not difference, (
        f"{difference}\n\nwhere this is meant, `pytest --full --write-golden` writes it to {path}"
    )


def assert_named(
    golden: Callable[..., None],
    file: str,
    told: Mapping[tuple[str, str], tuple[str | None, str]],
    *,
    part: bool = False,
) -> None:
    """Compare names of faults with expected ones, and what is said of them with
    `tests/golden/FILE.txt`.

    Args:
        golden: the fixture.
        file: the file's name.
        told: expected name and title of what was planted -> name and sentence; no name, None or "",
            is not written.
        part: whether these are some of the file's alone.
    """
    __tracebackhide__ = True
    other = {": ".join(at): name for at, (name, _) in told.items() if (name or "") != at[0]}
    assert not other, f"expected names, and what was planted -> names found: {other}"
    golden(
        file,
        rows_text({": ".join(at): said for at, (name, said) in told.items() if name}),
        part=part,
    )
