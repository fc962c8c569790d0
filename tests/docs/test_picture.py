"""The README's picture shows the output that the guide shows."""

from __future__ import annotations

import html
import re
import runpy

from tests.docs.pages import ROOT


def test_the_picture_has_every_line_of_the_guides_first_verdict():
    drawing = runpy.run_path(str(ROOT / "docs" / "verdict_picture.py"))
    texts = re.findall(r"<text[^>]*>(.*?)</text>", drawing["PICTURE"].read_text())
    drawn = re.sub(r"\s", "", html.unescape("".join(texts)))
    for line in drawing["shown"]().splitlines():
        assert re.sub(r"\s", "", line) in drawn, f"run `python docs/verdict_picture.py`: {line}"
