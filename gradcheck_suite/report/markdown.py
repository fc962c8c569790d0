"""The report as Markdown."""

from __future__ import annotations

import re

from gradcheck_suite.report.content import Report, Section, Table, shown


def render(report: Report) -> str:
    """Return the report as one Markdown document, the drawings as their descriptions."""
    lines = [f"# {_text(report.title)}", "", f"Made {report.made}.", ""]
    lines += [f"- **{_text(question)}** {_text(answer)}" for question, answer, _ in report.answers]
    for section in report.sections:
        lines += _section(section)
    lines += ["", "## Environment", ""]
    for environment in report.environments:
        lines += [", ".join(f"{_text(name)}: {_text(value)}" for name, value in environment), ""]
    if report.problems:
        lines += ["## Records left out", "", *(f"- {_text(problem)}" for problem in report.problems), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = ["", f"## {_text(section.title)}", ""]
    if section.missing:
        lines += [f"> {_text(section.missing)}", ""]
    for paragraph in section.text:
        lines += [_text(paragraph), ""]
    for table in section.tables:
        lines += _table(table)
    for figure in section.figures:
        lines += [f"Plot: {_text(figure.alt)}. {_text(figure.caption)}", ""]
    if section.commands:
        lines += ["```console", *section.commands, "```"]
    return lines


def _table(table: Table) -> list[str]:
    lines = [f"**{_text(table.caption)}**", ""]
    lines.append(f"| {' | '.join(map(_cell, table.columns))} |")
    lines.append(f"| {' | '.join('---' for _ in table.columns)} |")
    lines += [f"| {' | '.join(_cell(shown(cell)) for cell in row)} |" for row in table.rows]
    return [*lines, "", *([_text(table.note), ""] if table.note else [])]


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|").replace("\n", "<br>")


def _text(text: str) -> str:
    """Return text in which Markdown and HTML see nothing but text."""
    return re.sub(r"([\\`*_{}\[\]<>#])", r"\\\1", text)
