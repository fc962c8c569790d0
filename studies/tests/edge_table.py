"""What `verify` says of known loops, one row each: verdict, kind, name, runs of the loop.

Compares two such tables.

    python -m studies.tests.edge_table write TABLE.json [--seed 0] [--examples 200] [--shard 0/2]
    python -m studies.tests.edge_table compare BEFORE.json AFTER.json

Run it before and after a change to the search or to the names: a loop that was found must be found,
a sound loop must hold, and a name may change to the one that took it in, or to a right one. Not a
test: the whole table takes minutes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradcheck_suite import check, verify
from gradcheck_suite.core.contract import Loop, Problem
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.results import ViolationKind
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.run.ranks import kept_ranks
from studies.zoo import BUGS
from tests.faults.misread import RIGHT
from tests.loops.test_sound_loops import LOOPS
from tests.verification.planted import LONG, SIZES

GENERAL = frozenset(
    (
        "",
        "not-linear",
        "unrecognised-weights",
        "unequal-items",
        "no-gradient",
        "wrong-step-count",
        "partial-gradient",
    )
)
"""Names that say no more than that something is wrong, or where."""

KINDS = get_args(ViolationKind)


@dataclass(frozen=True)
class Subject:
    """A loop whose verdict is frozen.

    Attributes:
        name: of the row.
        loop: the loop.
        wanted: `kind/diagnosis` of each right name; empty for a sound loop.
        problem: that it trains, if it is not the generated ones.
        assumes: what it relies on.
        ranks: number of ranks.
        examples: most cases; None for what the command asks for.
    """

    name: str
    loop: Loop
    wanted: frozenset[str] = frozenset()
    problem: Problem | None = None
    assumes: tuple[str, ...] = ()
    ranks: int = 1
    examples: int | None = None


def subjects() -> Iterator[Subject]:
    """Yield the zoo's bugs, further faults and the sound loops."""
    for bug in BUGS.values():
        yield Subject(f"zoo/{bug.name}", bug.loop, bug.wanted, bug.problem, bug.assumes, bug.ranks)
    for name, (loop, wanted_name, *_) in {**SIZES, **LONG}.items():
        yield Subject(f"probe/{name}", loop, frozenset(f"{kind}/{wanted_name}" for kind in KINDS))
    for loop, right in RIGHT.items():
        yield Subject(f"misread/{loop.__name__}", loop, right)
    for name, loop in BUILT_IN.items():
        yield Subject(f"sound/{name}", loop, examples=40)
    for loop in LOOPS:
        yield Subject(f"sound/{loop.__name__}", loop, examples=40)


def row(subject: Subject, seed: int, examples: int) -> dict[str, Any]:
    """Verify one loop and return its row."""
    runs = 0

    @functools.wraps(subject.loop)
    def counted(run: Any) -> None:
        nonlocal runs
        runs += 1
        subject.loop(run)

    options = VerifyOptions(
        examples=subject.examples or examples,
        seed=seed,
        assumes=subject.assumes,
        ranks=subject.ranks,
    )
    # several ranks run in processes of their own, where nobody counts
    loop = counted if subject.ranks == 1 else subject.loop
    began = time.perf_counter()
    with kept_ranks():
        result = verify(
            loop, options, name=subject.name, problem=subject.problem, problem_name=subject.name
        )
        found = result.violation
        kept = runs
        again = None
        if found is not None and subject.ranks == 1:
            shown = check(
                loop, found.case, problem=subject.problem, assumes=subject.assumes
            ).violation
            again = shown and f"{shown.kind}/{shown.diagnosis}"
    return {
        "loop": subject.name,
        "ranks": subject.ranks,
        "verdict": "holds" if result.holds else "violated",
        "name": found and f"{found.kind}/{found.diagnosis}",
        "wanted": sorted(subject.wanted),
        "again": again,
        "plan": found and repr(found.case.plan),
        "layers": len(found.case.spec.layer_kinds) if found and found.case.spec else None,
        "runs": kept if subject.ranks == 1 else None,
        "found_after": found and found.found_after,
        "says": found and found.explanation,
        "seconds": round(time.perf_counter() - began, 2),
    }


def mark(row: dict[str, Any]) -> str:
    """Return whether a row is right, general, misleading, missed, blamed or held."""
    if row["verdict"] == "holds":
        return "missed" if row["wanted"] else "held"
    if not row["wanted"]:
        return "blamed"
    kind, _, names = row["name"].partition("/")
    if any(f"{kind}/{name}" in row["wanted"] for name in (names, *names.split(" or "))):
        return "right"
    return "general" if names in GENERAL else "misleading"


def write(path: Path, seed: int, examples: int, shard: str, only: str) -> None:
    """Write the rows of a shard."""
    number, of = map(int, shard.split("/"))
    rows = []
    chosen = [subject for subject in subjects() if only in subject.name]
    for subject in chosen[number::of]:
        rows.append(row(subject, seed, examples))
        path.write_text(json.dumps(rows, indent=1))
    print(summary(rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how many rows are right, general and so on, and the mean number of runs of a loop that
    is found.
    """
    counts = Counter(mark(row) for row in rows)
    runs = [row["runs"] for row in rows if row["runs"] is not None and row["verdict"] == "violated"]
    mean = sum(runs) / max(1, len(runs))
    seconds = sum(row["seconds"] for row in rows)
    return f"{dict(counts)}; runs of a loop that is found: mean {mean:.1f}; {seconds:.0f} s"


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """Print what differs; return how many loops are missed, blamed or misnamed that were not."""
    old, worse = {row["loop"]: row for row in before}, 0
    for new in after:
        was = old.get(new["loop"])
        if was is None or (was["name"] == new["name"] and mark(was) == mark(new)):
            continue
        marks = mark(was), mark(new)
        bad = marks[1] in ("missed", "blamed") or (
            marks[1] == "misleading" and marks[0] != "misleading"
        )
        worse += bad and marks[0] != marks[1]
        print(
            f"{'! ' if bad else '  '}{new['loop']}: {was['name']} ({marks[0]}) -> {new['name']} ({marks[1]})"
        )
    print(f"before: {summary(before)}\nafter:  {summary(after)}")
    return worse


def main() -> int:
    """Write a table or compare two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("table", type=Path)
    writing.add_argument("--seed", type=int, default=0)
    writing.add_argument("--examples", type=int, default=200)
    writing.add_argument("--shard", default="0/1")
    writing.add_argument("--only", default="")
    comparing = commands.add_parser("compare")
    comparing.add_argument("tables", type=Path, nargs=2)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.table, arguments.seed, arguments.examples, arguments.shard, arguments.only)
        return 0
    return min(1, compare(*(json.loads(table.read_text()) for table in arguments.tables)))


if __name__ == "__main__":
    sys.exit(main())
