"""Findings in trainers and frameworks that people wrote down: one Markdown file each under `findings/`."""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.report.content import Document, Section

FOLDER = "findings"


def findings(reports: Path) -> Section | None:
    """Return the section of all findings under a reports folder; None where there is none."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((reports / FOLDER).glob("*.md"))]
    if not texts:
        return None
    heads = [text.lstrip().partition("\n") for text in texts]
    documents = tuple(Document(head.lstrip("# ").strip(), rest.strip()) for head, _, rest in heads)
    text = f"{len(documents)} findings, each with a script that shows it without the suite, its cause and a fix."
    return Section("findings", "Findings", "trainers", (text,), documents=documents)
