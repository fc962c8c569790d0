"""Texts that users read, kept in files that a person reviews as a diff: `pytest --write-golden` writes them again."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def rows_text(rows: Mapping[str, str]) -> str:
    """Return titled texts, one below the other."""
    return "".join(f"## {title}\n{text}\n\n" for title, text in rows.items())


def compare(name: str, text: str, *, write: bool) -> None:
    """Compare a text with `tests/golden/NAME.txt`, or write it there.

    Raises:
        AssertionError: where they differ, with the lines that do.
    """
    __tracebackhide__ = True
    path = FOLDER / f"{name}.txt"
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(path.name), "now", lineterm="", n=1)
    difference = "\n".join(lines)
    assert not difference, f"{difference}\n\nwhere this is meant, `pytest --write-golden` writes it to {path}"


def assert_named(
    golden: Callable[[str, str], None], file: str, told: Mapping[tuple[str, str], tuple[str | None, str]]
) -> None:
    """Compare names of faults with expected ones, and what is said of them with `tests/golden/FILE.txt`.

    Args:
        golden: the fixture.
        file: the file's name.
        told: expected name and title of what was planted -> name and sentence; no name, None or "", is not written.
    """
    __tracebackhide__ = True
    other = {": ".join(at): name for at, (name, _) in told.items() if (name or "") != at[0]}
    assert not other, f"expected names, and what was planted -> names found: {other}"
    golden(file, rows_text({": ".join(at): said for at, (name, said) in told.items() if name}))
