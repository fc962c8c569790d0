"""Write into a page what its commands print: `python -m tests.docs.refresh docs/PAGE.md ...`.

What is shown and still right is left as it is, so that a page keeps its `...` and its times.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import Block, Page, blocks, commands, is_alike


def refreshed(page: Page, text: str) -> str:
    """Return a page's text with the output of its console blocks as it is now."""
    for block in blocks(text):
        if block.language != "console":
            page.run(block)
            continue
        text = text.replace(
            f"```console\n{block.text}```", f"```console\n{_printed(page, block)}```", 1
        )
    return text


def _printed(page: Page, block: Block) -> str:
    lines = []
    for command, shown in commands(block.text):
        printed = page.command(command)
        if printed is None:
            return block.text
        lines.append(
            f"$ {page.resolved(command)}\n{shown if is_alike(shown, printed) else printed}"
        )
    return "".join(lines)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for path in map(Path, sys.argv[1:]):
        written = path.resolve()
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            sys.path.insert(0, folder)
            written.write_text(
                refreshed(Page(path.name, Path(folder), few=False), written.read_text())
            )
            os.chdir(before)
