"""The mutation score: the outcome of each of Cosmic Ray's mutants, and the reasons why some cannot be killed."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.statements import apply, changed_statement, statements

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """One change to one statement.

    Attributes:
        module: path of the module.
        outcome: `"killed"`, `"survived"` or `"incompetent"`; `"skipped"` where a filter left it out; `"not tried"`.
        statement: the innermost statement that changed, in the form of `statements.changed_statement`.
        changed: what it became.
        timed_out: whether it was killed because the tests took too long.
    """

    module: str
    outcome: str
    statement: str = ""
    changed: str = ""
    timed_out: bool = False

    @property
    def key(self) -> Key:
        """Identify the mutant independently of the module's formatting."""
        return self.module, self.statement, self.changed


def mutants(dump: Iterable[str], source: Callable[[str], str]) -> list[Mutant]:
    """Read what `cosmic-ray dump` prints: one mutant and its result a line.

    Args:
        dump: the lines.
        source: returns the text of a module, given its path as Cosmic Ray writes it.
    """
    found = []
    for text in dump:
        item, result = json.loads(text)
        module = item["mutations"][0]["module_path"]
        if result is None:
            found.append(Mutant(module, "not tried"))
        elif result["worker_outcome"] == "skipped":
            found.append(Mutant(module, "skipped"))
        else:
            before = source(module)
            changed = changed_statement(before, apply((result["diff"] or "").split("\n"), before))
            found.append(Mutant(module, result["test_outcome"], *changed, timed_out=result["output"] == "timeout"))
    return found


def explained(path: Path) -> dict[Key, str]:
    """Read the reasons: mutants that no test can tell from the module itself."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["explained"]
    return {
        (entry["module"], entry["statement"], changed): entry["reason"]
        for entry in entries
        for changed in entry["mutants"]
    }


def stale(reasons: dict[Key, str], source: Callable[[str], str | None]) -> list[Key]:
    """Return the keys of reasons for statements that their module no longer contains."""
    return [key for key in reasons if key[1] not in statements(source(key[0]) or "")]


def unexplained(found: Iterable[Mutant], reasons: dict[Key, str]) -> list[Mutant]:
    """Return the mutants that neither a test kills nor a reason explains."""
    return [m for m in found if m.outcome not in ("killed", "skipped") and m.key not in reasons]


def _row(name: str, found: Sequence[Mutant], reasons: dict[Key, str]) -> str:
    count = Counter(mutant.outcome for mutant in found)
    total = len(found) - count["skipped"]
    equivalent = sum(mutant.outcome == "survived" and mutant.key in reasons for mutant in found)
    slow = sum(mutant.timed_out for mutant in found)
    share = count["killed"] / (total - equivalent) if total > equivalent else 1.0
    return f"| {name} | {total} | {count['killed']} | {slow} | {equivalent} | {100 * share:.1f}% |"


def report(found: Sequence[Mutant], reasons: dict[Key, str], version: str) -> str:
    """Return the report in Markdown.

    Args:
        found: the mutants.
        reasons: why some cannot be killed.
        version: Cosmic Ray's.
    """
    modules = sorted({mutant.module for mutant in found})
    lines = [
        "# Mutation",
        "",
        "Does a test fail for every change to the code that compares, bounds and names faults? Made by",
        "",
        "```console",
        "tox -e mutation",
        "```",
        "",
        f"with Cosmic Ray {version}, in some hours on one core; configuration and reasons are in `mutation/`. "
        "The score is killed / (mutants - explained).",
        f"{sum(mutant.outcome == 'skipped' for mutant in found)} mutants of `|` are left out: annotations such as "
        "`X | None` are never evaluated, and no other `|` is there.",
        "",
        "| module | mutants | killed | of these by the time limit | explained | score |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_row(f"`{m}`", [mutant for mutant in found if mutant.module == m], reasons) for m in modules]
    lines += [_row("all", found, reasons), "", "## Explained", ""]
    survived = {mutant.key for mutant in found if mutant.outcome == "survived"}
    for module in modules:
        keys = [key for key in reasons if key[0] == module and key in survived]
        if keys:
            lines += [f"### `{module}`", ""]
        before = None
        for key in keys:
            if (key[1], reasons[key]) != before:
                lines.append(f"- `{key[1]}`: {reasons[key]}")
                before = key[1], reasons[key]
            lines.append(f"  - `{key[2]}`")
        if keys:
            lines.append("")
    if left := unexplained(found, reasons):
        lines += ["## Neither killed nor explained", ""]
        lines += [f"- `{m.module}`: `{m.statement}` became `{m.changed}` ({m.outcome})" for m in left]
    return "\n".join(lines).rstrip() + "\n"
