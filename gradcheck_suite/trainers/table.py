"""The answers as a table in Markdown, in a page whose other words are a person's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradcheck_suite.records.files import write_text
from gradcheck_suite.records.store import Record, read_records
from gradcheck_suite.schema.plan import plan_from_json
from gradcheck_suite.trainers import TRAINERS
from gradcheck_suite.trainers.study import HEAD, Answer

START, END = "<!-- table: written by `gradcheck-suite trainers` -->", "<!-- end of table -->"
PAGE = "trainers.md"
NAME_WIDTH = max(map(len, TRAINERS))
QUESTION_WIDTH = 22
"""Of the columns on the console; the names of heads are longer, and stand alone."""


def line(answer: Answer) -> str:
    """Return an answer on one line: `holds`, `VIOLATED` with the diagnosis and the smallest case, or that none is."""
    text = f"{answer.trainer.name:<{NAME_WIDTH}} {answer.trainer.status:<20} {answer.question.name:<{QUESTION_WIDTH}} "
    if answer.result is None:
        return f"{text}not asked"
    violation = answer.result.violation
    if violation is None:
        return f"{text}holds"
    return f"{text}VIOLATED  {violation.diagnosis:<14} {cut(violation.case.plan.to_json())}"


def closing(answers: Sequence[Answer]) -> list[str]:
    """Return what stands below the lines: how to read them, what was not asked and why, who holds."""
    lines = []
    if any(_violated(answer) for answer in answers):
        lines.append("after a diagnosis: the smallest case, as items of its micro-batches, windows apart by |, and K")
    not_asked = {(a.trainer.name, a.why): None for a in answers if a.result is None}
    lines += [f"{name} was not asked: {why}" for name, why in not_asked]
    asked = {a.trainer.name: None for a in answers if a.result is not None}
    violated = {a.trainer.name: None for a in answers if _violated(a)}
    if asked:
        lines.append(_holding(list(asked), list(violated)))
    return lines


def _violated(answer: Answer) -> bool:
    return answer.result is not None and answer.result.violation is not None


def _holding(asked: Sequence[str], violated: Sequence[str]) -> str:
    holding = [name for name in asked if name not in violated]
    text = f"{len(holding)} of {len(asked)} trainers hold on every question" if len(asked) > 1 else ""
    if not text:
        return f"{asked[0]} {'is violated on some question' if violated else 'holds on every question'}"
    return f"{text}: {', '.join(holding)}" if holding else text


def write_table(reports: Path) -> Path:
    """Write the latest answer of every trainer, version and question between the page's markers; return the page."""
    records, _ = read_records(reports, "trainer")
    page = reports / PAGE
    block = f"{START}\n\n{table(records)}\n\n{END}"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if START in text and END in text:
        before, _, rest = text.partition(START)
        text = before + block + rest.partition(END)[2]
    else:
        text = f"{text.rstrip()}\n\n{block}\n".lstrip()
    write_text(page, text)
    return page


def table(records: Sequence[Record]) -> str:
    """Return the tables: a row for each trainer and version, a column for each question; then a row for each head."""
    heads = [record for record in records if record.data["question"].startswith(HEAD)]
    others = [record for record in records if not record.data["question"].startswith(HEAD)]
    parts = [_trainers(others)] if others else []
    parts += [_heads(heads)] if heads else []
    return "\n\n".join(parts)


def _heads(records: Sequence[Record]) -> str:
    latest = {(r.data["question"].removeprefix(HEAD), r.data["version"]): r.data for r in records}
    lines = [_row(["head", "version", "verdict", "what its gradient is"]), _row(["---"] * 4)]
    for (head, _), data in latest.items():
        violation = data["result"] and data["result"]["violation"]
        said = violation["explanation"].partition(": ")[0] if violation else ""
        lines.append(_row([f"`{head}`", f"{data['package']} {data['version']}", _cell(data), said]))
    return "\n".join(lines)


def _trainers(records: Sequence[Record]) -> str:
    latest: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    columns: dict[str, None] = {}
    for record in records:
        data = record.data
        latest.setdefault((data["trainer"], data["version"]), {})[data["question"]] = data
        columns[data["question"]] = None
    order = list(TRAINERS)
    rows = sorted(latest.items(), key=lambda row: (order.index(row[0][0]) if row[0][0] in order else 99, row[0][1]))
    lines = [_row(["trainer", "version", *columns]), _row(["---"] * (2 + len(columns)))]
    for (trainer, _), answers in rows:
        version = next(iter(answers.values()))
        lines.append(
            _row(
                [
                    f"`{trainer}`",
                    f"{version['package']} {version['version']}",
                    *(_cell(answers.get(c)) for c in columns),
                ]
            )
        )
    return "\n".join(lines)


def _cell(data: Mapping[str, Any] | None) -> str:
    if data is None or data["result"] is None:
        return ""
    violation = data["result"]["violation"]
    if violation is None:
        return "holds"
    return f"**{violation['diagnosis']}** {cut(violation['case']['plan'])}"


def cut(data: Mapping[str, Any]) -> str:
    """Return a plan, as data, in a few characters: items of the micro-batches, windows apart, K, epochs."""
    plan = plan_from_json(data)
    windows = " | ".join(" ".join(str(plan.micro_batches[j]) for j in window) for window in plan.windows)
    epochs = f", {plan.epochs} epochs" if plan.epochs > 1 else ""
    return f"[{windows}] K={plan.accumulation_steps}{epochs}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
