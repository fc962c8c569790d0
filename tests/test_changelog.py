"""A fragment of the changelog is one sentence, so that a release's section stays a list that is
read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "changelog.d"
TYPES = ("added", "changed", "fixed", "removed")
LONGEST = 200


def faults_of(name: str, text: str) -> list[str]:
    """Return what is wrong with a fragment."""
    _, kind, *rest = [*name.split("."), ""]
    found = (
        []
        if kind in TYPES and rest == ["md", ""]
        else [f"expected SHORT-NAME.TYPE.md, TYPE one of {TYPES}"]
    )
    if len(text.splitlines()) != 1:
        found.append(f"expected one line, got {len(text.splitlines())}")
    if len(text.rstrip("\n")) > LONGEST:
        found.append(f"expected at most {LONGEST} characters, got {len(text.rstrip())}")
    return found


def test_every_fragment_is_one_short_line():
    fragments = [path for path in FOLDER.glob("*.md") if path.name != "README.md"]
    wrong = {
        path.name: faults
        for path in fragments
        if (faults := faults_of(path.name, path.read_text()))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.added.md", "x" * 200 + "\n", 0),
        ("a.added.md", "x" * 201 + "\n", 1),
        ("a.added.md", "One.\nTwo.\n", 1),
        ("a.added.md", "", 1),
        ("a.new.md", "One.\n", 1),
        ("added.md", "One.\n", 1),
    ],
)
def test_what_is_wrong_with_a_fragment_is_said(name, text, count):
    assert len(faults_of(name, text)) == count
