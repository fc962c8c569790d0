"""Takes the README's pictures of the report and of a violation's page: `python docs/screenshots.py`.

It needs Chromium and playwright, and `reports/report.html`, which `python -m studies report` writes.
The violation is that of the loop in `docs/check-my-loop.md`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
PICTURES = DOCS / "_static"
REPORT = DOCS.parent / "reports" / "report.html"


def violation(folder: Path) -> Path:
    """Verify the guide's first loop in a folder, and return the page that this writes."""
    found = re.search(
        r"```python\n# my_loop\.py\n(.*?)```", (DOCS / "check-my-loop.md").read_text(), re.DOTALL
    )
    assert found is not None
    (folder / "my_loop.py").write_text(found[1])
    command = [
        sys.executable,
        "-m",
        "gradcheck_suite",
        "verify",
        "my_loop.py:train",
        "--html",
        "violation.html",
    ]
    subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return folder / "violation.html"


def notebook() -> str:
    """Return what a cell of the page on notebooks shows for its audit."""
    cells = re.findall(r"```python\n(.*?)```", (DOCS / "notebooks.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells[:2], start=1):
        exec(compile(cell, f"Cell In[{number}]", "exec"), names)
    return f"<body style='font: 14px sans-serif; margin: 12px'>{names['audit'].result._repr_html_()}</body>"


def main() -> None:
    """Take the pictures, as a laptop shows the pages."""
    with sync_playwright() as running, tempfile.TemporaryDirectory() as folder:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, path in (("report", REPORT), ("violation", violation(Path(folder)))):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(path.resolve().as_uri())
            page.evaluate("() => window.drawnPlots")
            page.screenshot(path=PICTURES / f"{name}.png")
        page = browser.new_page(viewport={"width": 1000, "height": 200})
        page.set_content(notebook())
        page.screenshot(path=PICTURES / "notebook.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
