"""The mutation score: the outcome of each of Cosmic Ray's mutants, and the reasons why some cannot
be killed.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutation.statements import statements

Key = tuple[str, str, str]
MOST_SHOWN = 300
"""Characters of a statement."""
_JUDGE = "elements fitted_weights gradient naming probe reruns sizes steps weights"
_OF_AUDITS = tuple(
    f"tests/auditing/test_{name}.py"
    for name in ("command", "in_python", "losses", "ranks", "recorder", "scripts", "recomputation")
)
TARGETS = {
    "core/comparison": ("tests/core", "tests/judge/test_weights.py"),
    **{
        f"judge/{module}": (
            "tests/judge",
            "tests/verification/test_ranks.py",
            "tests/verification/test_battery.py",
            "properties/test_aliasing.py",
            "properties/test_readout.py",
        )
        for module in _JUDGE.split()
    },
    **{f"reference/{module}": ("tests/reference",) for module in ("large_batch", "rounding")},
    **{
        f"auditing/{module}": _OF_AUDITS for module in ("judge", "sums", "weights", "recomputation")
    },
}
"""The modules, each with the folders and files of tests that are to notice its mutants."""


def path(target: str) -> str:
    """Return where a module is."""
    return f"gradcheck_suite/{target}.py"


@dataclass(frozen=True)
class Mutant:
    """One change to one statement.

    Attributes:
        module: path of the module.
        operator: Cosmic Ray's name of the change.
        occurrence: which of the places in the module where the operator applies.
        statement: the innermost statement that changed, in the form of
            `statements.changed_statement`.
        changed: what it became.
        outcome: `"killed"`; `"time limit"` where the tests took too long, which kills it, too;
            `"survived"`; `"not executed"` where no test executes the statement.
    """

    module: str
    operator: str
    occurrence: int
    statement: str
    changed: str
    outcome: str

    @property
    def key(self) -> Key:
        """Identify the mutant independently of the module's formatting."""
        return self.module, self.statement, self.changed

    @property
    def is_killed(self) -> bool:
        """Whether a test noticed it."""
        return self.outcome in ("killed", "time limit")


@dataclass(frozen=True)
class Tried:
    """What a sample of a module's mutants came to.

    Attributes:
        commit: that was checked out.
        seed: of the sample.
        total: how many mutants the module has.
        source: its text.
        mutants: the sample.
    """

    commit: str
    seed: int
    total: int
    source: str
    mutants: list[Mutant]


def explained(file: Path) -> dict[Key, str]:
    """Read the reasons: mutants that no test can tell from the module itself."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["explained"]
    return {
        (entry["module"], entry["statement"], changed): entry["reason"]
        for entry in entries
        for changed in entry["mutants"]
    }


def stale(reasons: Iterable[Key], root: Path) -> list[Key]:
    """Return the keys of reasons for statements that their module no longer contains."""
    return [
        key
        for key in reasons
        if key[1] not in statements((root / key[0]).read_text(encoding="utf-8"))
    ]


def unexplained(found: Iterable[Mutant], reasons: dict[Key, str]) -> list[Mutant]:
    """Return the mutants that neither a test kills nor a reason explains."""
    return [m for m in found if not m.is_killed and m.key not in reasons]


def _row(name: str, total: int, found: list[Mutant], reasons: dict[Key, str], commit: str) -> str:
    count = Counter(mutant.outcome for mutant in found)
    killed = sum(mutant.is_killed for mutant in found)
    left = len(unexplained(found, reasons))
    share = f"{100 * killed / (killed + left):.1f}%" if killed + left else ""
    numbers = (total, len(found), killed, count["time limit"], len(found) - killed - left, left)
    return f"| {name} | {' | '.join(map(str, numbers))} | {share} | {commit} |"


def _change(before: str, after: str) -> tuple[str, str]:
    """Return a statement and what it became, of long ones the part that changed."""
    if len(before) > MOST_SHOWN:
        at = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        start = max(0, at - MOST_SHOWN // 2)
        before, after = (f"...{text[start : start + MOST_SHOWN]}..." for text in (before, after))
    return before, after


def report(tried: dict[str, Tried], reasons: dict[Key, str], version: str) -> str:
    """Return the report in Markdown.

    Args:
        tried: what was tried, by module.
        reasons: why some mutants cannot be killed.
        version: Cosmic Ray's.
    """
    everything = [mutant for of in tried.values() for mutant in of.mutants]
    seeds = sorted({of.seed for of in tried.values()})
    most = max(len(of.mutants) for of in tried.values())
    lines = [
        "# Mutation",
        "",
        "Does a test fail for every change to the code that compares, bounds and names faults? Made by",
        "",
        "```console",
        "tox -e mutation",
        "```",
        "",
        f"with Cosmic Ray {version}: a random sample of at most {most} mutants of each module, of seed "
        f"{', '.join(map(str, seeds))}; `--sample 0` tries all. The last column says at which commit; what was killed "
        "before, `--again` does not try again. A mutant is tried by those of the module's tests, named in",
        "`mutation/score.py`, that execute the changed statement. Mutants that no test may tell are left out: of "
        "annotations and signatures, an order of names, an operator of bits in place of arithmetic.",
        "The score is killed / (tried - explained). Survivors get a test, so it says what "
        "is left of this sample; a new sample has others.",
        "",
        "| module | mutants | tried | killed | of these by the time limit | explained | left | score | commit |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [
        _row(f"`{name}`", of.total, of.mutants, reasons, of.commit)
        for name, of in sorted(tried.items())
    ]
    lines.append(_row("all", sum(of.total for of in tried.values()), everything, reasons, ""))
    survived = {mutant.key for mutant in everything if not mutant.is_killed}
    shown: dict[tuple[str, str, str], list[str]] = {}
    for key, reason in reasons.items():
        if key in survived:
            statement, changed = _change(*key[1:])
            shown.setdefault((key[0], statement, reason), []).append(changed)
    if shown:
        lines += ["", "## Explained", ""]
    for (module, statement, reason), texts in shown.items():
        lines.append(f"- `{module}`: `{statement}`: {reason}")
        lines += [f"  - `{text}`" for text in texts]
    if left := unexplained(everything, reasons):
        lines += ["", "## Neither killed nor explained", ""]
        changes = ((m, *_change(m.statement, m.changed)) for m in left)
        lines += [
            f"- `{m.module}`: `{before}` became `{after}` ({m.outcome})"
            for m, before, after in changes
        ]
    return "\n".join(lines) + "\n"


def write_report(
    file: Path, tried: dict[str, Tried], reasons: dict[Key, str], version: str
) -> None:
    """Write the report if every module was tried.

    Else say which were not, and leave the file as it is.
    """
    if untried := [target for target in TARGETS if target not in tried]:
        print(f"{file.name} stays as it is: not tried here: {', '.join(untried)}")
    else:
        file.write_text(report(tried, reasons, version), encoding="utf-8")
