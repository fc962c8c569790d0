"""The mutation score: what Cosmic Ray's mutants came to, beside the reasons why some cannot be killed."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """One change to one line.

    Attributes:
        module: path of the module.
        outcome: `"killed"`, `"survived"` or `"incompetent"`; `"skipped"` where a filter left it out; `"not tried"`.
        line: the line, or where there are several, the first, without its indentation.
        changed: what it became; empty where it was removed.
        timed_out: whether it was killed because the tests took too long.
    """

    module: str
    outcome: str
    line: str = ""
    changed: str = ""
    timed_out: bool = False

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.module, self.line, self.changed


def _line(diff: Sequence[str], sign: str) -> str:
    changed = [line[1:].strip() for line in diff if line.startswith(sign) and not line.startswith(3 * sign)]
    return changed[0] if changed else ""


def mutants(dump: Iterable[str]) -> list[Mutant]:
    """Read what `cosmic-ray dump` prints: one mutant and its result a line."""
    found = []
    for text in dump:
        item, result = json.loads(text)
        module = item["mutations"][0]["module_path"]
        if result is None:
            found.append(Mutant(module, "not tried"))
        elif result["worker_outcome"] == "skipped":
            found.append(Mutant(module, "skipped"))
        else:
            diff = (result["diff"] or "").split("\n")
            timed_out = result["output"] == "timeout"
            found.append(Mutant(module, result["test_outcome"], _line(diff, "-"), _line(diff, "+"), timed_out))
    return found


def explained(path: Path) -> dict[Key, str]:
    """Read the reasons: mutants that no test can tell from the module itself."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["explained"]
    return {
        (entry["module"], entry["line"], changed): entry["reason"] for entry in entries for changed in entry["mutants"]
    }


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
    """Return the report in Markdown; `version` is Cosmic Ray's."""
    modules = sorted({mutant.module for mutant in found})
    lines = [
        "# Mutation",
        "",
        "Is every change to the code that compares, bounds, reads and plans noticed by a test? Made by",
        "",
        "```console",
        "tox -e mutation",
        "```",
        "",
        f"with Cosmic Ray {version}, in about an hour on one core; configuration and reasons are in `mutation/`. "
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
            lines.append(f"  - `{key[2] or 'removed'}`")
        if keys:
            lines.append("")
    if left := unexplained(found, reasons):
        lines += ["## Neither killed nor explained", ""]
        lines += [f"- `{m.module}`: `{m.line}` became `{m.changed or 'nothing'}` ({m.outcome})" for m in left]
    return "\n".join(lines).rstrip() + "\n"
