"""The short story as Markdown, for a page on GitHub: answers, pictures, claims, violations, where it all comes from."""

from __future__ import annotations

import re
from collections.abc import Callable

from gradcheck_suite.report.content import Answer, Claim, Figure, Matrix, Report, Section
from gradcheck_suite.report.provenance import Source

PICTURES = (
    "coverage-splits",
    "zoo-totals",
    "detection-float64",
    "detection-bfloat16",
    "architectures",
    "atlas-agreement",
)
"""The plots of sections that stand in the story."""
Place = Callable[[Figure], str]
"""Figure -> the path of its picture, seen from the Markdown file."""


def pictures(report: Report) -> list[Figure]:
    """Return the figures that the Markdown includes."""
    shown = [figure for answer in report.answers for figure in answer.figures]
    return shown + [figure for section in report.sections for figure in section.figures if figure.key in PICTURES]


def render(report: Report, place: Place) -> str:
    """Return the report as one Markdown document of at most 300 lines.

    Args:
        report: the report.
        place: returns where a figure's picture is.
    """
    lines = [f"# {text(report.title)}", "", f"Made {report.made}. `report.html` has every figure and table.", ""]
    lines += [f"{text(report.subtitle)}.", ""]
    for answer in report.answers:
        lines += _answer(answer, place)
    for section in report.sections:
        if section.tab != "environment" and section.key != "claims":
            lines += _section(section, place)
    if report.violations:
        lines += ["", "## Violations", ""]
        lines += [f"- {text(page.loop)}: {text(page.title)}. {text(page.explanation)}" for page in report.violations]
    if report.problems:
        lines += ["", "## Left out", "", *(f"- {text(problem)}" for problem in report.problems)]
    return "\n".join(lines).rstrip() + "\n"


def _answer(answer: Answer, place: Place) -> list[str]:
    lines = ["", f"## {text(answer.question)}", "", text(answer.answer), ""]
    lines += _matrix(answer.matrix) if answer.matrix else []
    for figure in answer.figures:
        lines += _picture(figure, place)
    lines += _claims(answer.claims)
    return [*lines, *_sources(answer.sources)]


def _section(section: Section, place: Place) -> list[str]:
    lines = [f"## {text(section.title)}", ""]
    if section.missing:
        lines += [f"> {text(section.missing)}", ""]
    lines += [line for paragraph in section.text[:2] for line in (text(paragraph), "")]
    if section.key != "verified":
        for matrix in section.matrices:
            lines += _matrix(matrix)
    for figure in section.figures:
        lines += _picture(figure, place) if figure.key in PICTURES else []
    lines += [f"- {text(document.title)}" for document in section.documents]
    return [*lines, *_sources(section.sources)]


def _matrix(matrix: Matrix) -> list[str]:
    lines = [f"{text(matrix.caption)}:", ""]
    lines.append(f"| {' | '.join(map(_cell, (matrix.corner, *matrix.columns)))} |")
    lines.append(f"|{' --- |' * (1 + len(matrix.columns))}")
    for name, cells in matrix.rows:
        lines.append(f"| {' | '.join(map(_cell, (name, *(', '.join(filter(None, said)) for _, said in cells))))} |")
    return [*lines, "", *(f"- {text(note)}" for note in matrix.notes), *([""] if matrix.notes else [])]


def _claims(claims: tuple[Claim, ...]) -> list[str]:
    if not claims:
        return []
    rows = (f"| {_cell(claim.number)} | {_cell(claim.text)} | {_cell(claim.verdict)} |" for claim in claims)
    return ["| | claim | verdict |", "| --- | --- | --- |", *rows, ""]


def _picture(figure: Figure, place: Place) -> list[str]:
    return [f"![{text(figure.alt)}]({place(figure)})", "", text(figure.caption), ""]


def _sources(sources: tuple[Source, ...]) -> list[str]:
    if not sources:
        return []
    newest = sources[0]
    said = [f"`{code(newest.command)}`" if newest.command else "command unknown", newest.date or "date unknown"]
    said += [f"commit {newest.commit}" if newest.commit else "commit unknown", newest.machine or "machine unknown"]
    marks = ["older than the code it speaks of"] if any(source.older for source in sources) else []
    marks += ["uncommitted changes"] if any(source.unclean for source in sources) else []
    more = f"; {len(sources) - 1} more in `report.html`" if len(sources) > 1 else ""
    return [f"<sub>{said[0]}, {', '.join(map(text, said[1:]))}{more}{''.join(f'. **{m}**' for m in marks)}</sub>", ""]


def _cell(content: str) -> str:
    return text(content).replace("|", "\\|").replace("\n", "<br>")


def code(content: str) -> str:
    """Return text that may stand between backticks inside of HTML."""
    return re.sub(r"[`\n<>]", " ", content)


def text(content: str) -> str:
    """Return text in which Markdown and HTML see nothing but text; backticks in pairs stay code."""
    parts = re.split(r"(`[^`\n<>|]+`)", content)
    return "".join(p if i % 2 else re.sub(r"([\\`*_{}\[\]<>#])", r"\\\1", p) for i, p in enumerate(parts))
