"""What the guide shows of trainers is what they do: its blocks on a release are run where that release is installed.

`tests/docs` does not run them, since it has no trainers.
"""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from tests.docs.conftest import folder  # noqa: F401  (a fixture)
from tests.docs.pages import ROOT, Block, Page, blocks

PAGE = ROOT / "docs" / "check-my-trainer.md"
RELEASE = re.compile(r"\b(transformers|accelerate|lightning) (\d[\d.]*\d)\b")


def _shown() -> list[Block]:
    """Return the blocks that show a command with what a release makes of it."""
    return [
        b
        for b in blocks(PAGE.read_text())
        if b.language == "text" and b.text.startswith("$ ") and RELEASE.search(b.text)
    ]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def test_the_guide_shows_the_old_trainer_and_the_new():
    assert {"4.45.2", "5.23.0"} <= {version for block in _shown() for _, version in RELEASE.findall(block.text)}


@pytest.mark.parametrize("block", _shown(), ids=lambda block: f"line {block.line}")
def test_the_guide(block, folder):  # noqa: F811
    for package, version in sorted(set(RELEASE.findall(block.text))):
        if _version(package) != version:
            pytest.skip(f"needs {package} {version}; here is {_version(package)}")
    Page(PAGE.name, folder, few=False).run(Block("console", block.text, block.line))
