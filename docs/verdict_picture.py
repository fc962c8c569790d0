"""Draws the README's picture, `docs/_static/verdict.svg`: `python docs/verdict_picture.py`.

It renders the first output that `docs/check-my-loop.md` shows, which `tests/docs` compares with what `verify` prints.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
PICTURE = DOCS / "_static" / "verdict.svg"
STYLES = {r"VIOLATED": "bold red", r"(?<=: )mean-of-means(?=: )": "bold yellow", r"^\$ .*$": "bold"}
WIDTH = 118


def shown() -> str:
    """Return the first command of the page and its output, without the lines that name the stored case."""
    block = re.search(r"```console\n(.*?)```", (DOCS / "check-my-loop.md").read_text(), re.DOTALL)
    assert block is not None
    left_out = re.compile(r"    (@example|stored|script|replay)")
    return "\n".join(line for line in block[1].splitlines() if not left_out.match(line))


def picture(text: str) -> str:
    """Return an SVG of a console with this text."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    styled = Text(text)
    for pattern, style in STYLES.items():
        styled.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(styled)
    return console.export_svg(title="gradcheck-suite", unique_id="verdict")


if __name__ == "__main__":
    PICTURE.write_text(picture(shown()))
