"""Draws the README's picture of a verdict, `docs/_static/verdict.svg`: `python docs/verdict_picture.py`.

It runs `gradcheck-suite verify` on the README's `my_loop.py` and renders what the command prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradcheck_suite.__main__ import main

COMMAND = "gradcheck-suite verify my_loop.py:train"
LEFT_OUT = re.compile(r"^    (@example|stored|script|replay)")
"""Lines that name the stored case: too long for a picture."""
STYLES = {r"VIOLATED": "bold red", r"mean-of-means": "bold yellow", r"^\$ .*$": "bold"}
WIDTH = 118
ROOT = Path(__file__).parent.parent


def printed() -> str:
    """Return what the command prints on the README's first loop."""
    loop = re.search(r"```python\n(# my_loop\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert loop is not None
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(said):
        Path("my_loop.py").write_text(loop[1])
        main(COMMAND.split()[1:])
    return said.getvalue()


def picture(text: str) -> str:
    """Return an SVG of a console in which the command printed this text."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    lines = [f"$ {COMMAND}", *(line for line in text.splitlines() if not LEFT_OUT.match(line))]
    shown = Text("\n".join(lines))
    for pattern, style in STYLES.items():
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(shown)
    return console.export_svg(title="gradcheck-suite", unique_id="verdict")


if __name__ == "__main__":
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.gettempdir()
    (ROOT / "docs" / "_static" / "verdict.svg").write_text(picture(printed()))
